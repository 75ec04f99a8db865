// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scheduling classes of threads.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::time::{ClockId, clock_gettime};
use thiserror::Error;

/// The highest real-time priority of a thread (`MAX_RT_PRIO` - 1).
pub const MAX_PRIORITY: i32 = 99;

/// Default nice value of the backlogs' threads. A thread that shares its CPU with the application
/// must not take half of the CPU for packets that the application then has no time to read
/// (docs/backlog.md has the measurement); nor must it get too little time beside a CPU-bound
/// application.
const NICE: i32 = 5;

/// Priority of [`Class::Fifo`]: any other real-time thread comes first.
const FIFO: i32 = 1;

/// A scheduling class as `--backlog-sched` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Ordinary (SCHED_OTHER), with a nice value of -20 to 19.
    Nice(i32),
    /// Ordinary without preemption of other threads on wake-up (SCHED_BATCH), at the default nice
    /// value.
    Batch,
    /// Real-time (SCHED_FIFO), before all ordinary threads.
    Fifo,
}

/// Why a text is no class.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("`{0}` is no scheduling class: write nice=N with N from -20 to 19, batch, or fifo")]
pub struct NoClass(String);

impl Default for Class {
    fn default() -> Self {
        Self::Nice(NICE)
    }
}

impl FromStr for Class {
    type Err = NoClass;

    fn from_str(text: &str) -> Result<Self, NoClass> {
        let nice = text
            .strip_prefix("nice=")
            .and_then(|nice| nice.parse().ok());
        match (text, nice) {
            ("batch", _) => Ok(Self::Batch),
            ("fifo", _) => Ok(Self::Fifo),
            (_, Some(nice)) if (-20..=19).contains(&nice) => Ok(Self::Nice(nice)),
            _ => Err(NoClass(text.to_owned())),
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nice(nice) => write!(f, "nice={nice}"),
            Self::Batch => f.write_str("batch"),
            Self::Fifo => f.write_str("fifo"),
        }
    }
}

impl Class {
    /// Puts a thread into the class.
    ///
    /// # Errors
    /// When the thread has ended (`ESRCH`), or privileges are missing.
    pub fn set(self, tid: u32) -> nix::Result<()> {
        let (policy, priority, nice) = match self {
            Self::Nice(nice) => (libc::SCHED_OTHER, 0, nice),
            Self::Batch => (libc::SCHED_BATCH, 0, NICE),
            Self::Fifo => (libc::SCHED_FIFO, FIFO, NICE),
        };
        // SAFETY: no memory is involved. On Linux the nice value is per thread.
        Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, tid, nice) })?;
        set_scheduler(tid, policy, priority)
    }
}

/// Makes a thread, 0 for the calling one, a real-time thread (SCHED_FIFO) of this priority, 1 to
/// [`MAX_PRIORITY`].
///
/// # Errors
/// When the thread does not exist, or privileges are missing.
pub fn set_fifo(tid: u32, priority: i32) -> Result<()> {
    set_scheduler(tid, libc::SCHED_FIFO, priority).context("no real-time thread")
}

/// CPU time that a process with a single thread has used, up to the present.
///
/// # Errors
/// When the process has ended.
pub fn run_time(pid: u32) -> nix::Result<Duration> {
    let clock = ClockId::pid_cpu_clock_id(nix::unistd::Pid::from_raw(pid as i32))?;
    Ok(clock_gettime(clock)?.into())
}

fn set_scheduler(tid: u32, policy: i32, priority: i32) -> nix::Result<()> {
    let param = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: the kernel reads `param`.
    Errno::result(unsafe { libc::sched_setscheduler(tid as libc::pid_t, policy, &param) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_read_back() {
        for text in ["nice=-20", "nice=0", "nice=19", "batch", "fifo"] {
            let class: Class = text.parse().unwrap();
            assert_eq!(class.to_string(), text);
        }
        assert_eq!(Class::default().to_string(), "nice=5");
        for text in ["", "nice", "nice=", "nice=20", "nice=-21", "rr", "Fifo"] {
            assert_eq!(text.parse::<Class>(), Err(NoClass(text.to_owned())));
        }
    }

    #[test]
    fn a_thread_that_runs_uses_time() {
        let time = || run_time(std::process::id()).unwrap();
        let start = time();
        while time() == start {
            std::hint::spin_loop();
        }
    }
}
