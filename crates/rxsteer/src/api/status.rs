// SPDX-License-Identifier: MIT OR Apache-2.0
//! The answer of `status`: all received frames, as terms of two sums.
//!
//! ```text
//! received   = inline + redirected + dropped + shed + limited + no_flow
//! redirected = delivered + lost + vanished + queued
//! ```
//!
//! Terms are frames since attach. They are read one after the other, so the first sum may be off by
//! the frames that arrived meanwhile; without traffic both sums are exact.

use std::ops::AddAssign;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::flows::Flows;
use crate::datapath::load::Load;
use crate::datapath::trial::Trial;
use crate::datapath::waits::Waits;

/// Frames meant for other CPUs, by outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Terms {
    /// Frames redirected to the CPU.
    pub redirected: u64,
    /// Frames dropped in XDP because the backlog was full.
    pub dropped: u64,
    /// Frames dropped in XDP because the flow had to leave and could not yet.
    pub shed: u64,
    /// Frames dropped in XDP because the flow was large and the backlog half full.
    pub limited: u64,
    /// Frames redirected, and delivered to the network stack on the CPU.
    pub delivered: u64,
    /// Frames redirected, and lost in the kernel.
    pub lost: u64,
    /// Frames redirected, but dropped by the driver before the kernel saw them.
    pub vanished: u64,
    /// Frames redirected, and still queued.
    pub queued: u64,
    /// Frames that a dry run would have redirected; they are counted as inline.
    pub would_redirect: u64,
}

/// A queue's backlog for one CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Backlog {
    /// The CPU that processes it.
    pub cpu: u32,
    /// Packets wait there without progress: no new flow goes there.
    #[serde(default)]
    pub stalled: bool,
    /// Its part of the queue's sums.
    #[serde(flatten)]
    pub terms: Terms,
    /// How long frames have waited there.
    pub waits: Waits,
}

/// One receive queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Queue {
    /// `rx_queue_index` on its device.
    pub queue: u32,
    /// CPUs of its `rps_map`, in list form.
    pub rps_cpus: String,
    /// Frames that the XDP program received.
    pub received: u64,
    /// Frames processed in the poll that received them.
    pub inline: u64,
    /// Sums over the backlogs.
    #[serde(flatten)]
    pub sums: Terms,
    /// Frames without a flow: a header is truncated or has an invalid length.
    pub no_flow_truncated: u64,
    /// Frames without a flow: not IP, or more headers than the parser accepts.
    pub no_flow_unknown: u64,
    /// Of `inline`: frames of UDP flows that always stay there by their ports.
    pub inline_ports: u64,
    /// Frames steered by the hash that the device computed.
    pub rx_hash: u64,
    /// Changes of location of flows.
    pub moves: u64,
    /// Frames of flows that wanted to move and had to wait.
    pub held: u64,
    /// Load of the queue; null if no policy uses it, and before the first packets.
    pub load: Option<Load>,
    /// Backlogs that have been used since attach.
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
        self.vanished += b.vanished;
        self.queued += b.queued;
        self.would_redirect += b.would_redirect;
    }
}

impl Queue {
    /// Frames dropped in XDP for any cause.
    pub fn dropped(&self) -> u64 {
        self.sums.dropped + self.sums.shed + self.sums.limited
    }

    /// Frames that were redirected and did not reach the network stack.
    pub fn lost(&self) -> u64 {
        self.sums.lost + self.sums.vanished
    }

    /// The sum that doesn't add up, in words; `None` if both do.
    pub fn imbalance(&self) -> Option<String> {
        let s = &self.sums;
        let accounted = self.inline
            + s.redirected
            + s.dropped
            + s.shed
            + s.limited
            + self.no_flow_truncated
            + self.no_flow_unknown;
        let left = s.delivered + s.lost + s.vanished + s.queued;
        if self.received != accounted {
            return Some(format!(
                "received {} ≠ accounted for {accounted}",
                self.received
            ));
        }
        (s.redirected != left).then(|| {
            format!(
                "redirected {} ≠ delivered + lost + vanished + queued {left}",
                s.redirected
            )
        })
    }
}

/// The mode of a device that is gone or refused.
pub const NOT_STEERED: &str = "none";

/// One device.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Device {
    /// Interface name.
    pub device: String,
    /// Interface index; 0 if the device is not there.
    pub ifindex: u32,
    /// `native` or `softirq`; `none` while the device is gone or refused.
    pub mode: String,
    /// Frames that were not steered, because they came from other queues or devices. They are not
    /// in the sums.
    pub foreign: u64,
    /// Why packets are not steered as they should be, in sentences with remedies; empty as a rule.
    pub unsteered: Vec<String>,
    /// Ordered by number. In softirq mode, the CPUs that receive.
    pub queues: Vec<Queue>,
    /// The device that has the account of this one's packets in its queues: in softirq mode devices share
    /// them. Null if this device has queues of its own.
    pub queues_of: Option<String>,
    /// In softirq mode beside other devices, or with a pattern that others may match: the queues of softirq
    /// mode have the packets of all of them.
    pub shares_queues: bool,
}

/// Steering that goes on without a rxsteer, since it is pinned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Pinned {
    /// The folder.
    pub folder: String,
    /// The version that has pinned it; null if its record can't be read.
    pub version: Option<String>,
    /// Steered devices.
    pub devices: Vec<PinnedDevice>,
}

/// A device of [`Pinned`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PinnedDevice {
    /// Interface name; null if it is in another network namespace.
    pub device: Option<String>,
    /// Interface index.
    pub ifindex: u32,
    /// When steering of it was pinned, in UTC (RFC 3339). A take-over does not change it.
    pub since: String,
}

/// The answer of `rxsteer status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Process id of the running rxsteer.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// The policy in effect, in the format of `--policy`, such as `adaptive` or `rps+adapt`.
    pub policy: String,
    /// Dry run: decisions are counted, and all packets stay INLINE.
    pub dry_run: bool,
    /// Upper limit of frames in a backlog.
    pub backlog_limit: u32,
    /// Backlogs of all queues that exist now.
    pub nr_backlogs: usize,
    /// Backlogs that may exist.
    pub most_backlogs: usize,
    /// Backlogs that flows want and that may not exist: these flows stay INLINE.
    pub refused_backlogs: usize,
    /// Packets that UDP sockets had no room for, of those that the network stack got from steered
    /// devices.
    #[serde(default)]
    pub socket_full: u64,
    /// Whether it helps that flows move; null if the policy does not ask, and before its first answer.
    #[serde(default)]
    pub trial: Option<Trial>,
    /// Steered devices.
    pub devices: Vec<Device>,
    /// Patterns of names: devices that match are steered when they come.
    #[serde(default)]
    pub patterns: Vec<String>,
    /// The flows with the most drops in XDP; null if nothing was dropped.
    pub dropped_flows: Option<Flows>,
}
