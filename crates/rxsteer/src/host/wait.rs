// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waiting for file descriptors.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

/// Which of the descriptors are readable or closed. Waits for one until the timeout or a signal,
/// and then returns none.
///
/// # Errors
/// When the kernel can't wait for one of them.
pub fn readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Result<Vec<bool>> {
    let fds = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN));
    let mut fds: Vec<_> = fds.collect();
    match ppoll(&mut fds, timeout.map(TimeSpec::from_duration), None) {
        Ok(_) | Err(Errno::EINTR) => Ok(fds.iter().map(|fd| fd.any() == Some(true)).collect()),
        Err(e) => Err(e).context("waiting"),
    }
}
