// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backlogs of the loaded data path: drained, taken down, and frames that vanished
//! (docs/order.md).

use std::mem::offset_of;
use std::ops::Range;
use std::time::Duration;

use anyhow::Result;

use super::backlogged::{Backlogged, Drain, grace_period};
use super::bounds::Place;
use super::call;
use super::loaded::Datapath;
use super::policy::Policy;
use super::rps_map::RpsMap;
use crate::host::cpumask::CpuMask;
use crate::types::{backlog, backlog_closed, backlog_flushed, backlog_request, rx_mixings};

impl Backlogged for Datapath {
    fn nr_queues(&self) -> u32 {
        self.nr_queues()
    }

    fn nr_cpus(&self) -> u32 {
        self.nr_cpus
    }

    fn send(&self, queue: u32, location: u16) -> Result<()> {
        self.set_queue(queue, Policy::OFF);
        self.set_rps_map(queue, &RpsMap::all(location));
        Ok(())
    }

    fn entered(&self, queue: u32, cpu: u32) -> Result<u64> {
        Ok(self.word(queue, cpu, offset_of!(backlog, tail)))
    }

    fn drained(&self, queue: u32, cpu: u32) -> Result<bool> {
        if self.held(queue, cpu).is_some() {
            return Ok(false);
        }
        let index = queue * self.nr_cpus + cpu;
        if self.softirq_queues().contains(&queue) {
            return self.settled(backlog_flushed {
                index,
                ..Default::default()
            });
        }
        Ok(self.call(&self.trace.progs.backlog_drained, index)? == 1)
    }

    fn find_vanished(&self) -> Result<()> {
        self.find_vanished_frames()?;
        self.find_vanished_skbs()
    }

    fn grace_period(&self) -> Result<()> {
        grace_period(&self.trace.maps.cpumaps, self.backlogs.cpumap(0))
    }
}

impl Datapath {
    /// [`Backlogged::find_vanished`] without softirq mode.
    ///
    /// # Errors
    /// When a map can't be read, or when the kernel can't run the program.
    pub fn find_vanished_frames(&self) -> Result<()> {
        let softirq = self.softirq_queues();
        let mut threads = self.backlogs.exist();
        threads.retain(|(queue, _)| !softirq.contains(queue));
        let flushed = self.flushed(threads);
        if flushed.is_empty() {
            return Ok(());
        }
        self.grace_period()?;
        for flushed in flushed {
            self.call(&self.trace.progs.backlog_settled, flushed)?;
        }
        Ok(())
    }

    /// As [`Self::find_vanished_frames`], for skbs on their way to other CPUs: their device was deleted or set
    /// down, or another program has dropped them. Takes a grace period if skbs are missing.
    ///
    /// # Errors
    /// As [`Self::find_vanished_frames`].
    pub fn find_vanished_skbs(&self) -> Result<()> {
        let mut flushed = self.flushed(self.softnet_backlogs());
        // What a CPU held that went offline may wait on another one.
        let down = self.cpus_down();
        flushed.retain(|flushed| !down.contains(flushed.index % self.nr_cpus));
        if flushed.is_empty() {
            return Ok(());
        }
        self.grace_period()?;
        flushed
            .into_iter()
            .try_for_each(|flushed| self.settled(flushed).map(drop))
    }

    /// Whether the CPU of a softnet backlog has passed up all that entered; counts what has vanished.
    fn settled(&self, mut flushed: backlog_flushed) -> Result<bool> {
        Ok(call::call(self.hops()?.settled(), &mut flushed)? == 1)
    }

    /// Lets slots of softirq mode that are mixed move again, whatever CPUs do (`polls_ended()` in
    /// `bpf/rx.h`): after a grace period all polls have ended that began before. Takes no time while
    /// no slot was mixed since the last call. To be called now and then.
    ///
    /// # Errors
    /// As [`Self::find_vanished_frames`].
    pub fn settle_mixings(&self) -> Result<()> {
        let rx_mixings { nr, settled } = self.mixings.get(0);
        if nr == settled {
            return Ok(());
        }
        self.grace_period()?;
        self.mixings
            .set_field(0, offset_of!(rx_mixings, settled), nr);
        Ok(())
    }

    /// Those of these backlogs that hold frames, or from which frames have vanished.
    fn flushed(&self, places: Vec<Place>) -> Vec<backlog_flushed> {
        let flushed = places.into_iter().filter_map(|(queue, cpu)| {
            Some(backlog_flushed {
                index: queue * self.nr_cpus + cpu,
                tail: self.held(queue, cpu)?,
                ..Default::default()
            })
        });
        flushed.collect()
    }

    /// The queues of softirq mode.
    fn softirq_queues(&self) -> Range<u32> {
        self.softirq_queue().unwrap_or(self.nr_queues())..self.nr_queues()
    }

    /// The backlogs of softirq mode.
    fn softnet_backlogs(&self) -> Vec<Place> {
        let softirq = self.softirq_queues();
        let mut softnet = self.backlogs.exist();
        softnet.retain(|(queue, _)| softirq.contains(queue));
        softnet
    }

    /// The ways of softirq mode from which packets have come elsewhere, and which are closed. To be asked now and
    /// then: the request may have been lost, or the CPU offline.
    pub fn misdirected(&self) -> Vec<backlog_request> {
        let closed = |&(queue, cpu): &Place| {
            let closed = self.word(queue, cpu, offset_of!(backlog, closed));
            closed & u64::from(backlog_closed::BACKLOG_MISDIRECTED.0) != 0
        };
        let places = self.softnet_backlogs().into_iter().filter(closed);
        places
            .map(|(queue, cpu)| backlog_request { queue, cpu })
            .collect()
    }

    /// The number of frames that ever entered the backlog, if it holds some, or if some have vanished
    /// from it. Not exact under traffic.
    fn held(&self, queue: u32, cpu: u32) -> Option<u64> {
        let word = |offset| self.word(queue, cpu, offset);
        let tail = word(offset_of!(backlog, tail));
        let gone = || {
            word(offset_of!(backlog, dequeued))
                + word(offset_of!(backlog, nr_lost))
                + word(offset_of!(backlog, nr_vanished))
        };
        (tail != 0 && tail != gone()).then_some(tail)
    }

    /// A counter of the backlog. Scans read no more: there may be many thousand backlogs.
    fn word(&self, queue: u32, cpu: u32, offset: usize) -> u64 {
        let index = queue * self.nr_cpus + cpu;
        self.backlog_counts.get_field(index, offset)
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
        let open = |&&(queue, cpu): &&Place| self.is_open(queue, cpu);
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

    /// Closes the backlogs for a CPU that is offline or was.
    pub fn close_cpu(&self, cpu: u32) {
        for queue in 0..self.nr_queues() {
            self.close(queue, cpu, backlog_closed::BACKLOG_OFFLINE, true);
        }
    }

    /// Opens the backlogs for a CPU that is online. No flow may enter one of them while it may leave
    /// another one at once.
    pub fn open_cpu(&self, cpu: u32) {
        for why in [
            backlog_closed::BACKLOG_DOWN,
            backlog_closed::BACKLOG_PASSED,
            backlog_closed::BACKLOG_SHED,
            backlog_closed::BACKLOG_OFFLINE,
        ] {
            for queue in 0..self.nr_queues() {
                self.close(queue, cpu, why, false);
            }
        }
    }

    /// Lets all flows leave the closed softnet backlogs for a CPU that is or was offline: all that
    /// entered them counts as passed up.
    pub fn leave_cpu(&self, cpu: u32) {
        for queue in self.softirq_queues() {
            self.close(queue, cpu, backlog_closed::BACKLOG_PASSED, true);
            self.close(queue, cpu, backlog_closed::BACKLOG_DOWN, false);
        }
    }

    /// Lets nothing more enter the closed backlogs for a CPU that is or was offline, but for those of
    /// softirq mode: frames of flows that can't leave yet are dropped. Returns whether any holds frames.
    pub fn shed_cpu(&self, cpu: u32) -> bool {
        let mut queues = 0..self.softirq_queues().start;
        for queue in queues.clone() {
            self.close(queue, cpu, backlog_closed::BACKLOG_SHED, true);
        }
        queues.any(|queue| self.held(queue, cpu).is_some())
    }

    /// The CPUs of whose softnet backlogs the kernel may not have passed up all yet since it took
    /// the CPUs down, or tried to (`on_cpuhp_enter` in `bpf/hops.bpf.c`).
    pub fn cpus_down(&self) -> CpuMask {
        (0..self.nr_cpus).filter(|&cpu| self.is_down(cpu)).collect()
    }

    /// Whether this is one of [`Self::cpus_down`].
    pub fn is_down(&self, cpu: u32) -> bool {
        let down = u64::from(backlog_closed::BACKLOG_DOWN.0);
        self.softirq_queue()
            .is_some_and(|queue| self.closed(queue, cpu) & down != 0)
    }

    /// The reasons why no flow may want a backlog (`enum backlog_closed`).
    pub(super) fn closed(&self, queue: u32, cpu: u32) -> u64 {
        self.word(queue, cpu, offset_of!(backlog, closed))
    }

    /// Whether nothing but the queue's mask may keep flows from the backlog.
    pub(super) fn is_open(&self, queue: u32, cpu: u32) -> bool {
        let outside = u64::from(backlog_closed::BACKLOG_OUTSIDE.0);
        self.closed(queue, cpu) & !outside == 0
    }

    /// Spreads the queue's flows over these CPUs by RPS; no flow goes to another CPU than these and the
    /// polling one. The CPUs are open before flows want them, and closed when none wants them by RPS.
    pub fn set_mask(&self, queue: u32, cpus: &CpuMask) {
        let close = |closed: bool| {
            for cpu in (0..self.nr_cpus).filter(|&cpu| cpus.contains(cpu) != closed) {
                self.close(queue, cpu, backlog_closed::BACKLOG_OUTSIDE, closed);
            }
        };
        let cpus: Vec<u32> = cpus.iter().collect();
        close(false);
        self.set_rps_map(queue, &self.rps_map(queue).spread_over(&cpus));
        close(true);
    }

    /// Adds or removes a reason why no flow may want a backlog.
    pub fn close(&self, queue: u32, cpu: u32, why: backlog_closed, closed: bool) {
        let index = queue * self.nr_cpus + cpu;
        let offset = offset_of!(backlog, closed);
        self.backlog_counts
            .set_bit(index, offset, why.0.into(), closed);
    }
}
