// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads and interprets the tables of flows.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_getres};

use super::plan::Steered;
use super::queue::{self, Queue, SockFlow};
use crate::api::flows::{Entry, Flows, LIMIT_MAX, Location, Most, Query, Reason};
use crate::datapath::flow::{Flow, FlowHash};
use crate::datapath::policy::Policy;
use crate::datapath::{Datapath, load, native};
use crate::types::{flow_key, rps_dev_flow};

/// The tables of a running rxsteer, and the facts needed to interpret them.
pub struct Reader<'a> {
    pub(crate) datapath: &'a Datapath,
    /// By index over all devices.
    pub(crate) queues: Vec<Queue>,
    /// Names of all devices, by interface index.
    pub(crate) devices: BTreeMap<u32, &'a str>,
    pub(crate) policy: Policy,
    /// Applications that can't be followed on this host, in words.
    pub(crate) unseen: &'a [String],
}

impl<'a> Reader<'a> {
    /// Reads what all queues have now.
    pub(super) fn new(
        datapath: &'a Datapath,
        devices: &'a [Steered],
        policy: Policy,
        unseen: &'a [String],
    ) -> Self {
        let queue = |index| {
            let own = devices.iter().find(|d| d.queues().contains(&index));
            let number = own.map_or(index, |d| index - d.first_queue);
            let name = own.map_or("", |d| &d.device.name);
            Queue::read(datapath, name, number, index)
        };
        let names = devices
            .iter()
            .map(|d| (d.device.ifindex, &d.device.name[..]));
        Self {
            queues: (0..datapath.nr_queues()).map(queue).collect(),
            devices: names.collect(),
            datapath,
            policy,
            unseen,
        }
    }

    /// The flows that match a query.
    ///
    /// # Errors
    /// When the kernel's time can't be read.
    pub fn flows(&self, query: &Query) -> Result<Flows> {
        let tables = self.datapath.tables();
        let per_queue = tables.flow_cnt();
        let limit = query.limit.min(LIMIT_MAX);
        let mut most = BinaryHeap::new();
        let mut total = 0;
        let recent = self.recent(query.within)?;
        for table in 0..self.datapath.nr_tables() {
            let shared = self.is_shared(table);
            let other = |device: &str| query.device.as_ref().is_some_and(|d| *d != device);
            if !shared && other(&self.queues[table as usize].device) {
                continue;
            }
            let first = table * per_queue;
            for (slot, flow) in tables.dev_flows().range(first..first + per_queue) {
                let queue = self.queue_of(slot, &flow);
                let rank = match query.most {
                    Most::Packets => Some(flow.nr_packets),
                    Most::Dropped => Some(flow.nr_dropped).filter(|dropped| *dropped > 0),
                };
                let listed = |_: &u32| queue::in_use(&queue.counters, &flow) && recent(&flow);
                let Some(rank) = rank.filter(listed) else {
                    continue;
                };
                if shared && other(self.device_of(queue, slot)) {
                    continue;
                }
                if !query.local_ports.is_empty() {
                    let name = self.name(slot, flow.hash);
                    if !name.is_some_and(|name| name.has_port(&query.local_ports)) {
                        continue;
                    }
                }
                total += 1;
                most.push((Reverse(rank), slot));
                if most.len() > limit {
                    most.pop();
                }
            }
        }
        let flows = most.into_sorted_vec().into_iter();
        let flows = flows.map(|(_, slot)| {
            let flow = tables.dev_flows().get(slot);
            self.entry(self.queue_of(slot, &flow), slot, &flow)
        });
        Ok(Flows {
            flows: flows.collect::<Result<_>>()?,
            total,
            slots: u64::from(per_queue) * u64::from(self.datapath.nr_tables()),
        })
    }

    /// Whether a flow has had a packet in this time. Times of packets that come meanwhile are later
    /// than the present one, which is read once.
    fn recent(&self, within: Option<Duration>) -> Result<impl Fn(&rps_dev_flow) -> bool> {
        let (now, tick) = (self.datapath.jiffies()?, tick()?);
        let ticks = within.map(|time| time.div_duration_f64(tick));
        Ok(move |flow: &rps_dev_flow| {
            let idle = now.wrapping_sub(flow.last_seen).cast_signed();
            ticks.is_none_or(|ticks| f64::from(idle) <= ticks)
        })
    }

    /// The name of the slot's flow, if the key stored with the slot is that flow's.
    pub(crate) fn name(&self, slot: u32, hash: u32) -> Option<Flow> {
        Flow::from_key(&self.key(slot, hash)?)
    }

    /// The key stored with the slot, if it is that of the flow with this hash.
    fn key(&self, slot: u32, hash: u32) -> Option<flow_key> {
        let key = self.datapath.tables().flow_name(slot).key;
        let own = native::flow_own_hash(&key, &self.datapath.config().secret) == hash;
        own.then_some(key)
    }

    /// The entry of the slot's flow in the `sock_flow_table`.
    pub(crate) fn sock_flow(&self, slot: u32, flow: &rps_dev_flow) -> SockFlow {
        let secret = &self.datapath.config().secret;
        let key = self.key(slot, flow.hash);
        let hash = key.map_or(flow.hash, |key| native::flow_hash(&key, secret));
        self.sock_flow_of(hash)
    }

    /// The entry in the `sock_flow_table` of the flow that sockets know by this hash.
    pub(crate) fn sock_flow_of(&self, hash: u32) -> SockFlow {
        let value = self.datapath.tables().sock_flow(hash);
        SockFlow { hash, value }
    }

    /// Whether the queue, or the table of this queue, is one of softirq mode.
    pub(crate) fn is_shared(&self, queue: u32) -> bool {
        let first = self.datapath.softirq_queue();
        first.is_some_and(|first| queue >= first)
    }

    /// The queue of the flow's last packet.
    pub(crate) fn queue_of(&self, slot: u32, flow: &rps_dev_flow) -> &Queue {
        let table = slot / self.datapath.tables().flow_cnt();
        // A slot that was never used has queue 0.
        let queue = match self.is_shared(table) {
            true => table.max(flow.queue.into()),
            false => table,
        };
        &self.queues[queue as usize]
    }

    /// The device of the slot's flow.
    pub(crate) fn device_of<'b>(&'b self, queue: &'b Queue, slot: u32) -> &'b str {
        if !self.is_shared(queue.index) {
            return &queue.device;
        }
        let ifindex = self.datapath.tables().flow_name(slot).ifindex;
        self.devices.get(&ifindex).copied().unwrap_or("(gone)")
    }

    /// The slots where a flow with this hash may be, one per queue or per device in softirq mode.
    pub(crate) fn slots(&self, hash: u32) -> Vec<u32> {
        let tables = self.datapath.tables();
        let shared = self.datapath.softirq_queue();
        let own = 0..shared.unwrap_or(self.datapath.nr_queues());
        let own = own.map(|queue| tables.slot(queue, hash));
        let shared = shared.into_iter().flat_map(|queue| {
            let slot = move |ifindex: &u32| tables.shared_slot(queue, *ifindex, hash);
            self.devices.keys().map(slot)
        });
        let mut slots: Vec<u32> = own.chain(shared).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    pub(crate) fn entry(&self, queue: &Queue, slot: u32, flow: &rps_dev_flow) -> Result<Entry> {
        let sock_flow = self.sock_flow(slot, flow);
        let hints = queue.hints(flow.hash, sock_flow);
        let (wanted, reason) = queue.wanted(flow, sock_flow, self.policy == Policy::OFF);
        // The tables are not read while there is room.
        let weighed =
            Reason::from_raw(flow.reason).is_some_and(|r| r == reason && !r.is_by_pressure());
        // Read after the flow, because time must not be earlier than the flow's last packet.
        let ticks = self.datapath.jiffies()?.wrapping_sub(flow.last_seen);
        Ok(Entry {
            flow: self.name(slot, flow.hash),
            hash: FlowHash(flow.hash),
            device: self.device_of(queue, slot).to_owned(),
            queue: queue.number,
            location: Location::from_raw(flow.location).unwrap_or(Location::Inline),
            wanted,
            reason,
            base: Location::from_raw(flow.base).filter(|_| weighed),
            application_cpu: hints.application,
            application_offline: hints.application_offline,
            polling_cpu: load::polling_cpu(&queue.counters),
            packets: flow.nr_packets,
            dropped: flow.nr_dropped,
            moves: flow.nr_moves,
            idle_seconds: f64::from(ticks) * tick()?.as_secs_f64(),
            shed: flow.shed != 0,
        })
    }
}

/// The kernel's tick, 1/HZ: the resolution of its coarse clocks.
fn tick() -> Result<Duration> {
    let tick = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).context("the kernel's tick")?;
    Ok(Duration::from(tick))
}
