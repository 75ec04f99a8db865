// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer poll`, and its counts and costs as text: a part of `rxsteer status`.

use std::fmt::Write;
use std::os::fd::AsFd;
use std::process::ExitCode;

use anyhow::Result;
use clap::{ArgGroup, Args};
use comfy_table::Table;

use super::program::stop_signals;
use super::table::table;
use crate::api::busy_poll::{Application, IN_VAIN, Status};
use crate::busy_poll::Service;
use crate::busy_poll::rule::Rule;
use crate::host::privileges;

/// Options of `rxsteer poll`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("whose")
    .args(["pid", "comm", "exe", "cgroup", "port"]).required(true).multiple(true))]
pub struct PollArgs {
    /// Selection of sockets, and how they poll.
    #[command(flatten)]
    pub rule: Rule,

    /// Also poll in poll(), select() and, before Linux 6.9, epoll_wait(), for the whole host
    ///
    /// Sets net.core.busy_poll: all epoll instances of all processes poll, too. It is restored at
    /// the end.
    #[arg(long)]
    pub host_wide: bool,
}

impl PollArgs {
    pub(super) fn run(self) -> Result<ExitCode> {
        privileges::keep_needed()?;
        let signals = stop_signals()?;
        let service = Service::new(&[self.rule], self.host_wide)?;
        service.serve(signals.as_fd())?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The text; ends with a newline.
pub fn render(status: &Status) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "busy polling (process {})", status.pid);
    if status.applications.is_empty() {
        let _ = writeln!(out, "no process has sockets that a rule selects");
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
    let mut table = table([
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
