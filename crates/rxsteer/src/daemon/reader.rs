// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tables of flows, read and understood.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_getres};

use crate::api::flows::{Entry, Flows, LIMIT_MAX, Location, Most, Query, Reason};
use crate::datapath::Datapath;
use crate::datapath::flow::{Flow, FlowHash};
use crate::datapath::load;
use crate::datapath::native;
use crate::datapath::policy::Policy;
use crate::datapath::rps_map::RpsMap;
use crate::types::{rps_dev_flow, rx_policy, rx_queue};

/// How long the tables are read: who asks waits for 2 seconds, and backlogs may have to be made.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// What decides where a flow wants to be. CPUs may be offline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Where its application was last seen; `None` if that is not known, or not asked for.
    pub application: Option<u32>,
    /// That CPU is offline.
    pub application_offline: bool,
    /// It polls the queue itself, on whatever CPU.
    pub application_polls: bool,
    /// What the `rps_map` says; `None` for "here".
    pub rps: Option<u32>,
    /// That CPU is offline.
    pub rps_offline: bool,
    /// Which CPU polls the queue, if that has been seen.
    pub polling: Option<u32>,
    /// Policy off.
    pub off: bool,
}

impl Hints {
    /// A CPU as a location, as `rx_usable()` in bpf/core/policy.h has it. The CPU that polls is never left
    /// for itself: a flow that wants it wants INLINE. Which CPU polls is known only from the last
    /// packet that was processed INLINE, so a flow that is at the CPU that it wants is said to want
    /// just that.
    fn usable(&self, cpu: Option<u32>, offline: bool, now: Location) -> Option<Location> {
        let cpu = cpu.filter(|_| !offline || cpu == self.polling)?;
        let here = self.polling == Some(cpu) && now != Location::Cpu(cpu);
        Some(if here {
            Location::Inline
        } else {
            Location::Cpu(cpu)
        })
    }

    /// Where the flow's next packet will want to be by the tables alone, as `rx_base()` in
    /// bpf/core/policy.h has it, and why.
    pub fn wanted(&self, now: Location) -> (Location, Reason) {
        if self.application_polls {
            return (Location::Inline, Reason::BusyPoll);
        }
        if let Some(location) = self.usable(self.application, self.application_offline, now) {
            return (location, Reason::Application);
        }
        match self.usable(self.rps, self.rps_offline, now) {
            Some(location) => (location, Reason::Rps),
            None if self.off => (Location::Inline, Reason::PolicyOff),
            None => (Location::Inline, Reason::Offline),
        }
    }

    /// The same where the load is looked at: what was decided for the flow, unless the CPU is
    /// `offline` now.
    pub fn decided(&self, flow: &rps_dev_flow, offline: bool, now: Location) -> (Location, Reason) {
        let tables = self.wanted(now);
        let wanted = match Location::from_raw(flow.wanted) {
            Some(Location::Cpu(cpu)) => self.usable(Some(cpu), offline, now),
            other => other,
        };
        match (wanted, Reason::from_raw(flow.reason)) {
            (None, _) => tables,
            (Some(Location::Inline), _) if self.application_polls => tables,
            (Some(wanted), Some(reason)) => (wanted, reason),
            (Some(wanted), None) if wanted == tables.0 => tables,
            (Some(wanted), None) => (wanted, Reason::Undecided),
        }
    }
}

/// A receive queue, as it is while a question is answered.
pub(crate) struct Queue {
    pub(crate) device: String,
    /// Of its device.
    pub(crate) number: u32,
    /// Over all devices.
    pub(crate) index: u32,
    pub(crate) counters: rx_queue,
    pub(crate) map: RpsMap,
}

/// The tables of a running rxsteer, and what is needed to understand them.
pub struct Reader<'a> {
    pub(crate) datapath: &'a Datapath,
    pub(crate) queues: Vec<Queue>,
    pub(crate) policy: Policy,
    /// What can't be followed on this host, in words.
    pub(crate) unseen: &'a [String],
}

impl<'a> Reader<'a> {
    /// `devices`: their names and numbers of queues, in the data path's order.
    ///
    /// # Errors
    /// When the maps can't be read.
    pub fn new(
        datapath: &'a Datapath,
        devices: impl IntoIterator<Item = (&'a str, u32)>,
        policy: Policy,
        unseen: &'a [String],
    ) -> Result<Self> {
        let queues = devices
            .into_iter()
            .flat_map(|(device, queues)| (0..queues).map(move |number| (device, number)))
            .zip(0..)
            .map(|((device, number), index)| {
                Ok(Queue {
                    device: device.to_owned(),
                    number,
                    index,
                    counters: datapath.rx_queue(index)?,
                    map: datapath.rps_map(index)?,
                })
            });
        Ok(Self {
            queues: queues.collect::<Result<_>>()?,
            datapath,
            policy,
            unseen,
        })
    }

    /// The flows that are asked for, as far as the tables can be read within `patience`.
    ///
    /// # Errors
    /// When the maps can't be read.
    pub fn flows(&self, query: &Query, patience: Duration) -> Result<Flows> {
        let deadline = Instant::now() + patience;
        let per_queue = self.datapath.tables().flow_cnt();
        let limit = query.limit.min(LIMIT_MAX);
        let mut most = BinaryHeap::new();
        let (mut total, mut slots_read) = (0, 0);
        let all = 0..per_queue * self.datapath.nr_queues();
        self.datapath.tables().dev_flows(all, |slot, flow| {
            if slot % 4096 == 0 && Instant::now() > deadline {
                return Ok(false);
            }
            slots_read += 1;
            let queue = &self.queues[(slot / per_queue) as usize];
            let other_device = query.device.as_ref().is_some_and(|d| *d != queue.device);
            let rank = match query.most {
                Most::Packets => Some(flow.nr_packets),
                Most::Dropped => Some(flow.nr_dropped).filter(|dropped| *dropped > 0),
            };
            let Some(rank) = rank.filter(|_| in_use(&queue.counters, flow) && !other_device) else {
                return Ok(true);
            };
            if !query.local_ports.is_empty() {
                let port = self.name(slot, flow.hash)?.and_then(|f| f.local_port());
                if !port.is_some_and(|port| query.local_ports.contains(&port)) {
                    return Ok(true);
                }
            }
            total += 1;
            most.push((Reverse(rank), slot));
            if most.len() > limit {
                most.pop();
            }
            Ok(true)
        })?;
        let flows = most.into_sorted_vec().into_iter();
        let flows = flows.map(|(_, slot)| {
            let queue = &self.queues[(slot / per_queue) as usize];
            self.entry(queue, slot, &self.datapath.tables().dev_flow(slot)?)
        });
        Ok(Flows {
            flows: flows.collect::<Result<_>>()?,
            total,
            slots: u64::from(per_queue) * self.queues.len() as u64,
            slots_read,
        })
    }

    /// The name of the flow that has the slot, if the key there is its key.
    pub(crate) fn name(&self, slot: u32, hash: u32) -> Result<Option<Flow>> {
        let key = self.datapath.tables().flow_key(slot)?;
        let own = native::flow_hash(&key, &self.datapath.config().secret) == hash;
        Ok(own.then(|| Flow::from_key(&key)).flatten())
    }

    pub(crate) fn hints(&self, queue: &Queue, hash: u32) -> Result<Hints> {
        let application = match u32::from(queue.counters.policy) & rx_policy::RX_FOLLOW.0 {
            0 => None,
            _ => Location::from_raw(self.datapath.application(hash)?.1),
        };
        let application_polls = application == Some(Location::Inline);
        let application = application.and_then(Location::cpu);
        let rps = native::rps_location_of(queue.map.raw(), hash);
        let rps = Location::from_raw(rps).and_then(Location::cpu);
        Ok(Hints {
            application,
            application_offline: self.offline(queue, application)?,
            application_polls,
            rps,
            rps_offline: self.offline(queue, rps)?,
            polling: load::polling_cpu(&queue.counters),
            off: self.policy == Policy::OFF,
        })
    }

    fn offline(&self, queue: &Queue, cpu: Option<u32>) -> Result<bool> {
        match cpu {
            Some(cpu) => Ok(self.datapath.backlog(queue.index, cpu)?.closed != 0),
            None => Ok(false),
        }
    }

    fn wish(
        &self,
        queue: &Queue,
        flow: &rps_dev_flow,
        hints: &Hints,
        now: Location,
    ) -> Result<(Location, Reason)> {
        if !load::decides(&queue.counters) {
            return Ok(hints.wanted(now));
        }
        let cpu = Location::from_raw(flow.wanted).and_then(Location::cpu);
        Ok(hints.decided(flow, self.offline(queue, cpu)?, now))
    }

    pub(crate) fn entry(&self, queue: &Queue, slot: u32, flow: &rps_dev_flow) -> Result<Entry> {
        let hints = self.hints(queue, flow.hash)?;
        let location = Location::from_raw(flow.location).unwrap_or(Location::Inline);
        let (wanted, reason) = self.wish(queue, flow, &hints, location)?;
        // Nobody asks the tables while there is room.
        let weighed =
            Reason::from_raw(flow.reason).is_some_and(|r| r == reason && r != Reason::Room);
        // Read later than the flow, or it could be in its future.
        let ticks = self.datapath.jiffies()?.wrapping_sub(flow.last_seen);
        Ok(Entry {
            flow: self.name(slot, flow.hash)?,
            hash: FlowHash(flow.hash),
            device: queue.device.clone(),
            queue: queue.number,
            location,
            wanted,
            reason,
            base: Location::from_raw(flow.base).filter(|_| weighed),
            application_cpu: hints.application,
            application_offline: hints.application_offline,
            polling_cpu: hints.polling,
            packets: flow.nr_packets,
            dropped: flow.nr_dropped,
            moves: flow.nr_moves,
            idle_seconds: f64::from(ticks) * tick()?.as_secs_f64(),
            shed: flow.shed != 0,
        })
    }
}

/// Whether the slot has a flow.
pub(crate) fn in_use(queue: &rx_queue, flow: &rps_dev_flow) -> bool {
    flow.epoch != 0 && flow.epoch == queue.epoch
}

/// The kernel's tick, 1/HZ: what its coarse clocks resolve.
fn tick() -> Result<Duration> {
    let tick = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).context("the kernel's tick")?;
    Ok(Duration::from(tick))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{rps_location, rx_reason};

    #[test]
    fn a_flow_wants_its_application_then_rps_then_to_stay() {
        use Location::{Cpu, Inline};
        let hints = Hints {
            application: Some(3),
            rps: Some(1),
            polling: Some(0),
            ..Hints::default()
        };
        let offline = Hints {
            application_offline: true,
            ..hints
        };
        let unknown = Hints {
            application: None,
            ..hints
        };
        let nowhere = Hints {
            rps_offline: true,
            ..offline
        };
        let off = Hints {
            off: true,
            ..Hints::default()
        };
        let busy_polls = Hints {
            application_polls: true,
            ..unknown
        };
        // Who polls is not left, not even for itself, and whatever is said of it.
        let polls = |hints: Hints, polling| Hints {
            polling: Some(polling),
            ..hints
        };
        for (hints, now, wanted, reason) in [
            (hints, Inline, Cpu(3), Reason::Application),
            (hints, Cpu(3), Cpu(3), Reason::Application),
            (polls(hints, 3), Cpu(1), Inline, Reason::Application),
            (polls(hints, 3), Inline, Inline, Reason::Application),
            (polls(hints, 3), Cpu(3), Cpu(3), Reason::Application),
            (polls(offline, 3), Inline, Inline, Reason::Application),
            (offline, Inline, Cpu(1), Reason::Rps),
            (unknown, Inline, Cpu(1), Reason::Rps),
            (polls(unknown, 1), Inline, Inline, Reason::Rps),
            (nowhere, Cpu(1), Inline, Reason::Offline),
            (off, Cpu(1), Inline, Reason::PolicyOff),
            (busy_polls, Cpu(1), Inline, Reason::BusyPoll),
            (busy_polls, Inline, Inline, Reason::BusyPoll),
        ] {
            assert_eq!(hints.wanted(now), (wanted, reason), "{hints:?} {now}");
        }
        // As long as nobody was seen to poll, there is only the CPU to name.
        let unseen = Hints {
            polling: None,
            ..hints
        };
        assert_eq!(unseen.wanted(Inline).0, Cpu(3));
    }

    #[test]
    fn what_was_decided_holds_while_its_cpu_is_online() {
        use Location::{Cpu, Inline};
        let hints = Hints {
            application: Some(3),
            rps: Some(1),
            polling: Some(0),
            ..Hints::default()
        };
        const INLINE: u16 = rps_location::RPS_INLINE.0 as u16;
        for (wanted, reason, offline, now, decided) in [
            (
                INLINE,
                rx_reason::RX_ROOM,
                false,
                Inline,
                (Inline, Reason::Room),
            ),
            (
                3,
                rx_reason::RX_CONSUMER,
                false,
                Inline,
                (Cpu(3), Reason::Consumer),
            ),
            (
                2,
                rx_reason::RX_IDLE_CPU,
                false,
                Cpu(2),
                (Cpu(2), Reason::IdleCpu),
            ),
            // As the next packet will find.
            (
                2,
                rx_reason::RX_IDLE_CPU,
                true,
                Cpu(2),
                (Cpu(3), Reason::Application),
            ),
            (
                0,
                rx_reason::RX_SPREAD,
                false,
                Cpu(1),
                (Inline, Reason::Spread),
            ),
            // By the tables alone; which may have changed since.
            (
                3,
                rx_reason::RX_TABLES,
                false,
                Inline,
                (Cpu(3), Reason::Application),
            ),
            (
                1,
                rx_reason::RX_TABLES,
                false,
                Inline,
                (Cpu(1), Reason::Undecided),
            ),
            (
                INLINE,
                rx_reason::RX_TABLES,
                false,
                Inline,
                (Inline, Reason::Undecided),
            ),
            (
                3,
                rx_reason::NR_RX_REASONS,
                false,
                Inline,
                (Cpu(3), Reason::Application),
            ),
        ] {
            let flow = rps_dev_flow {
                wanted,
                reason: reason.0 as u8,
                ..rps_dev_flow::default()
            };
            let got = hints.decided(&flow, offline, now);
            assert_eq!(got, decided, "{wanted} {reason:?} {offline} {now}");
        }
    }
}
