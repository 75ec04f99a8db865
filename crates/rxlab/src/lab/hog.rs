// SPDX-License-Identifier: MIT OR Apache-2.0
//! Somebody else's work, which comes first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::unistd::Pid;

use super::netns::bind;

/// For so long it works before it looks whether to stop, or rests.
const WORK: Duration = Duration::from_millis(5);

/// A thread that leaves a CPU to others as little as it can, or as it is asked to.
pub struct Hog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hog {
    /// Keeps it busy from now until dropped.
    ///
    /// # Errors
    /// The CPU is offline, or the process may not raise its priority.
    pub fn new(cpu: u32) -> Result<Self> {
        Self::start(cpu, -20, Duration::ZERO)
    }

    /// Keeps it busy for about four fifths of the time, as an ordinary thread.
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
            // SAFETY: no memory is involved. The nice value is the thread's own on Linux.
            let set = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
            // The receiver waits below, so this reaches it.
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
        // Stops it if it could not be made one.
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
