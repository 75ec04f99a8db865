// SPDX-License-Identifier: MIT OR Apache-2.0
//! The counters of the data path as terms of the two sums (`api::status`).

use anyhow::Result;

use super::plan::Steered;
use super::steering::Steering;
use crate::api::flows::{Most, Query};
use crate::api::status::{Backlog, Device, NOT_STEERED, Queue, Status, Terms};
use crate::datapath::Datapath;
use crate::datapath::load::Load;
use crate::host::device::RxMode;
use crate::types::{backlog, backlog_closed, flow_result};

/// Number of flows in `status`: those with the most dropped packets.
const DROPPED_FLOWS: usize = 5;

impl From<&backlog> for Terms {
    fn from(b: &backlog) -> Self {
        Self {
            redirected: b.tail,
            dropped: b.nr_dropped,
            shed: b.nr_shed,
            limited: b.nr_limited,
            // The counters are written meanwhile: `dequeued` may include frames that entered after
            // `tail` was read.
            delivered: b.dequeued.saturating_sub(b.nr_unbuilt),
            lost: b.nr_lost + b.nr_unbuilt,
            vanished: b.nr_vanished,
            queued: b
                .tail
                .saturating_sub(b.dequeued + b.nr_lost + b.nr_vanished),
            would_redirect: b.nr_decided,
        }
    }
}

impl Queue {
    /// The terms of a queue: `index` counts over all devices, `queue` within one.
    pub fn read(datapath: &Datapath, index: u32, queue: u32, rps_cpus: String) -> Self {
        let mut backlogs = Vec::new();
        let mut sums = Terms::default();
        for cpu in 0..datapath.nr_cpus() {
            let b = datapath.backlog(index, cpu);
            let terms = Terms::from(&b);
            if terms != Terms::default() {
                sums += &terms;
                backlogs.push(Backlog {
                    cpu,
                    stalled: b.closed & u64::from(backlog_closed::BACKLOG_STALLED.0) != 0,
                    terms,
                    waits: datapath.waits(index, cpu),
                });
            }
        }
        let q = datapath.rx_queue(index);
        let no_flow = |why: flow_result| q.nr_no_flow[why.0 as usize];
        Self {
            queue,
            rps_cpus,
            received: q.nr_received,
            inline: q.nr_inline,
            sums,
            no_flow_truncated: no_flow(flow_result::FLOW_TRUNCATED),
            no_flow_unknown: no_flow(flow_result::FLOW_UNKNOWN),
            inline_ports: q.nr_inline_ports,
            rx_hash: q.nr_rx_hash,
            moves: q.nr_moves,
            held: q.nr_held,
            load: Load::of(&q),
            backlogs,
        }
    }
}

impl Steering {
    /// The accounts of all devices.
    pub(super) fn accounts(&self) -> Vec<Device> {
        let mut shared: Option<&String> = None;
        let in_softirq_mode = |steered: &&Steered| steered.mode == RxMode::Softirq;
        let several =
            !self.patterns.is_empty() || self.devices.iter().filter(in_softirq_mode).count() > 1;
        let devices = self.devices.iter().enumerate().map(|(index, steered)| {
            let Steered { device, .. } = steered;
            // The first device in softirq mode has the account of all of them.
            let name = in_softirq_mode(&steered).then_some(&device.name);
            let queues_of = shared.filter(|_| name.is_some()).cloned();
            shared = shared.or(name);
            Device {
                device: device.name.clone(),
                ifindex: device.ifindex,
                mode: match self.awaits(Some(&device.name)) {
                    true => NOT_STEERED.to_owned(),
                    false => steered.mode.to_string(),
                },
                foreign: match &queues_of {
                    None => self.datapath.foreign_frames(steered.first_queue),
                    Some(_) => 0,
                },
                unsteered: self.unsteered.of(index, steered),
                queues: match &queues_of {
                    None => self.queues_of(steered),
                    Some(_) => Vec::new(),
                },
                queues_of,
                shares_queues: several && in_softirq_mode(&steered),
            }
        });
        let devices: Vec<_> = devices.collect();
        let steered = |name: &&str| self.devices.iter().any(|s| s.device.name == *name);
        let absent = &self.unsteered.absent;
        let others = absent.names().filter(|name| !steered(name));
        let others = others.map(|name| Device {
            device: name.to_owned(),
            ifindex: 0,
            mode: NOT_STEERED.to_owned(),
            foreign: 0,
            unsteered: absent.why(name).into_iter().map(str::to_owned).collect(),
            queues: Vec::new(),
            queues_of: None,
            shares_queues: false,
        });
        devices.into_iter().chain(others).collect()
    }

    fn queues_of(&self, steered: &Steered) -> Vec<Queue> {
        let queues = (0..).zip(steered.queues());
        let queues = queues.map(|(number, index)| {
            let cpus = self.masks[index as usize].cpus.intersect(&self.online);
            Queue::read(&self.datapath, index, number, cpus.to_string())
        });
        queues.collect()
    }

    /// The answer to `status`.
    ///
    /// # Errors
    /// When the tables can't be read.
    pub(super) fn status(&self) -> Result<Status> {
        let mut status = self.counters();
        let mut queues = status.devices.iter().flat_map(|device| &device.queues);
        // The tables are read only if frames were dropped.
        let query = Query {
            limit: DROPPED_FLOWS,
            most: Most::Dropped,
            ..Query::default()
        };
        if queues.any(|queue| queue.dropped() > 0) {
            status.dropped_flows = Some(self.reader().flows(&query)?);
        }
        Ok(status)
    }

    /// The same without flows.
    pub(super) fn counters(&self) -> Status {
        let devices = self.accounts();
        let numbers = self.datapath.backlogs().numbers();
        Status {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            policy: match self.policy {
                policy if policy.follows() && !self.datapath.follows(0) => {
                    policy.without_following()
                }
                policy => policy,
            }
            .to_string(),
            dry_run: self.datapath.config().dry_run,
            backlog_limit: self.datapath.config().backlog_limit,
            nr_backlogs: numbers.exist,
            most_backlogs: numbers.most,
            refused_backlogs: numbers.refused,
            socket_full: self.datapath.socket_full(),
            trial: self.datapath.trial().filter(|_| self.policy.adapt),
            devices,
            patterns: self.patterns.texts().map(str::to_owned).collect(),
            dropped_flows: None,
        }
    }
}
