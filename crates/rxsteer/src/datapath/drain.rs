// SPDX-License-Identifier: MIT OR Apache-2.0
//! Return of flows to INLINE, and the check that backlogs are drained (docs/order.md).

use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::{MapCore, MapFlags};

use super::bounds::Place;
use super::loaded::Datapath;
use super::policy::Policy;
use super::rps_map::RpsMap;
use crate::host::softnet;
use crate::types::{backlog, backlog_closed, backlog_flushed};

/// Whether the backlogs of some CPUs are drained: all frames that entered have been delivered, and
/// no more enter.
///
/// A program that ran during the first check may still hold a flow there and add frames. The second
/// check, after a grace period, therefore compares the number of frames that ever entered.
pub struct Drain {
    /// `None`: all.
    queue: Option<u32>,
    cpus: std::ops::Range<u32>,
}

impl Drain {
    /// Time between two checks.
    pub const TICK: Duration = Duration::from_millis(1);

    /// The backlogs of all queues for these CPUs.
    pub fn of(cpus: std::ops::Range<u32>) -> Self {
        Self { queue: None, cpus }
    }

    fn of_backlog(queue: u32, cpu: u32) -> Self {
        Self {
            queue: Some(queue),
            cpus: cpu..cpu + 1,
        }
    }

    /// Returns whether the backlogs are drained. If the first check succeeds, the call takes a
    /// grace period of RCU, some tens of milliseconds.
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

    /// The number of frames that ever entered, if all have been delivered.
    fn drained(&self, datapath: &Datapath) -> Result<Option<u64>> {
        let mut entered = 0;
        let queues = match self.queue {
            Some(queue) => queue..queue + 1,
            None => 0..datapath.nr_queues(),
        };
        for queue in queues {
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
    /// Returns every flow to INLINE, so that plain traffic can't overtake queued frames. For half
    /// of `patience`, flows move when their frames have been delivered; after that, frames of flows
    /// that can't move yet are dropped (and counted as shed) until these flows can move.
    ///
    /// Returns whether all flows have returned.
    ///
    /// # Errors
    /// When a map can't be read or written.
    pub fn return_inline(&self, patience: Duration) -> Result<bool> {
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

    /// Waits until every backlog is drained; returns false after `patience`.
    fn drain(&self, patience: Duration) -> Result<bool> {
        let deadline = Instant::now() + patience;
        let drain = Drain::of(0..self.nr_cpus);
        for check in 1.. {
            if drain.check(self)? {
                return Ok(true);
            }
            if Instant::now() > deadline {
                break;
            }
            // The account takes a grace period, in which most backlogs drain.
            if check % 64 == 0 {
                self.find_vanished()?;
                self.find_vanished_skbs()?;
            }
            std::thread::sleep(Drain::TICK);
        }
        Ok(false)
    }

    /// Counts frames that vanished on the way into a backlog (docs/backlog.md), for flows and
    /// backlogs that see no more packets. Takes a grace period if a backlog holds frames.
    ///
    /// # Errors
    /// When a map can't be read, or when the kernel can't run the program.
    pub fn find_vanished(&self) -> Result<()> {
        let flushed = self.flushed(0..self.skb_queue().unwrap_or(self.nr_queues()));
        if flushed.is_empty() {
            return Ok(());
        }
        self.grace_period()?;
        for flushed in flushed {
            self.call(&self.trace.progs.backlog_settled, flushed)?;
        }
        Ok(())
    }

    /// As [`Self::find_vanished`], for skbs on their way to other CPUs: their device was deleted or set
    /// down, or another program has dropped them. Later skbs show that too (`backlog_heal()` in
    /// bpf/core/backlog.h).
    ///
    /// An skb is in its CPU's softnet backlog twice. After the first grace period all that were sent
    /// have come there. If a CPU's backlog is empty then, its skbs have left it once, and after the
    /// second one those that go on have come back; if the backlog is empty again, they have left it
    /// for good, and have been passed up after the third. Takes these times if skbs are missing.
    ///
    /// # Errors
    /// As [`Self::find_vanished`]; when the softnet backlogs can't be read.
    pub fn find_vanished_skbs(&self) -> Result<()> {
        let Some(first) = self.skb_queue() else {
            return Ok(());
        };
        let mut flushed = self.flushed(first..self.nr_queues());
        for _ in 0..2 {
            if flushed.is_empty() {
                return Ok(());
            }
            self.grace_period()?;
            let softnet = softnet::read()?;
            let empty = |cpu| softnet.iter().any(|s| s.cpu == cpu && s.waiting == 0);
            flushed.retain(|flushed| empty(flushed.index % self.nr_cpus));
        }
        self.grace_period()?;
        for flushed in flushed {
            self.call(&self.trace.progs.backlog_healed, flushed)?;
        }
        Ok(())
    }

    /// The backlogs of these queues that hold frames, or from which frames have vanished.
    fn flushed(&self, queues: std::ops::Range<u32>) -> Vec<backlog_flushed> {
        let holds = |b: &backlog| b.tail != b.dequeued + b.nr_lost + b.nr_vanished;
        (queues.start * self.nr_cpus..queues.end * self.nr_cpus)
            .map(|index| (index, self.backlog_counts.get(index)))
            .filter(|(_, b)| holds(b))
            .map(|(index, backlog { tail, .. })| backlog_flushed {
                index,
                tail,
                ..Default::default()
            })
            .collect()
    }

    /// The backlogs that are in use: those that exist, and those of skb mode that hold skbs.
    pub fn in_use(&self) -> Vec<Place> {
        let queues = self
            .skb_queue()
            .map_or(0..0, |first| first..self.nr_queues());
        let softnet = self.flushed(queues).into_iter();
        let softnet = softnet.map(|f| (f.index / self.nr_cpus, f.index % self.nr_cpus));
        self.backlogs.exist().into_iter().chain(softnet).collect()
    }

    /// Whether all frames that entered the backlog of `queue` for `cpu` have been delivered, as far
    /// as can be proven now (docs/order.md).
    ///
    /// # Errors
    /// When the kernel can't run the program.
    pub fn drained(&self, queue: u32, cpu: u32) -> Result<bool> {
        let index = queue * self.nr_cpus + cpu;
        Ok(self.call(&self.trace.progs.backlog_drained, index)? == 1)
    }

    /// Removes the entries of a CPU's backlogs from the cpumaps; new entries are created when flows
    /// want the CPU again. Only for backlogs that are closed and drained ([`Drain`]).
    ///
    /// # Errors
    /// When a map can't be written.
    pub fn remove_cpu(&self, cpu: u32) -> Result<()> {
        for queue in 0..self.nr_queues() {
            self.remove_backlog(queue, cpu)?;
        }
        Ok(())
    }

    /// Takes down idle backlogs: their threads end. Backlogs that are not drained stay, as do those
    /// that are closed for another reason. The backlogs are closed meanwhile, so that no flow enters
    /// them; new ones are created when flows want them again. Returns how many were taken down. The
    /// call takes a grace period of RCU.
    ///
    /// # Errors
    /// When a map can't be read or written.
    pub fn take_down(&self, places: &[Place]) -> Result<usize> {
        let open = |&&(queue, cpu): &&Place| self.backlog(queue, cpu).closed == 0;
        let places: Vec<Place> = places.iter().filter(open).copied().collect();
        for &(queue, cpu) in &places {
            self.close(queue, cpu, backlog_closed::BACKLOG_IDLE, true);
        }
        let outcome = self.take_down_closed(&places);
        for &(queue, cpu) in &places {
            self.close(queue, cpu, backlog_closed::BACKLOG_IDLE, false);
        }
        outcome
    }

    /// Two checks around a grace period, as in [`Drain`], for each backlog by itself.
    fn take_down_closed(&self, places: &[Place]) -> Result<usize> {
        let mut drains: Vec<(Drain, Place, u64)> = Vec::new();
        for &(queue, cpu) in places {
            let drain = Drain::of_backlog(queue, cpu);
            if let Some(entered) = drain.drained(self)? {
                drains.push((drain, (queue, cpu), entered));
            }
        }
        self.grace_period()?;
        let mut nr_down = 0;
        for (drain, (queue, cpu), entered) in drains {
            if drain.drained(self)? == Some(entered) {
                self.remove_backlog(queue, cpu)?;
                nr_down += 1;
            }
        }
        Ok(nr_down)
    }

    /// Lets flows request backlogs again that could not be created: `after` this time if creation
    /// failed, otherwise as soon as there is room.
    pub fn request_again(&self, after: Duration) {
        for (queue, cpu) in self.backlogs.again(after) {
            let index = queue * self.nr_cpus + cpu;
            let wanted = offset_of!(backlog, wanted);
            self.backlog_counts.set_field(index, wanted, 0u64);
        }
    }

    fn remove_backlog(&self, queue: u32, cpu: u32) -> Result<()> {
        self.backlogs.remove(queue, cpu)?;
        self.call(&self.trace.progs.backlog_forget, queue * self.nr_cpus + cpu)?;
        Ok(())
    }

    /// Closes or opens the backlogs for a CPU that is offline or was.
    pub fn close_cpu(&self, cpu: u32, closed: bool) {
        for queue in 0..self.nr_queues() {
            self.close(queue, cpu, backlog_closed::BACKLOG_OFFLINE, closed);
        }
    }

    /// Adds or removes a reason why no flow may want a backlog. Only one thread may call this.
    pub fn close(&self, queue: u32, cpu: u32, why: backlog_closed, closed: bool) {
        let before = self.backlog(queue, cpu).closed;
        let why = u64::from(why.0);
        let now = if closed { before | why } else { before & !why };
        let index = queue * self.nr_cpus + cpu;
        let offset = offset_of!(backlog, closed);
        self.backlog_counts.set_field(index, offset, now);
    }

    /// Returns when every program that was running has ended, and also the poll in which it ran,
    /// since polls run with softirqs off.
    pub(super) fn grace_period(&self) -> Result<()> {
        // An update of a map of maps waits for a grace period (maybe_wait_bpf_programs() in
        // kernel/bpf/syscall.c). This update changes nothing.
        let queue = 0u32;
        let fd = self.backlogs.cpumap(queue).as_raw_fd().to_ne_bytes();
        Ok(self
            .trace
            .maps
            .cpumaps
            .update(&queue.to_ne_bytes(), &fd, MapFlags::ANY)?)
    }
}
