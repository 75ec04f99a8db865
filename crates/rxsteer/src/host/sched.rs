// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scheduling classes of threads.

use anyhow::{Context, Result};
use nix::errno::Errno;

/// The highest real-time priority of a thread (`MAX_RT_PRIO` - 1).
pub const MAX_PRIORITY: i32 = 99;

/// Makes a thread a real-time thread (SCHED_FIFO) of this priority, 1 to [`MAX_PRIORITY`].
///
/// # Errors
/// When the thread does not exist, or privileges are missing.
pub fn set_fifo(tid: u32, priority: i32) -> Result<()> {
    set_scheduler(tid, libc::SCHED_FIFO, priority).context("no real-time thread")
}

fn set_scheduler(tid: u32, policy: i32, priority: i32) -> nix::Result<()> {
    let param = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: the kernel reads `param`.
    Errno::result(unsafe { libc::sched_setscheduler(tid as libc::pid_t, policy, &param) }).map(drop)
}
