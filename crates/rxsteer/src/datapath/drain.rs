// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backlogs of the loaded data path: drained, taken down, and frames that vanished
//! (docs/order.md).

use std::mem::offset_of;
use std::time::Duration;

use anyhow::Result;

use super::backlogged::{Backlogged, Drain, grace_period};
use super::bounds::Place;
use super::loaded::Datapath;
use super::policy::Policy;
use super::rps_map::RpsMap;
use crate::host::cpumask::CpuMask;
use crate::host::softnet;
use crate::types::{backlog, backlog_closed, backlog_flushed, rx_mixings};

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
        Ok(self.backlog(queue, cpu).tail)
    }

    fn drained(&self, queue: u32, cpu: u32) -> Result<bool> {
        let index = queue * self.nr_cpus + cpu;
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
    /// [`Backlogged::find_vanished`] without skb mode.
    ///
    /// # Errors
    /// When a map can't be read, or when the kernel can't run the program.
    pub fn find_vanished_frames(&self) -> Result<()> {
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

    /// As [`Self::find_vanished_frames`], for skbs on their way to other CPUs: their device was deleted or set
    /// down, or another program has dropped them. Later skbs show that too (`backlog_heal()` in
    /// bpf/core/backlog.h).
    ///
    /// An skb is in its CPU's softnet backlog twice. After the first grace period all that were sent
    /// have come there. If a CPU's backlog is empty then, its skbs have left it once, and after the
    /// second one those that go on have come back; if the backlog is empty again, they have left it
    /// for good, and have been passed up after the third. Takes these times if skbs are missing.
    ///
    /// # Errors
    /// As [`Self::find_vanished_frames`]; when the softnet backlogs can't be read.
    pub fn find_vanished_skbs(&self) -> Result<()> {
        let Some(first) = self.skb_queue() else {
            return Ok(());
        };
        let mut flushed = self.flushed(first..self.nr_queues());
        // What a CPU held that went offline may wait on another one.
        let down = self.cpus_down();
        flushed.retain(|flushed| !down.contains(flushed.index % self.nr_cpus));
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

    /// Lets slots of skb mode that are mixed move again, whatever CPUs do (`polls_ended()` in
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
        for queue in self.skb_queue().unwrap_or(self.nr_queues())..self.nr_queues() {
            self.close(queue, cpu, backlog_closed::BACKLOG_PASSED, true);
            self.close(queue, cpu, backlog_closed::BACKLOG_DOWN, false);
        }
    }

    /// The CPUs of whose softnet backlogs the kernel may not have passed up all yet since it took
    /// the CPUs down, or tried to (`on_cpuhp_enter` in `bpf/carrier.bpf.c`).
    pub fn cpus_down(&self) -> CpuMask {
        let Some(queue) = self.skb_queue() else {
            return CpuMask::default();
        };
        let down = u64::from(backlog_closed::BACKLOG_DOWN.0);
        (0..self.nr_cpus)
            .filter(|&cpu| self.backlog(queue, cpu).closed & down != 0)
            .collect()
    }

    /// Adds or removes a reason why no flow may want a backlog.
    pub fn close(&self, queue: u32, cpu: u32, why: backlog_closed, closed: bool) {
        let index = queue * self.nr_cpus + cpu;
        let offset = offset_of!(backlog, closed);
        self.backlog_counts
            .set_bit(index, offset, why.0.into(), closed);
    }
}
