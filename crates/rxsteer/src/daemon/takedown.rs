// SPDX-License-Identifier: MIT OR Apache-2.0
//! Backlogs that no frame has entered for minutes are taken down; those that could not be created
//! are requested again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::info;

use crate::datapath::Datapath;
use crate::datapath::bounds::{BACKLOGS_MAX, Place};

/// Bounds on the number of backlogs, and the times until they are looked at again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Most backlogs of all queues.
    pub backlogs: usize,
    /// Time without a frame after which a backlog is taken down; zero: at each look, idle or not.
    pub idle: Duration,
    /// The same while no more backlogs may be created.
    pub idle_if_full: Duration,
    /// Time after which a failed creation is tried again.
    pub again: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            backlogs: BACKLOGS_MAX,
            idle: Duration::from_secs(300),
            idle_if_full: Duration::from_secs(10),
            again: Duration::from_secs(5),
        }
    }
}

/// Since when the present backlogs have been idle.
pub(super) struct Takedown {
    bounds: Bounds,
    seen: BTreeMap<Place, Seen>,
}

struct Seen {
    /// Frames that had ever entered.
    tail: u64,
    since: Instant,
}

impl Takedown {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            seen: BTreeMap::new(),
        }
    }

    /// Takes idle backlogs down, and lets others be requested again. To be called now and then.
    ///
    /// # Errors
    /// When a map can't be read or written.
    pub(super) fn look(&mut self, datapath: &Datapath) -> Result<()> {
        let backlogs = datapath.backlogs();
        let full = backlogs.numbers().full();
        let present = backlogs.exist().into_iter();
        let present = present.map(|place| (place, datapath.backlog(place.0, place.1).tail));
        let idle = self.idle(Instant::now(), full, present);
        if !idle.is_empty() {
            let nr_down = datapath.take_down(&idle)?;
            info!("{nr_down} idle backlogs taken down");
        }
        datapath.request_again(self.bounds.again);
        Ok(())
    }

    /// Those of the `present` backlogs, with the number of frames that ever entered, that have been
    /// idle for long enough. Each is returned once per idle time.
    fn idle(
        &mut self,
        now: Instant,
        full: bool,
        present: impl Iterator<Item = (Place, u64)>,
    ) -> Vec<Place> {
        let limit = match full {
            true => self.bounds.idle_if_full,
            false => self.bounds.idle,
        };
        let mut before = std::mem::take(&mut self.seen);
        let mut idle = Vec::new();
        for (place, tail) in present {
            let same = before.remove(&place).filter(|seen| seen.tail == tail);
            let since = same.map_or(now, |seen| seen.since);
            let is_idle = now.saturating_duration_since(since) >= limit;
            if is_idle {
                idle.push(place);
            }
            let since = if is_idle { now } else { since };
            self.seen.insert(place, Seen { tail, since });
        }
        idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Place = (0, 1);
    const B: Place = (7, 3);

    struct World {
        takedown: Takedown,
        now: Instant,
    }

    impl World {
        fn new() -> Self {
            Self {
                takedown: Takedown::new(Bounds::default()),
                now: Instant::now(),
            }
        }

        /// After so many seconds.
        fn idle(&mut self, seconds: u64, full: bool, present: &[(Place, u64)]) -> Vec<Place> {
            self.now += Duration::from_secs(seconds);
            self.takedown.idle(self.now, full, present.iter().copied())
        }
    }

    #[test]
    fn a_backlog_is_idle_after_five_minutes_without_a_frame() {
        let mut world = World::new();
        assert_eq!(world.idle(0, false, &[(A, 5), (B, 5)]), []);
        assert_eq!(world.idle(299, false, &[(A, 5), (B, 6)]), []);
        assert_eq!(world.idle(1, false, &[(A, 5), (B, 6)]), [A]);
        // The control has had a frame meanwhile.
        assert_eq!(world.idle(298, false, &[(A, 5), (B, 6)]), []);
        assert_eq!(world.idle(1, false, &[(A, 5), (B, 6)]), [B]);
    }

    #[test]
    fn one_that_could_not_be_taken_down_waits_again() {
        let mut world = World::new();
        assert_eq!(world.idle(0, false, &[(A, 5)]), []);
        assert_eq!(world.idle(300, false, &[(A, 5)]), [A]);
        assert_eq!(world.idle(299, false, &[(A, 5)]), []);
        assert_eq!(world.idle(1, false, &[(A, 5)]), [A]);
    }

    #[test]
    fn ten_seconds_are_enough_where_no_more_fit() {
        let mut world = World::new();
        assert_eq!(world.idle(0, false, &[(A, 5), (B, 0)]), []);
        assert_eq!(world.idle(9, true, &[(A, 5), (B, 1)]), []);
        assert_eq!(world.idle(1, true, &[(A, 5), (B, 1)]), [A]);
        // The control: while there is room, nothing is idle so soon.
        assert_eq!(world.idle(20, false, &[(A, 5), (B, 1)]), []);
    }

    #[test]
    fn a_new_backlog_has_its_own_time() {
        let mut world = World::new();
        assert_eq!(world.idle(0, false, &[(A, 5)]), []);
        assert_eq!(world.idle(200, false, &[]), []);
        assert_eq!(world.idle(99, false, &[(A, 5)]), []);
        assert_eq!(world.idle(299, false, &[(A, 5)]), []);
        assert_eq!(world.idle(1, false, &[(A, 5)]), [A]);
    }
}
