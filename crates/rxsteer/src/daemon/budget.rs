// SPDX-License-Identifier: MIT OR Apache-2.0
//! Budget of backlog threads in the real-time class (`--backlog-sched fifo`): a thread that has used
//! half of an interval is an ordinary thread for the rest of it, so that the applications on its CPU
//! have the other half.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::datapath::backlogs::Backlogs;
use crate::host::sched::{self, Class};
use crate::host::wait::readable;

const INTERVAL: Duration = Duration::from_millis(100);

/// A thread's share of an interval in the real-time class.
const BUDGET: Duration = INTERVAL.checked_div(2).unwrap();

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(10);

/// Priority of the thread that looks: above those that it limits.
const PRIORITY: i32 = 2;

/// What a thread has used of the present interval.
#[derive(Debug)]
struct Account {
    since: Instant,
    used_before: Duration,
    exhausted: bool,
}

impl Account {
    fn new(now: Instant, used: Duration) -> Self {
        Self {
            since: now,
            used_before: used,
            exhausted: false,
        }
    }

    /// The class that the thread must get now, if it must change; `used` is the CPU time that it
    /// has ever used.
    fn look(&mut self, now: Instant, used: Duration) -> Option<Class> {
        if now.duration_since(self.since) >= INTERVAL {
            let exhausted = self.exhausted;
            *self = Self::new(now, used);
            return exhausted.then_some(Class::Fifo);
        }
        let exhausted = used.saturating_sub(self.used_before) >= BUDGET;
        (exhausted && !std::mem::replace(&mut self.exhausted, true)).then(Class::default)
    }
}

/// Keeps the budgets of all backlogs' threads until `stop` becomes readable or is closed.
///
/// # Errors
/// When this thread can't be a real-time thread itself, or can't wait.
pub(super) fn keep(backlogs: &Backlogs, stop: BorrowedFd<'_>) -> Result<()> {
    sched::set_fifo(0, PRIORITY)?;
    // By process id.
    let mut accounts: BTreeMap<u32, Account> = BTreeMap::new();
    let mut known = Vec::new();
    let mut searched = Instant::now();
    while !readable(&[stop], Some(LOOK))?[0] {
        let now = Instant::now();
        // Threads are searched in /proc when the backlogs, or the threads, are others than before.
        let places = backlogs.exist();
        let others = places != known || accounts.len() != places.len();
        if others && now.duration_since(searched) >= INTERVAL {
            searched = now;
            let pids = places.iter().flat_map(|&(q, cpu)| backlogs.pids(q, cpu));
            for pid in pids {
                if let Ok(used) = sched::run_time(pid) {
                    accounts
                        .entry(pid)
                        .or_insert_with(|| Account::new(now, used));
                }
            }
            known = places;
        }
        accounts.retain(|&pid, account| {
            let Ok(used) = sched::run_time(pid) else {
                return false;
            };
            account
                .look(now, used)
                .is_none_or(|class| class.set(pid).is_ok())
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_an_interval_is_the_budget() {
        let start = Instant::now();
        let ms = Duration::from_millis;
        let mut account = Account::new(start, ms(7));
        let mut look = |at, used: u64| account.look(start + ms(at), ms(7 + used));
        assert_eq!(look(10, 10), None);
        assert_eq!(look(49, 49), None);
        assert_eq!(look(50, 50), Some(Class::default()));
        assert_eq!(look(90, 50), None);
        assert_eq!(look(100, 50), Some(Class::Fifo));
        // What it used before counts no more.
        assert_eq!(look(140, 90), None);
        assert_eq!(look(150, 100), Some(Class::default()));
        assert_eq!(look(200, 101), Some(Class::Fifo));
        // Within its budget it stays, and also from one interval to the next.
        assert_eq!(look(290, 150), None);
        assert_eq!(look(300, 151), None);
    }
}
