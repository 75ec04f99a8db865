// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `status` answers: where every received frame went, as terms of two sums.
//!
//! ```text
//! received   = inline + redirected + dropped + shed + limited + inline_limited + no_flow
//! redirected = delivered + lost + queued
//! ```
//!
//! All terms are frames since attach. They are read one after the other while packets go on, so
//! that the first sum may be off by what arrived in between; at rest both close to the last frame.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use super::flows::Flows;
use crate::datapath::load::Load;

/// What became of the frames that were meant for other CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// Sent towards the CPU.
    pub redirected: u64,
    /// Dropped in XDP because the backlog was full.
    pub dropped: u64,
    /// Dropped in XDP because the flow had to leave and could not yet.
    pub shed: u64,
    /// Dropped in XDP: of a large flow, and the backlog half full.
    pub limited: u64,
    /// Redirected and handed to the network stack on the CPU.
    pub delivered: u64,
    /// Redirected, and lost in the kernel.
    pub lost: u64,
    /// Redirected, and waiting now.
    pub queued: u64,
    /// Dry run: what would have been redirected. Counted as inline, because it was.
    pub would_redirect: u64,
}

/// One backlog: a queue's frames for one CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backlog {
    /// The CPU that processes them.
    pub cpu: u32,
    /// Its share of the queue's.
    #[serde(flatten)]
    pub terms: Terms,
}

/// One receive queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// `rx_queue_index` on its device.
    pub queue: u32,
    /// The CPUs of its `rps_map`, as a list.
    pub rps_cpus: String,
    /// Frames that the program saw.
    pub received: u64,
    /// Processed in the poll that received them.
    pub inline: u64,
    /// Dropped in XDP: of a large flow, and the CPU that polls could not keep up.
    pub inline_limited: u64,
    /// Sums over the backlogs.
    #[serde(flatten)]
    pub sums: Terms,
    /// No flow: a header ends outside the packet, or lies about it.
    pub no_flow_truncated: u64,
    /// No flow: not IP, or more headers than the parser follows.
    pub no_flow_unknown: u64,
    /// Frames steered by the hash that the device computed.
    pub rx_hash: u64,
    /// Times that a flow changed its location.
    pub moves: u64,
    /// Frames whose flow wanted to move and had to wait.
    pub held: u64,
    /// What policies decide by; null where none looks at it, and before the first packets.
    pub load: Option<Load>,
    /// Times that a slot of the `rps_map` went to another CPU, to balance them.
    pub balanced: u64,
    /// The backlogs that have ever been used.
    pub backlogs: Vec<Backlog>,
}

impl AddAssign<&Self> for Terms {
    fn add_assign(&mut self, b: &Self) {
        self.redirected += b.redirected;
        self.dropped += b.dropped;
        self.shed += b.shed;
        self.limited += b.limited;
        self.delivered += b.delivered;
        self.lost += b.lost;
        self.queued += b.queued;
        self.would_redirect += b.would_redirect;
    }
}

impl Queue {
    /// Frames dropped in XDP, for whatever reason.
    pub fn dropped(&self) -> u64 {
        self.sums.dropped + self.sums.shed + self.sums.limited + self.inline_limited
    }

    /// What keeps the two sums from closing, in words; nothing when they do.
    pub fn imbalance(&self) -> Option<String> {
        let s = &self.sums;
        let accounted = self.inline
            + s.redirected
            + s.dropped
            + s.shed
            + s.limited
            + self.inline_limited
            + self.no_flow_truncated
            + self.no_flow_unknown;
        let left = s.delivered + s.lost + s.queued;
        if self.received != accounted {
            return Some(format!(
                "received {} ≠ accounted for {accounted}",
                self.received
            ));
        }
        (s.redirected != left).then(|| {
            format!(
                "redirected {} ≠ delivered + lost + queued {left}",
                s.redirected
            )
        })
    }
}

/// One device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Device {
    /// Interface name.
    pub device: String,
    /// Interface index.
    pub ifindex: u32,
    /// `native` or `generic`.
    pub mode: String,
    /// Its receive queues, in order.
    pub queues: Vec<Queue>,
}

/// Everything that `rxsteer status` shows.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Process id of the running rxsteer.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// What is in effect, as `--policy` has it: `adaptive`, `rps+balance`, …
    pub policy: String,
    /// Decides and counts, moves nothing.
    pub dry_run: bool,
    /// Frames a backlog may hold.
    pub backlog_limit: u32,
    /// Steered devices.
    pub devices: Vec<Device>,
    /// The few flows that lost the most packets in XDP; null if none was dropped.
    pub dropped_flows: Option<Flows>,
}
