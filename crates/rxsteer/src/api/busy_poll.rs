// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the rxsteer answers that lets sockets poll.

use serde::{Deserialize, Serialize};

/// What a process whose waits don't poll can do about it.
pub(crate) const IN_VAIN: &str = "none of its waits has polled yet: no packet of its has come by a \
                                  device with NAPI instances (`rxsteer napi` shows them), all were \
                                  redirected to other CPUs, or it waits in poll() or select(), which \
                                  poll with --host-wide alone";

/// All applications whose sockets poll.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The process that lets them.
    pub pid: u32,
    /// By process.
    pub applications: Vec<Application>,
    /// Why polls are not counted, if they are not.
    pub uncounted: Option<String>,
}

/// A process whose sockets poll.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Application {
    /// Its number,
    pub pid: u32,
    /// and name.
    pub comm: String,
    /// For how long a wait polls now, us; 0 while an adaptive rule pauses.
    pub usecs: u32,
    /// Sockets that poll,
    pub sockets: usize,
    /// and epoll instances that do.
    pub epolls: usize,
    /// Its threads wait, but none has polled yet.
    pub in_vain: bool,
    /// Since its first socket was set, s.
    pub seconds: f64,
    /// Polls of a queue since then.
    pub polls: u64,
    /// Of these, those that found packets: with the queue to itself, each is a wake-up that was not
    /// needed.
    pub found: u64,
    /// Packets that they found, of whomever.
    pub packets: u64,
    /// CPU time that polls took, s.
    pub polling_seconds: f64,
    /// Times that its threads went to sleep nevertheless, for whatever reason.
    pub sleeps: u64,
    /// What it took on average from the wake-up of a thread that polls until it ran, us; null if none
    /// was woken.
    pub wake_up_us: Option<f64>,
    /// What packets would have waited for threads to be woken if polls had not found them: as many
    /// times as polls found something, the shortest wake-up, s. An estimate, too high where others share
    /// the queue; null if none was woken.
    pub won_seconds: Option<f64>,
}
