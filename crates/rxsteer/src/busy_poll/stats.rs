// SPDX-License-Identifier: MIT OR Apache-2.0
//! Polls and waits per process: counters of `bpf/poll.bpf.c`, and voluntary context switches.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use libbpf_rs::skel::OpenSkel;
use libbpf_rs::{Link, MapCore, MapFlags, num_possible_cpus};

use crate::api::busy_poll::Application;
use crate::bpf::open;
use crate::bpf::poll_skel::{PollSkel, PollSkelBuilder};
use crate::host::caps;
use crate::types::busy_poll;

/// The attached programs; dropping this detaches them.
pub struct Stats {
    skel: PollSkel<'static>,
    _links: Vec<Link>,
}

/// A process's counters since it was chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    /// Polls of a queue.
    pub polls: u64,
    /// Polls that found packets, including packets of other applications.
    pub found: u64,
    /// Packets that the polls found.
    pub packets: u64,
    /// CPU time of the polls, without the first one of each wait.
    pub polling: Duration,
    /// Times that a thread went to sleep, for any reason.
    pub sleeps: u64,
    /// Times that a polling thread slept, was woken, and got a CPU.
    pub woken: u64,
    /// Total time from wake-up to running.
    pub waking: Duration,
    /// Shortest time from wake-up to running; 0 if none was woken. In a difference it is still the
    /// shortest since the process was chosen.
    pub shortest: Duration,
}

impl Counts {
    /// The difference from `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            polls: self.polls.saturating_sub(earlier.polls),
            found: self.found.saturating_sub(earlier.found),
            packets: self.packets.saturating_sub(earlier.packets),
            polling: self.polling.saturating_sub(earlier.polling),
            // The count of a thread vanishes when it ends.
            sleeps: self.sleeps.saturating_sub(earlier.sleeps),
            woken: self.woken.saturating_sub(earlier.woken),
            waking: self.waking.saturating_sub(earlier.waking),
            shortest: self.shortest,
        }
    }
}

impl Stats {
    /// Attaches the programs. They count only processes passed to [`Self::watch`].
    ///
    /// # Errors
    /// When the kernel refuses the programs.
    pub fn attach() -> Result<Self> {
        let mut open = open(PollSkelBuilder::default())?;
        let rodata = open.maps.rodata_data.as_deref_mut();
        rodata
            .context("no constants in the program")?
            .napi_state_in_busy_poll = caps::napi_state_in_busy_poll()?;
        let skel = open.load().context("polls can't be counted here")?;
        let progs = [
            &skel.progs.on_sched_waking,
            &skel.progs.on_sched_switch,
            &skel.progs.on_napi_poll,
        ];
        let links = progs.map(|prog| prog.attach_trace().context("polls can't be counted here"));
        Ok(Self {
            _links: links.into_iter().collect::<Result<_>>()?,
            skel,
        })
    }

    /// Starts counting a process's polls, from 0.
    ///
    /// # Errors
    /// When there are too many processes.
    pub fn watch(&self, pid: u32) -> Result<()> {
        let none = vec![0; size_of::<busy_poll>()];
        let none = vec![none; num_possible_cpus()?];
        let polls = &self.skel.maps.busy_polls;
        polls
            .update_percpu(&pid.to_ne_bytes(), &none, MapFlags::ANY)
            .context("too many processes poll")
    }

    /// Stops counting a process's polls.
    pub fn forget(&self, pid: u32) {
        // The process may not have been counted.
        let _ = self.skel.maps.busy_polls.delete(&pid.to_ne_bytes());
    }

    /// The counters of a process; all 0 if it has ended.
    ///
    /// # Errors
    /// When the map can't be read.
    pub fn counts(&self, pid: u32) -> Result<Counts> {
        let polls = &self.skel.maps.busy_polls;
        let by_cpu = polls.lookup_percpu(&pid.to_ne_bytes(), MapFlags::ANY)?;
        let mut counts = Counts::default();
        let mut shortest = Vec::new();
        for bytes in by_cpu.unwrap_or_default() {
            assert_eq!(bytes.len(), size_of::<busy_poll>());
            // SAFETY: the kernel wrote a structure of this type, which has integers only.
            let cpu: busy_poll = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
            counts.polls += cpu.nr_polls;
            counts.found += cpu.nr_found;
            counts.packets += cpu.nr_packets;
            counts.polling += Duration::from_nanos(cpu.ns);
            counts.woken += cpu.nr_woken;
            counts.waking += Duration::from_nanos(cpu.woken_ns);
            shortest.extend((cpu.shortest_ns > 0).then_some(cpu.shortest_ns));
        }
        counts.shortest = Duration::from_nanos(shortest.into_iter().min().unwrap_or(0));
        for thread in fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let status = fs::read_to_string(thread.path().join("status"));
            counts.sleeps += voluntary_switches(&status.unwrap_or_default());
        }
        Ok(counts)
    }
}

/// Reads the count from /proc/PID/task/TID/status.
fn voluntary_switches(status: &str) -> u64 {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
}

impl Application {
    /// Fills in the counters of an application over `time`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn voluntary_switches_are_read() {
        let status = "Name:\tsleep\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t4\n";
        assert_eq!(voluntary_switches(status), 17);
        assert_eq!(voluntary_switches(""), 0);
    }
}
