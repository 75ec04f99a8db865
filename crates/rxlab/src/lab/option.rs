// SPDX-License-Identifier: MIT OR Apache-2.0
//! An option of a socket.

use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use nix::errno::Errno;

/// Sets a socket's option.
///
/// # Errors
/// When the kernel refuses the value.
pub fn set<T: ?Sized>(fd: &impl AsRawFd, level: i32, name: i32, value: &T) -> Result<()> {
    let len = size_of_val(value) as libc::socklen_t;
    let value = std::ptr::from_ref(value).cast();
    // SAFETY: the kernel reads `value` during the call.
    let ret = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value, len) };
    Errno::result(ret).with_context(|| format!("socket option {level}/{name}"))?;
    Ok(())
}
