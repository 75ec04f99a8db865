// SPDX-License-Identifier: MIT OR Apache-2.0
//! The status of an rxsteer that lets sockets poll.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Printed for a process with polling enabled that has not polled yet: possible causes.
pub(crate) const IN_VAIN: &str = "none of its waits has polled yet: no packet of its has come by a \
                                  device with NAPI instances (`rxsteer napi` shows them), all were \
                                  redirected to other CPUs, or it waits in poll() or select(), which \
                                  poll with --host-wide alone";

/// All applications with polling sockets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Process id of the answering rxsteer.
    pub pid: u32,
    /// Ordered by process id.
    pub applications: Vec<Application>,
    /// Why polls can't be counted, if so.
    pub uncounted: Option<String>,
}

/// A process with polling sockets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Application {
    /// Process id.
    pub pid: u32,
    /// Process name.
    pub comm: String,
    /// The longest time that a wait polls, us; 0 while an adaptive rule pauses.
    pub usecs: u32,
    /// Number of sockets that poll.
    pub sockets: usize,
    /// Number of epoll instances that poll.
    pub epolls: usize,
    /// Its threads wait, but none has polled yet.
    pub in_vain: bool,
    /// Time since a rule selected the process, s.
    pub seconds: f64,
    /// Polls of a queue in that time.
    pub polls: u64,
    /// Polls that found packets. If no other application uses the queue, each saved one wake-up.
    pub found: u64,
    /// Packets that the polls found, including those of other applications.
    pub packets: u64,
    /// CPU time of the polls, s.
    pub polling_seconds: f64,
    /// Times that its threads went to sleep, for any reason.
    pub sleeps: u64,
    /// Mean time from the wake-up of a polling thread until it ran, us; null if none was woken.
    pub wake_up_us: Option<f64>,
    /// Estimate of the wake-up time saved, s: the shortest wake-up times `found`. Too high if other
    /// applications share the queue. Null if no thread was woken.
    pub won_seconds: Option<f64>,
}
