// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks that all CPUs of an emulated machine are equally fast during a measurement.
//!
//! A real-time thread per CPU runs a loop of fixed length periodically. Interruptions only lengthen
//! a run, so the fastest run tells the speed of the CPU.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::unistd::Pid;
use rxsteer::host::topology::Topology;

use crate::bench::experiment::fit;
use crate::lab::netns::bind;
use crate::lab::schedule;

/// Steps of the loop, each dependent on the one before: some 20 us.
const STEPS: u32 = 10_000;

/// Period of the loop on each CPU: it takes half a per mille of its time.
const PERIOD: Duration = Duration::from_millis(40);

/// Largest ratio of the slowest CPU's run to the fastest one's.
const UNEQUAL: f64 = 1.1;

/// Limit on waiting for the first run of all CPUs.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Measuring threads, until dropped.
pub struct Pace {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Result<()>>>,
}

struct Shared {
    /// Number of runs requested beyond the periodic ones; None: the threads end.
    asked: Mutex<Option<u64>>,
    changed: Condvar,
    /// By CPU: fastest run since [`Shared::forget`], ns; [`NONE`] before the first.
    fastest: Vec<(u32, AtomicU64)>,
}

const NONE: u64 = u64::MAX;

impl Pace {
    /// Starts a thread on each online CPU.
    ///
    /// # Errors
    /// Without CAP_SYS_NICE.
    pub fn start() -> Result<Self> {
        let cpus = Topology::host().online()?;
        let shared = Arc::new(Shared {
            asked: Mutex::new(Some(0)),
            changed: Condvar::new(),
            fastest: cpus.iter().map(|cpu| (cpu, AtomicU64::new(NONE))).collect(),
        });
        let mut pace = Self {
            shared: shared.clone(),
            threads: Vec::new(),
        };
        for index in 0..shared.fastest.len() {
            let shared = shared.clone();
            let thread = thread::Builder::new().name(format!("pace/{index}"));
            pace.threads
                .push(thread.spawn(move || shared.run_loops(index))?);
        }
        Ok(pace)
    }

    /// Checks that all CPUs are equally fast, and watches them from now on.
    ///
    /// # Errors
    /// [`Unfit`](crate::bench::experiment::Unfit) if they are not; when a thread did not run.
    pub fn begin(&self) -> Result<()> {
        self.shared.forget();
        self.shared.ask(|asked| asked.map(|nr| nr + 1));
        let start = Instant::now();
        while self.shared.paces().len() < self.shared.fastest.len() {
            ensure!(
                start.elapsed() < TIMEOUT,
                "a thread that looks how fast its CPU is did not run for {TIMEOUT:?}"
            );
            thread::sleep(Duration::from_millis(1));
        }
        self.end()?;
        self.shared.forget();
        Ok(())
    }

    /// Checks that all CPUs were equally fast since [`Self::begin`].
    ///
    /// # Errors
    /// [`Unfit`](crate::bench::experiment::Unfit) if they were not.
    pub fn end(&self) -> Result<()> {
        equal(&self.shared.paces())
    }
}

impl Drop for Pace {
    fn drop(&mut self) {
        self.shared.ask(|_| None);
        for thread in self.threads.drain(..) {
            if let Ok(Err(error)) = thread.join() {
                tracing::warn!("{error:#}");
            }
        }
    }
}

impl Shared {
    fn ask(&self, change: impl Fn(Option<u64>) -> Option<u64>) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        *asked = change(*asked);
        self.changed.notify_all();
    }

    fn forget(&self) {
        for (_, fastest) in &self.fastest {
            fastest.store(NONE, Ordering::Relaxed);
        }
    }

    /// Fastest runs of the CPUs that had one, ns.
    fn paces(&self) -> Vec<(u32, u64)> {
        let paces = self.fastest.iter();
        let paces = paces.map(|(cpu, ns)| (*cpu, ns.load(Ordering::Relaxed)));
        paces.filter(|(_, ns)| *ns != NONE).collect()
    }

    /// Runs the loop periodically and on request.
    fn run_loops(&self, index: usize) -> Result<()> {
        let (cpu, fastest) = &self.fastest[index];
        let this = Pid::from_raw(0);
        bind(this, *cpu)?;
        schedule(this, libc::SCHED_FIFO, 98)?;
        let mut seen = Some(0);
        loop {
            let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
            let waited = self
                .changed
                .wait_timeout_while(asked, PERIOD, |asked| *asked == seen);
            seen = *waited.unwrap_or_else(PoisonError::into_inner).0;
            if seen.is_none() {
                return Ok(());
            }
            let start = Instant::now();
            std::hint::black_box(steps());
            let ns = start.elapsed().as_nanos() as u64;
            fastest.fetch_min(ns, Ordering::Relaxed);
        }
    }
}

fn steps() -> u64 {
    (0..STEPS).fold(1, |x: u64, _| {
        std::hint::black_box(x)
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .rotate_left(7)
    })
}

/// Checks that the fastest runs, ns by CPU, are about equal.
fn equal(paces: &[(u32, u64)]) -> Result<()> {
    let fastest = paces.iter().min_by_key(|(_, ns)| *ns);
    let slowest = paces.iter().max_by_key(|(_, ns)| *ns);
    if let (Some((fast, least)), Some((slow, most))) = (fastest, slowest) {
        let ratio = *most as f64 / *least as f64;
        fit!(
            ratio < UNEQUAL,
            "CPU {slow} took {ratio:.2} times as long for the same work as CPU {fast}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::experiment::Unfit;

    #[test]
    fn a_cpu_that_is_a_tenth_slower_is_refused() {
        equal(&[(0, 1000), (1, 1090), (2, 1010)]).unwrap();
        equal(&[]).unwrap();
        let refused = equal(&[(0, 1000), (3, 1110), (1, 1010)]).unwrap_err();
        assert!(refused.is::<Unfit>());
        assert_eq!(
            refused.to_string(),
            "CPU 3 took 1.11 times as long for the same work as CPU 0"
        );
    }
}
