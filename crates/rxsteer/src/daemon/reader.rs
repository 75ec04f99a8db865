// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads and interprets the tables of flows.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_getres};

use super::queue::{self, Queue};
use crate::api::flows::{Entry, Flows, LIMIT_MAX, Location, Most, Query, Reason};
use crate::datapath::flow::{Flow, FlowHash};
use crate::datapath::policy::Policy;
use crate::datapath::{Datapath, load, native};
use crate::types::rps_dev_flow;

/// The tables of a running rxsteer, and the facts needed to interpret them.
pub struct Reader<'a> {
    pub(crate) datapath: &'a Datapath,
    pub(crate) queues: Vec<Queue>,
    pub(crate) policy: Policy,
    /// Applications that can't be followed on this host, in words.
    pub(crate) unseen: &'a [String],
}

impl<'a> Reader<'a> {
    /// `devices`: their names and numbers of queues, in the data path's order.
    pub fn new(
        datapath: &'a Datapath,
        devices: impl IntoIterator<Item = (&'a str, u32)>,
        policy: Policy,
        unseen: &'a [String],
    ) -> Self {
        let queues = devices
            .into_iter()
            .flat_map(|(device, queues)| (0..queues).map(move |number| (device, number)))
            .zip(0..)
            .map(|((device, number), index)| Queue::read(datapath, device, number, index));
        Self {
            queues: queues.collect(),
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
        for queue in &self.queues {
            if query.device.as_ref().is_some_and(|d| *d != queue.device) {
                continue;
            }
            let first = queue.index * per_queue;
            for (slot, flow) in tables.dev_flows().range(first..first + per_queue) {
                let rank = match query.most {
                    Most::Packets => Some(flow.nr_packets),
                    Most::Dropped => Some(flow.nr_dropped).filter(|dropped| *dropped > 0),
                };
                let Some(rank) = rank.filter(|_| queue::in_use(&queue.counters, &flow)) else {
                    continue;
                };
                if !query.local_ports.is_empty() {
                    let port = self.name(slot, flow.hash).and_then(|f| f.local_port());
                    if !port.is_some_and(|port| query.local_ports.contains(&port)) {
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
            let queue = &self.queues[(slot / per_queue) as usize];
            self.entry(queue, slot, &tables.dev_flows().get(slot))
        });
        Ok(Flows {
            flows: flows.collect::<Result<_>>()?,
            total,
            slots: u64::from(per_queue) * self.queues.len() as u64,
        })
    }

    /// The name of the slot's flow, if the key stored with the slot is that flow's.
    pub(crate) fn name(&self, slot: u32, hash: u32) -> Option<Flow> {
        let key = self.datapath.tables().flow_key(slot);
        let own = native::flow_hash(&key, &self.datapath.config().secret) == hash;
        own.then(|| Flow::from_key(&key)).flatten()
    }

    pub(crate) fn entry(&self, queue: &Queue, slot: u32, flow: &rps_dev_flow) -> Result<Entry> {
        let sock_flow = self.datapath.tables().sock_flow(flow.hash);
        let hints = queue.hints(flow.hash, sock_flow);
        let (wanted, reason) = queue.wanted(flow, sock_flow, self.policy == Policy::OFF);
        // The tables are not read while there is room.
        let weighed =
            Reason::from_raw(flow.reason).is_some_and(|r| r == reason && r != Reason::Room);
        // Read after the flow, because time must not be earlier than the flow's last packet.
        let ticks = self.datapath.jiffies()?.wrapping_sub(flow.last_seen);
        Ok(Entry {
            flow: self.name(slot, flow.hash),
            hash: FlowHash(flow.hash),
            device: queue.device.clone(),
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
