// SPDX-License-Identifier: MIT OR Apache-2.0
//! A filter of packet sockets that passes all, and for which the kernel clears `skb->cb`.

use std::mem::size_of_val;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use anyhow::{Context, Result};
use nix::errno::Errno;

use super::programs;

/// Attaches it to the socket.
///
/// # Errors
/// When the kernel refuses the program.
pub fn attach(socket: &impl AsRawFd) -> Result<()> {
    let skel = programs::load(|open| {
        open.progs.filter.set_autoload(true);
        Ok(())
    })?;
    let program = skel.progs.filter.as_fd().as_raw_fd();
    // SAFETY: the kernel reads a descriptor.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_BPF,
            ptr::from_ref(&program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    Errno::result(result)
        .map(drop)
        .context("attaching a filter to a socket")
}
