// SPDX-License-Identifier: MIT OR Apache-2.0
//! The network namespace of the calling thread.

use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result};

/// The number of its inode, which distinguishes it from all others of the host.
///
/// # Errors
/// When /proc does not show it.
pub fn inode() -> Result<u64> {
    let netns = fs::metadata("/proc/thread-self/ns/net")
        .context("/proc shows no network namespace: is it mounted?")?;
    Ok(netns.ino())
}
