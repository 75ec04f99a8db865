// SPDX-License-Identifier: MIT OR Apache-2.0
//! The network namespace of the calling thread.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;

use anyhow::{Context, Result};

use super::polling;

/// The number of its inode, which distinguishes it from all others of the host.
///
/// # Errors
/// When /proc does not show it.
pub fn inode() -> Result<u64> {
    let netns = fs::metadata("/proc/thread-self/ns/net")
        .context("/proc shows no network namespace: is it mounted?")?;
    Ok(netns.ino())
}

// asm-generic/socket.h
const SO_NETNS_COOKIE: libc::c_int = 71;

/// A number that no other network namespace has until the next boot; that of the inode is used again.
///
/// # Errors
/// When the kernel does not tell.
pub fn cookie() -> Result<u64> {
    let socket = UnixDatagram::unbound()?;
    Ok(polling::option(&socket, SO_NETNS_COOKIE)?)
}
