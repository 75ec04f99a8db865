// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whose sockets poll, what they find, and what it costs: a part of `rxsteer status`.

use std::fmt::Write;
use std::time::Duration;

use comfy_table::Table;
use serde::{Deserialize, Serialize};

use super::stats::Counts;
use crate::table::table;

/// What a process whose waits don't poll can do about it.
pub(super) const IN_VAIN: &str = "none of its waits has polled yet: no packet of its has come by a \
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

impl Application {
    /// What was counted in `time`.
    pub(super) fn counted(mut self, counts: Counts, time: Duration) -> Self {
        self.seconds = time.as_secs_f64();
        self.polls = counts.polls;
        self.found = counts.found;
        self.packets = counts.packets;
        self.polling_seconds = counts.polling.as_secs_f64();
        self.sleeps = counts.sleeps;
        let woken = counts.woken > 0;
        self.wake_up_us = woken.then(|| counts.waking.as_secs_f64() * 1e6 / counts.woken as f64);
        self.won_seconds = woken.then_some(counts.shortest.as_secs_f64() * counts.found as f64);
        self
    }
}

/// The text; ends with a newline.
pub fn render(status: &Status) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "busy polling (process {})", status.pid);
    if status.applications.is_empty() {
        let _ = writeln!(out, "no process has sockets that a rule means");
        return out;
    }
    let _ = writeln!(out, "{}", applications(&status.applications).trim_fmt());
    for a in status.applications.iter().filter(|a| a.in_vain) {
        let _ = writeln!(out, "process {} ({}): {IN_VAIN}", a.pid, a.comm);
    }
    if let Some(why) = &status.uncounted {
        let _ = writeln!(out, "not counted: {why}");
    }
    out
}

fn applications(applications: &[Application]) -> Table {
    let mut table = table(&[
        "process",
        "application",
        "sockets",
        "epoll",
        "polls for",
        "polls",
        "found",
        "CPU",
        "sleeps",
        "wake-up us",
        "won",
    ]);
    for a in applications {
        let percent = |part: f64, whole: f64| match whole > 0.0 {
            true => format!("{:.1} %", 100.0 * part / whole),
            false => "-".to_owned(),
        };
        table.add_row([
            a.pid.to_string(),
            a.comm.clone(),
            a.sockets.to_string(),
            a.epolls.to_string(),
            match a.usecs {
                0 => "nothing now".to_owned(),
                usecs => format!("{usecs} us"),
            },
            a.polls.to_string(),
            a.found.to_string(),
            percent(a.polling_seconds, a.seconds),
            a.sleeps.to_string(),
            a.wake_up_us.map_or("-".to_owned(), |us| format!("{us:.1}")),
            a.won_seconds
                .map_or("-".to_owned(), |s| format!("{:.1} ms", s * 1000.0)),
        ]);
    }
    table
}
