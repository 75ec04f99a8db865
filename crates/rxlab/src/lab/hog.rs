// SPDX-License-Identifier: MIT OR Apache-2.0
//! Load on a CPU by other work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::unistd::Pid;

use super::netns::bind;
use super::schedule;
use super::slow::Slow;

/// Time between checks whether to stop, and between rests.
const WORK: Duration = Duration::from_millis(5);

/// Priority of a real-time hog: that of most kernel threads that are real-time threads.
const PRIORITY: i32 = 50;

/// The longest time for which a hog keeps a CPU from all ordinary threads.
const STARVED_MAX: Duration = Duration::from_secs(3);

/// A busy thread on one CPU.
pub struct Hog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hog {
    /// Keeps a CPU busy from now until dropped, with nice -20.
    ///
    /// # Errors
    /// The CPU is offline, or the process may not raise its priority.
    pub fn new(cpu: u32) -> Result<Self> {
        Self::nice(cpu, -20)
    }

    /// Keeps a CPU busy from now until dropped, with this nice value.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn nice(cpu: u32, nice: i32) -> Result<Self> {
        Self::start(cpu, Kind::Nice(nice), Duration::ZERO, None)
    }

    /// Keeps a CPU busy for about four fifths of the time, with nice 0.
    ///
    /// # Errors
    /// The CPU is offline.
    pub fn partly(cpu: u32) -> Result<Self> {
        Self::start(cpu, Kind::Nice(0), Duration::from_millis(1), None)
    }

    /// Keeps a CPU busy in a real-time class until dropped, and for `time` at most, whatever
    /// becomes of its owner: ordinary threads run there only when the kernel limits real-time
    /// threads (50 ms in each second by default).
    ///
    /// # Errors
    /// The CPU is offline, or the process may have no real-time threads.
    pub fn real_time(cpu: u32, time: Duration) -> Result<Self> {
        let end = Instant::now() + time.min(STARVED_MAX);
        Self::start(cpu, Kind::RealTime, Duration::ZERO, Some(end))
    }

    /// Keeps a CPU from softirqs, for [`WORK`] at a time, until dropped. Since Linux 6.6: before, a
    /// program that user space runs does not turn them off.
    ///
    /// # Errors
    /// The CPU is offline, or the kernel refuses the program.
    pub fn softirqs(cpu: u32) -> Result<Self> {
        let slow = Slow::load(WORK)?;
        Self::run(
            cpu,
            Kind::Nice(-20),
            move |over| {
                while !over() && slow.run().is_ok() {}
            },
        )
    }

    /// Whether the CPU is still kept busy.
    pub fn runs(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }

    /// Sleeps for `rest` after each [`WORK`].
    fn start(cpu: u32, kind: Kind, rest: Duration, end: Option<Instant>) -> Result<Self> {
        Self::run(cpu, kind, move |over| {
            while !over() && end.is_none_or(|end| Instant::now() < end) {
                let since = Instant::now();
                while since.elapsed() < WORK {
                    std::hint::spin_loop();
                }
                if rest > Duration::ZERO {
                    std::thread::sleep(rest);
                }
            }
        })
    }

    /// Runs `work` on the CPU, which returns soon after it is told that all is over.
    fn run(
        cpu: u32,
        kind: Kind,
        work: impl FnOnce(&dyn Fn() -> bool) + Send + 'static,
    ) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let bound = bind(Pid::from_raw(0), cpu);
            // The receiver waits below, so the message arrives.
            let _ = ready.send(bound.is_ok() && kind.set());
            work(&|| seen.load(Ordering::Relaxed));
        });
        // Dropping it stops the thread if the check below fails.
        let hog = Self {
            stop,
            thread: Some(thread),
        };
        ensure!(is_ready.recv()?, "CPU {cpu} cannot be kept busy");
        Ok(hog)
    }
}

/// How a hog competes with other threads.
#[derive(Clone, Copy)]
enum Kind {
    Nice(i32),
    RealTime,
}

impl Kind {
    /// Applies to the present thread; returns whether it could be done.
    fn set(self) -> bool {
        match self {
            // SAFETY: no memory is involved. On Linux the nice value is per thread.
            Self::Nice(nice) => unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) == 0 },
            Self::RealTime => schedule(Pid::from_raw(0), libc::SCHED_FIFO, PRIORITY).is_ok(),
        }
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
