// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process that may open no more files.

use anyhow::Result;
use nix::errno::Errno;

/// Fewer descriptors than rxsteer has open. It polls four at once: with a lower limit than that
/// poll() fails, and rxsteer ends.
pub const POLLED: libc::rlim_t = 8;

/// Sets the limit on descriptors; returns the one before.
pub fn limit_descriptors(pid: u32, limit: libc::rlim_t) -> Result<libc::rlim_t> {
    let mut before = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let pid = pid as libc::pid_t;
    // SAFETY: both structures outlive the calls.
    unsafe {
        let ret = libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &mut before);
        Errno::result(ret)?;
        let now = libc::rlimit {
            rlim_cur: limit,
            ..before
        };
        let ret = libc::prlimit(pid, libc::RLIMIT_NOFILE, &now, std::ptr::null_mut());
        Errno::result(ret)?;
    }
    Ok(before.rlim_cur)
}
