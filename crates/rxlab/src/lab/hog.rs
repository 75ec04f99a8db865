// SPDX-License-Identifier: MIT OR Apache-2.0
//! Load on a CPU by other work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::unistd::Pid;

use super::netns::bind;

/// Time between checks whether to stop, and between rests.
const WORK: Duration = Duration::from_millis(5);

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
        Self::start(cpu, -20, Duration::ZERO)
    }

    /// Keeps a CPU busy for about four fifths of the time, with nice 0.
    ///
    /// # Errors
    /// The CPU is offline.
    pub fn partly(cpu: u32) -> Result<Self> {
        Self::start(cpu, 0, Duration::from_millis(1))
    }

    /// Sleeps for `rest` after each [`WORK`].
    fn start(cpu: u32, nice: i32, rest: Duration) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let bound = bind(Pid::from_raw(0), cpu);
            // SAFETY: no memory is involved. On Linux the nice value is per thread.
            let set = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
            // The receiver waits below, so the message arrives.
            let _ = ready.send(bound.is_ok() && set == 0);
            while !seen.load(Ordering::Relaxed) {
                let since = Instant::now();
                while since.elapsed() < WORK {
                    std::hint::spin_loop();
                }
                if rest > Duration::ZERO {
                    std::thread::sleep(rest);
                }
            }
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

impl Drop for Hog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
