// SPDX-License-Identifier: MIT OR Apache-2.0
//! Backlogs whose frames wait although nothing is dequeued: a real-time task occupies the CPU, a
//! cgroup limits it, or the hypervisor does not run it. No new flow goes there until it makes
//! progress again. Flows that have frames there stay, by the rule of order, until these frames have
//! been delivered.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::{info, warn};

use super::plan::Steered;
use crate::datapath::bounds::Place;
use crate::datapath::{Backlogged, Datapath};
use crate::types::{backlog, backlog_closed};

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// A backlog is stalled when nothing was dequeued for this time while frames waited.
const STALL: Duration = Duration::from_millis(200);

/// Time without a stall after which flows may go there again.
const RECOVERY: Duration = Duration::from_secs(2);

/// What each backlog does that existed at the last look.
pub(super) struct Watch {
    looked: Instant,
    backlogs: BTreeMap<Place, Progress>,
}

/// Whether a backlog makes progress, from one look to the next.
#[derive(Debug, Default)]
struct Progress {
    dequeued: u64,
    /// The first look that found frames waiting with this `dequeued`.
    waits_since: Option<Instant>,
    /// The last look that found a stall, until the recovery.
    stalled_at: Option<Instant>,
}

/// A change of the state of a backlog.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    Stalled,
    Recovered,
    /// Frames are missing, and the thread sleeps: they have vanished on the way into the backlog.
    Vanished,
}

impl Progress {
    /// A look at a backlog: whether frames wait, and the number of those dequeued so far. `starved`
    /// is asked before the backlog counts as stalled: whether its thread wants to run.
    fn look(
        &mut self,
        now: Instant,
        waiting: bool,
        dequeued: u64,
        starved: impl FnOnce() -> bool,
    ) -> Option<Turn> {
        let waits_since = self.waits_since.filter(|_| dequeued == self.dequeued);
        self.waits_since = waiting.then(|| waits_since.unwrap_or(now));
        self.dequeued = dequeued;
        let waits_for = |since| now.duration_since(since);
        let stall = self
            .waits_since
            .is_some_and(|since| waits_for(since) >= STALL);
        match self.stalled_at {
            None if stall && starved() => {
                self.stalled_at = Some(now);
                Some(Turn::Stalled)
            }
            None if stall => Some(Turn::Vanished),
            Some(_) if stall => {
                self.stalled_at = Some(now);
                None
            }
            Some(at) if now.duration_since(at) >= RECOVERY => {
                self.stalled_at = None;
                Some(Turn::Recovered)
            }
            _ => None,
        }
    }
}

impl Watch {
    /// Without backlogs.
    pub(super) fn new() -> Self {
        Self {
            looked: Instant::now(),
            backlogs: BTreeMap::new(),
        }
    }

    /// Time until the next look is due: without backlogs there is nothing to look at. The creation
    /// of a backlog wakes nobody; a caller that waits for something else at the latest after a
    /// second notices the first one then. In softirq mode backlogs are not created: only a look finds
    /// those that hold packets.
    pub(super) fn due(&self, datapath: &Datapath) -> Duration {
        self.due_with(datapath.backlogs().numbers().exist)
    }

    fn due_with(&self, nr_backlogs: usize) -> Duration {
        match nr_backlogs == 0 && self.backlogs.is_empty() {
            true => Duration::MAX,
            false => LOOK.saturating_sub(self.looked.elapsed()),
        }
    }

    /// Whether a look is due, which begins then. Backlogs are searched in no other call: callers
    /// that wait for a CPU's backlogs call a thousand times a second.
    fn begins(&mut self, now: Instant) -> bool {
        let due = now.duration_since(self.looked) >= LOOK;
        if due {
            self.looked = now;
        }
        due
    }

    /// From now on watches the backlogs that `exist`. Returns those that counted as stalled and are
    /// gone: a new backlog in their place has not stalled.
    fn watch(&mut self, exist: Vec<Place>) -> Vec<Place> {
        let mut before = std::mem::take(&mut self.backlogs);
        for place in exist {
            let progress = before.remove(&place).unwrap_or_default();
            self.backlogs.insert(place, progress);
        }
        let stalled = |(place, progress): (_, Progress)| progress.stalled_at.map(|_| place);
        before.into_iter().filter_map(stalled).collect()
    }

    /// Looks at all backlogs if that is due; closes those that stall, opens those that have
    /// recovered or are gone.
    ///
    /// # Errors
    /// When frames that vanished can't be counted ([`Backlogged::find_vanished`]).
    pub(super) fn look(&mut self, datapath: &Datapath, devices: &[Steered]) -> Result<()> {
        if !self.begins(Instant::now()) {
            return Ok(());
        }
        let mut vanished = false;
        for (queue, cpu) in self.watch(datapath.backlogs().exist()) {
            datapath.close(queue, cpu, backlog_closed::BACKLOG_STALLED, false);
        }
        for (&(queue, cpu), progress) in &mut self.backlogs {
            let b = datapath.backlog(queue, cpu);
            let starved = || datapath.starves(queue, cpu);
            let turn = progress.look(self.looked, waiting(&b) > 0, b.dequeued, starved);
            let Some(turn) = turn else { continue };
            if turn == Turn::Vanished {
                vanished = true;
                continue;
            }
            let stalled = turn == Turn::Stalled;
            datapath.close(queue, cpu, backlog_closed::BACKLOG_STALLED, stalled);
            let name = name_of(devices, queue);
            match stalled {
                true => {
                    let thread = datapath.thread_of(queue, cpu);
                    let what = stall(cpu, waiting(&b), thread.as_deref());
                    warn!(cpu, "{name}: {what}");
                }
                false => info!(
                    cpu,
                    "{name}: the backlog for CPU {cpu} makes progress again: flows may go there"
                ),
            }
        }
        match vanished {
            true => datapath.find_vanished(),
            false => Ok(()),
        }
    }
}

/// Frames that have entered and are not dequeued; not exact under traffic.
fn waiting(b: &backlog) -> u64 {
    b.tail
        .saturating_sub(b.nr_lost + b.nr_vanished + b.dequeued)
}

/// A queue for the log.
fn name_of(devices: &[Steered], queue: u32) -> String {
    let device = devices.iter().find(|d| d.queues().contains(&queue));
    device.map_or_else(String::new, |d| d.queue_name(queue - d.first_queue))
}

/// A stall, with what to do; `thread`: the backlog's, which softnet backlogs of softirq mode don't have.
fn stall(cpu: u32, waiting: u64, thread: Option<&str>) -> String {
    let (it, share) = match thread {
        Some(thread) => (
            format!("thread {thread} has"),
            "raise the thread's share by --backlog-sched, or ",
        ),
        None => ("softirqs have".to_owned(), ""),
    };
    format!(
        "the backlog for CPU {cpu} is stalled: {waiting} packets wait, and its {it} not run for \
         {STALL:?}. New flows go elsewhere. See what keeps the CPU (a real-time task, a limit of a \
         cgroup, the hypervisor); {share}leave the CPU out of --rps-cpus"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Place = (0, 1);
    const B: Place = (7, 3);

    #[test]
    fn without_backlogs_no_look_is_due() {
        let mut watch = Watch::new();
        assert_eq!(watch.due_with(0), Duration::MAX);
        // The control: one exists or is being created.
        assert!(watch.due_with(1) <= LOOK);
        assert_eq!(watch.watch(vec![A]), []);
        // The look that finds it gone.
        assert!(watch.due_with(0) <= LOOK);
        assert_eq!(watch.watch(vec![]), []);
        assert_eq!(watch.due_with(0), Duration::MAX);
    }

    #[test]
    fn backlogs_are_searched_ten_times_a_second_however_often_it_is_called() {
        for exist in [vec![], vec![A]] {
            let mut watch = Watch::new();
            watch.watch(exist);
            let start = watch.looked;
            let searches = |ms: std::ops::RangeInclusive<u64>, watch: &mut Watch| {
                let begins = |ms: &u64| watch.begins(start + Duration::from_millis(*ms));
                ms.filter(begins).count()
            };
            assert_eq!(searches(1..=1000, &mut watch), 10);
            // The first call after a long time looks.
            assert_eq!(searches(9000..=9000, &mut watch), 1);
        }
    }

    #[test]
    fn a_stall_ends_with_its_backlog() {
        let mut watch = Watch::new();
        watch.watch(vec![A, B]);
        for place in [A, B] {
            let progress = watch.backlogs.get_mut(&place).expect("it is watched");
            progress.stalled_at = Some(Instant::now());
        }
        // The control: one that exists stays stalled until it has recovered.
        assert_eq!(watch.watch(vec![B]), [A]);
        assert!(watch.backlogs[&B].stalled_at.is_some());
        // The next one in its place begins anew.
        assert_eq!(watch.watch(vec![A, B]), []);
        assert!(watch.backlogs[&A].stalled_at.is_none());
    }

    /// Looks at (milliseconds, frames wait, dequeued); returns the turns with their times.
    fn turns(looks: &[(u64, bool, u64)], starved: bool) -> Vec<(u64, Turn)> {
        let start = Instant::now();
        let mut progress = Progress::default();
        let looks = looks.iter().filter_map(|&(ms, waiting, dequeued)| {
            let now = start + Duration::from_millis(ms);
            Some((ms, progress.look(now, waiting, dequeued, || starved)?))
        });
        looks.collect()
    }

    #[test]
    fn only_a_thread_gets_another_share() {
        assert!(stall(1, 7, Some("cpumap/1/map:9")).contains("by --backlog-sched"));
        let softnet = stall(1, 7, None);
        assert!(
            !softnet.contains("sched") && !softnet.contains("thread"),
            "{softnet}"
        );
    }

    #[test]
    fn frames_that_wait_without_progress_are_a_stall() {
        let looks = [(0, true, 5), (100, true, 5), (200, true, 5), (300, true, 5)];
        assert_eq!(turns(&looks, true), [(200, Turn::Stalled)]);
        // The thread sleeps: the CPU is not the cause.
        let vanished = [200, 300].map(|ms| (ms, Turn::Vanished));
        assert_eq!(turns(&looks, false), vanished);
    }

    #[test]
    fn progress_or_an_empty_ring_is_no_stall() {
        let slow = [
            (0, true, 5),
            (100, true, 5),
            (200, true, 6),
            (300, true, 6),
            (400, true, 7),
        ];
        let empty = [
            (0, true, 5),
            (100, false, 5),
            (200, true, 5),
            (300, true, 5),
        ];
        let never = [(0, false, 0), (1000, false, 0), (2000, false, 0)];
        for looks in [&slow[..], &empty, &never] {
            assert_eq!(turns(looks, true), [], "{looks:?}");
        }
    }

    /// Frames that arrived since the last look have waited for less than the time between looks.
    #[test]
    fn a_late_look_sees_no_stall() {
        assert_eq!(turns(&[(0, false, 5), (900, true, 5)], true), []);
        let later = [(0, false, 5), (900, true, 5), (1100, true, 5)];
        assert_eq!(turns(&later, true), [(1100, Turn::Stalled)]);
    }

    #[test]
    fn it_recovers_two_seconds_after_the_last_stall() {
        let stall = [(0, true, 5), (200, true, 5)];
        let with = |rest: &[_]| turns(&[&stall, rest].concat(), true).split_off(1);
        let recovered = [(300, false, 9), (2100, false, 9), (2200, true, 9)];
        assert_eq!(with(&recovered), [(2200, Turn::Recovered)]);
        let again = [
            (300, true, 9),
            (1000, true, 9),
            (2900, false, 9),
            (3000, true, 10),
        ];
        assert_eq!(with(&again), [(3000, Turn::Recovered)]);
        let stays = [(1000, true, 5), (2000, true, 5), (3000, true, 5)];
        assert_eq!(with(&stays), []);
    }
}
