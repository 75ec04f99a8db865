// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bringing flows home, and proving that backlogs are empty (docs/order.md).

use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::{MapCore, MapFlags};

use super::loaded::Datapath;
use super::policy::Policy;
use super::rps_map::RpsMap;
use crate::types::backlog;

/// Whether CPUs' backlogs have become empty: all that entered has been delivered, and nothing
/// enters any more.
///
/// A program that was running when they were found empty may have found a flow held just before,
/// and let it stay: so after the end of all that were running, they must be as they were.
pub struct Drain {
    cpus: std::ops::Range<u32>,
}

impl Drain {
    /// Between two checks.
    pub const TICK: Duration = Duration::from_millis(1);

    /// The backlogs of all queues for these CPUs.
    pub fn of(cpus: std::ops::Range<u32>) -> Self {
        Self { cpus }
    }

    /// Checks; returns whether they are empty. Takes a grace period of RCU if it seems so, some
    /// tens of milliseconds.
    ///
    /// # Errors
    /// When a map can't be read.
    pub fn check(&self, datapath: &Datapath) -> Result<bool> {
        let Some(entered) = self.drained(datapath)? else {
            return Ok(false);
        };
        datapath.grace_period()?;
        Ok(self.drained(datapath)? == Some(entered))
    }

    /// The frames that ever entered, if all have been delivered.
    fn drained(&self, datapath: &Datapath) -> Result<Option<u64>> {
        let mut entered = 0;
        for queue in 0..datapath.nr_queues() {
            for cpu in self.cpus.clone() {
                entered += datapath.backlog(queue, cpu).tail;
                if !datapath.drained(queue, cpu)? {
                    return Ok(None);
                }
            }
        }
        Ok(Some(entered))
    }
}

impl Datapath {
    /// Brings every flow home to INLINE, so that plain traffic can't overtake what is still
    /// queued. For half of `patience` flows move when their frames have been delivered; after
    /// that, frames of flows that can't move yet are dropped (and counted as shed) until they can.
    ///
    /// Returns whether everything came home.
    ///
    /// # Errors
    /// When a map can't be read or written.
    pub fn bring_home(&self, patience: Duration) -> Result<bool> {
        for queue in 0..self.nr_queues() {
            self.set_queue(queue, Policy::OFF);
        }
        for (map, wait) in [
            (RpsMap::inline(), patience / 2),
            (RpsMap::inline_shed(), patience / 2),
        ] {
            for queue in 0..self.nr_queues() {
                self.set_rps_map(queue, &map);
            }
            if self.drain(wait)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits until every backlog is [`Drain`]ed.
    fn drain(&self, patience: Duration) -> Result<bool> {
        let deadline = Instant::now() + patience;
        let drain = Drain::of(0..self.nr_cpus);
        while !drain.check(self)? {
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(Drain::TICK);
        }
        Ok(true)
    }

    /// Whether all that has entered the backlog of `queue` for `cpu` is delivered, as far as that can
    /// be proven now (docs/order.md).
    ///
    /// # Errors
    /// When the kernel does not run the question.
    pub fn drained(&self, queue: u32, cpu: u32) -> Result<bool> {
        let index = queue * self.nr_cpus + cpu;
        Ok(self.call(&self.trace.progs.backlog_drained, index)? == 1)
    }

    /// Takes the entries of a CPU's backlogs out of the cpumaps, for new ones to be made when they
    /// are wanted again. Only once they are closed and [`Drain`]ed.
    ///
    /// # Errors
    /// When a map can't be written.
    pub fn remove_cpu(&self, cpu: u32) -> Result<()> {
        for queue in 0..self.nr_queues() {
            self.backlogs.remove(queue, cpu)?;
            self.call(&self.trace.progs.backlog_forget, queue * self.nr_cpus + cpu)?;
        }
        Ok(())
    }

    /// Whether any flow may want to be in the backlogs for a CPU: not while it is offline.
    pub fn close_cpu(&self, cpu: u32, closed: bool) {
        for queue in 0..self.nr_queues() {
            let index = queue * self.nr_cpus + cpu;
            let offset = offset_of!(backlog, closed);
            self.backlog_counts
                .set_field(index, offset, u64::from(closed));
        }
    }

    /// Returns when every program that was running has ended, and with it, since polls run with
    /// softirqs off, the poll that it ran in.
    pub(super) fn grace_period(&self) -> Result<()> {
        // An update of a map of maps waits for one (maybe_wait_bpf_programs() in
        // kernel/bpf/syscall.c): this one changes nothing.
        let queue = 0u32;
        let fd = self.backlogs.cpumap(queue).as_raw_fd().to_ne_bytes();
        Ok(self
            .trace
            .maps
            .cpumaps
            .update(&queue.to_ne_bytes(), &fd, MapFlags::ANY)?)
    }
}
