// SPDX-License-Identifier: MIT OR Apache-2.0
//! The counters of the data path as terms of the two sums (`api::status`).

use crate::api::status::{Backlog, Queue, Terms};
use crate::datapath::Datapath;
use crate::datapath::load::Load;
use crate::types::{backlog, backlog_closed, flow_result};

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
