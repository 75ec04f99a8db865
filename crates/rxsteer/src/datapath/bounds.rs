// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bounds on the backlogs: how many may exist, which do, which could not be created, and their
//! memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use super::config::Config;

/// Most backlogs of all queues. Each is a kernel thread and a ring: 64 queues and 128 CPUs would
/// have 8,192.
pub const BACKLOGS_MAX: usize = 2048;

/// A ring releases consumed slots in batches of 16 (`ptr_ring`): it needs this number of slots
/// beyond the limit of frames.
pub(super) const RING_SLACK: u32 = 16;

/// A queue's number over all devices, and a CPU: they name a backlog.
pub type Place = (u32, u32);

/// The answer to a request for a backlog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It is to be created, and counts already.
    Create,
    Exists,
    /// There are as many as there may be. `first`: for the first time since there was room.
    Refused {
        first: bool,
    },
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Ledger {
    most: usize,
    /// Whether the kernel has created it.
    exist: BTreeMap<Place, bool>,
    refused: BTreeSet<Place>,
    failed: BTreeMap<Place, Instant>,
    /// There has been no room since a request was refused.
    full: bool,
}

impl Ledger {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            exist: BTreeMap::new(),
            refused: BTreeSet::new(),
            failed: BTreeMap::new(),
            full: false,
        }
    }

    pub(super) fn admit(&mut self, place: Place) -> Admission {
        if self.exist.contains_key(&place) {
            return Admission::Exists;
        }
        if self.exist.len() >= self.most {
            self.refused.insert(place);
            let first = !std::mem::replace(&mut self.full, true);
            return Admission::Refused { first };
        }
        self.refused.remove(&place);
        self.exist.insert(place, false);
        Admission::Create
    }

    /// The kernel has created the backlog.
    pub(super) fn created(&mut self, place: Place) {
        self.exist.insert(place, true);
    }

    /// The kernel could not create the backlog.
    pub(super) fn failed(&mut self, place: Place, now: Instant) {
        self.exist.remove(&place);
        self.failed.insert(place, now);
    }

    pub(super) fn removed(&mut self, place: Place) {
        self.exist.remove(&place);
        self.full = false;
    }

    /// Requests that may be made again: those that failed at least `after` ago, and those that were
    /// refused, as far as there is room now.
    pub(super) fn again(&mut self, now: Instant, after: Duration) -> Vec<Place> {
        let old = |since: &Instant| now.saturating_duration_since(*since) >= after;
        let mut again = Vec::new();
        self.failed.retain(|place, since| {
            let due = old(since);
            again.extend(due.then_some(*place));
            !due
        });
        for _ in self.exist.len()..self.most {
            again.extend(self.refused.pop_first());
        }
        again
    }

    pub(super) fn numbers(&self) -> Numbers {
        Numbers {
            exist: self.exist.len(),
            most: self.most,
            refused: self.refused.len(),
        }
    }

    /// Without those that are being created.
    pub(super) fn exist(&self) -> Vec<Place> {
        let created = self.exist.iter().filter(|(_, created)| **created);
        created.map(|(place, _)| *place).collect()
    }
}

/// Numbers of backlogs, over all queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// That exist or are being created.
    pub exist: usize,
    /// That may exist.
    pub most: usize,
    /// That flows want and that may not exist.
    pub refused: usize,
}

impl Numbers {
    /// Whether no more may be created.
    pub fn full(&self) -> bool {
        self.exist >= self.most
    }
}

/// Memory of the backlogs if all of them exist and are full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorstCase {
    backlogs: u64,
    /// Frames in a backlog.
    limit: u64,
    /// Rings and threads, bytes.
    rings: u64,
    /// Frames, bytes.
    frames: u64,
}

/// A kernel thread: a stack of 16 KiB on x86-64 and arm64, and its `task_struct`.
const THREAD: u64 = 28 << 10;
/// A ring's slot is a pointer.
const SLOT: u64 = 8;
/// An entry's queue of 8 frames on each CPU (`struct xdp_bulk_queue`).
const BULK_QUEUE: u64 = 128;
/// Drivers put a frame into a page; with jumbo frames it takes several.
const FRAME: u64 = 4096;

impl WorstCase {
    /// For so many receive queues and possible CPUs.
    pub fn of(config: &Config, nr_queues: u32, nr_cpus: u32) -> Self {
        Self::with(
            nr_queues,
            nr_cpus,
            config.most_backlogs,
            config.backlog_limit,
        )
    }

    fn with(nr_queues: u32, nr_cpus: u32, most: usize, limit: u32) -> Self {
        let (cpus, limit) = (u64::from(nr_cpus), u64::from(limit));
        let backlogs = (u64::from(nr_queues) * cpus).min(most as u64);
        let slots = limit + u64::from(RING_SLACK);
        Self {
            backlogs,
            limit,
            rings: backlogs * (THREAD + slots * SLOT + cpus * BULK_QUEUE),
            frames: backlogs * limit * FRAME,
        }
    }
}

impl fmt::Display for WorstCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: u64 = 1 << 20;
        let [rings, frames] = [self.rings, self.frames].map(|bytes| bytes.div_ceil(MIB));
        write!(
            f,
            "at most {} backlogs, with {rings} MiB of threads and rings; {frames} MiB of frames if \
             each holds {} of 4 KiB",
            self.backlogs, self.limit
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    #[test]
    fn no_more_than_the_most() {
        let mut ledger = Ledger::new(2);
        assert_eq!(ledger.admit((0, 1)), Admission::Create);
        assert_eq!(ledger.admit((0, 1)), Admission::Exists);
        assert!(!ledger.numbers().full());
        assert_eq!(ledger.admit((0, 2)), Admission::Create);
        // Said once.
        assert_eq!(ledger.admit((0, 3)), Admission::Refused { first: true });
        assert_eq!(ledger.admit((1, 3)), Admission::Refused { first: false });
        let numbers = ledger.numbers();
        assert_eq!((numbers.exist, numbers.refused), (2, 2));
        assert!(numbers.full());
        // Without room a refused request is not repeated.
        let now = Instant::now();
        assert_eq!(ledger.again(now + SOON, SOON), []);
        ledger.removed((0, 1));
        assert_eq!(ledger.again(now, SOON), [(0, 3)]);
        assert_eq!(ledger.admit((0, 3)), Admission::Create);
        assert_eq!(ledger.admit((0, 1)), Admission::Refused { first: true });
        assert_eq!(ledger.numbers().refused, 2);
    }

    #[test]
    fn one_that_is_being_created_counts_and_does_not_exist() {
        let mut ledger = Ledger::new(1);
        ledger.admit((0, 1));
        assert!(ledger.numbers().full());
        assert_eq!(ledger.exist(), []);
        ledger.created((0, 1));
        assert_eq!(ledger.exist(), [(0, 1)]);
    }

    #[test]
    fn what_failed_is_requested_again_after_some_time() {
        let mut ledger = Ledger::new(9);
        let start = Instant::now();
        ledger.admit((3, 1));
        ledger.failed((3, 1), start);
        assert_eq!(ledger.numbers().exist, 0);
        let just_before = start + SOON - Duration::from_millis(1);
        assert_eq!(ledger.again(just_before, SOON), []);
        assert_eq!(ledger.again(start + SOON, SOON), [(3, 1)]);
        // Once.
        assert_eq!(ledger.again(start + SOON, SOON), []);
        assert_eq!(ledger.admit((3, 1)), Admission::Create);
    }

    #[test]
    fn the_worst_case_is_bounded() {
        let text = |queues, cpus| WorstCase::with(queues, cpus, BACKLOGS_MAX, 1000).to_string();
        assert_eq!(
            text(64, 128),
            "at most 2048 backlogs, with 104 MiB of threads and rings; 8000 MiB of frames if each \
             holds 1000 of 4 KiB"
        );
        assert!(text(1, 2).starts_with("at most 2 backlogs, with 1 MiB"));
    }
}
