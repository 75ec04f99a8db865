// SPDX-License-Identifier: MIT OR Apache-2.0
//! Return of flows to INLINE, and the check that backlogs are drained (docs/order.md), for loaded and
//! for pinned steering.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::{MapCore, MapFlags};

use super::rps_map;

/// What has backlogs that can be drained: the loaded data path, or a pinned one of any version.
pub trait Backlogged {
    /// Number of queues of all devices.
    fn nr_queues(&self) -> u32;

    /// Number of possible CPU ids.
    fn nr_cpus(&self) -> u32;

    /// Gives all flows of a queue one location, [`rps_map::INLINE`] or [`rps_map::INLINE_SHED`], and
    /// the queue no policy. Flows move under the rule of order.
    ///
    /// # Errors
    /// When the kernel can't run the program.
    fn send(&self, queue: u32, location: u16) -> Result<()>;

    /// Frames that ever entered the backlog of `queue` for `cpu`.
    ///
    /// # Errors
    /// When the kernel can't run the program.
    fn entered(&self, queue: u32, cpu: u32) -> Result<u64>;

    /// Whether all frames that entered this backlog have been delivered, as far as can be proven now
    /// (docs/order.md).
    ///
    /// # Errors
    /// When the kernel can't run the program.
    fn drained(&self, queue: u32, cpu: u32) -> Result<bool>;

    /// Counts frames that vanished on the way into a backlog (docs/backlog.md), for flows and
    /// backlogs that see no more packets. Takes a grace period if a backlog holds frames.
    ///
    /// # Errors
    /// When a map can't be read, or when the kernel can't run the program.
    fn find_vanished(&self) -> Result<()>;

    /// Returns when every program that was running has ended, and also the poll in which it ran,
    /// since polls run with softirqs off.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn grace_period(&self) -> Result<()>;

    /// Returns every flow to INLINE, so that plain traffic can't overtake queued frames. For half
    /// of `patience`, flows move when their frames have been delivered; after that, frames of flows
    /// that can't move yet are dropped (and counted as shed) until these flows can move.
    ///
    /// Returns whether all flows have returned.
    ///
    /// # Errors
    /// When a map can't be read or written.
    fn return_inline(&self, patience: Duration) -> Result<bool>
    where
        Self: Sized,
    {
        for location in [rps_map::INLINE, rps_map::INLINE_SHED] {
            for queue in 0..self.nr_queues() {
                self.send(queue, location)?;
            }
            if drain(self, patience / 2)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Waits until every backlog is drained; returns false after `patience`.
fn drain(of: &impl Backlogged, patience: Duration) -> Result<bool> {
    let deadline = Instant::now() + patience;
    let drain = Drain::of(0..of.nr_cpus());
    for check in 1.. {
        if drain.check(of)? {
            return Ok(true);
        }
        if Instant::now() > deadline {
            break;
        }
        // The account takes a grace period, in which most backlogs drain.
        if check % 64 == 0 {
            of.find_vanished()?;
        }
        std::thread::sleep(Drain::TICK);
    }
    Ok(false)
}

/// A grace period of RCU. An update of a map of maps waits for one (maybe_wait_bpf_programs() in
/// kernel/bpf/syscall.c); this one changes nothing. `cpumap` is the one of queue 0.
pub(super) fn grace_period(cpumaps: &impl MapCore, cpumap: BorrowedFd<'_>) -> Result<()> {
    let fd = cpumap.as_raw_fd().to_ne_bytes();
    Ok(cpumaps.update(&0u32.to_ne_bytes(), &fd, MapFlags::ANY)?)
}

/// Whether the backlogs of some CPUs are drained: all frames that entered have been delivered, and
/// no more enter.
///
/// A program that ran during the first check may still hold a flow there and add frames. The second
/// check, after a grace period, therefore compares the number of frames that ever entered.
pub struct Drain {
    /// `None`: all.
    queue: Option<u32>,
    cpus: Range<u32>,
}

impl Drain {
    /// Time between two checks.
    pub const TICK: Duration = Duration::from_millis(1);

    /// The backlogs of all queues for these CPUs.
    pub fn of(cpus: Range<u32>) -> Self {
        Self { queue: None, cpus }
    }

    pub(super) fn of_backlog(queue: u32, cpu: u32) -> Self {
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
    pub fn check(&self, of: &impl Backlogged) -> Result<bool> {
        let Some(entered) = self.drained(of)? else {
            return Ok(false);
        };
        of.grace_period()?;
        Ok(self.drained(of)? == Some(entered))
    }

    /// The number of frames that ever entered, if all have been delivered.
    pub fn drained(&self, of: &impl Backlogged) -> Result<Option<u64>> {
        let mut entered = 0;
        let queues = match self.queue {
            Some(queue) => queue..queue + 1,
            None => 0..of.nr_queues(),
        };
        for queue in queues {
            for cpu in self.cpus.clone() {
                let nr = of.entered(queue, cpu)?;
                if nr > 0 && !of.drained(queue, cpu)? {
                    return Ok(None);
                }
                entered += nr;
            }
        }
        Ok(Some(entered))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const NR_CPUS: u32 = 128;

    /// Backlogs for [`NR_CPUS`] CPUs from as many queues; in some of them, frames have entered.
    struct Fake {
        used: Vec<(u32, u32)>,
        drained: bool,
        nr_proofs: Cell<usize>,
    }

    impl Backlogged for Fake {
        fn nr_queues(&self) -> u32 {
            NR_CPUS
        }

        fn nr_cpus(&self) -> u32 {
            NR_CPUS
        }

        fn send(&self, _: u32, _: u16) -> Result<()> {
            Ok(())
        }

        fn entered(&self, queue: u32, cpu: u32) -> Result<u64> {
            Ok(u64::from(self.used.contains(&(queue, cpu))))
        }

        fn drained(&self, _: u32, _: u32) -> Result<bool> {
            self.nr_proofs.set(self.nr_proofs.get() + 1);
            Ok(self.drained)
        }

        fn find_vanished(&self) -> Result<()> {
            Ok(())
        }

        fn grace_period(&self) -> Result<()> {
            Ok(())
        }
    }

    /// Each is a call of a BPF program.
    #[test]
    fn only_backlogs_that_frames_have_entered_are_proven_drained() {
        let proofs = |cpus: Range<u32>, used: &[(u32, u32)], drained| {
            let fake = Fake {
                used: used.to_vec(),
                drained,
                nr_proofs: Cell::new(0),
            };
            let entered = Drain::of(cpus).drained(&fake).expect("a fake");
            (entered, fake.nr_proofs.get())
        };
        let used = [(0, 1), (5, 1), (127, 1), (127, 2)];
        assert_eq!(proofs(1..2, &used, true), (Some(3), 3));
        assert_eq!(proofs(0..NR_CPUS, &used, true), (Some(4), 4));
        assert_eq!(proofs(3..4, &used, true), (Some(0), 0));
        // The control: one that is not drained ends the check.
        assert_eq!(proofs(0..NR_CPUS, &used, false), (None, 1));
    }
}
