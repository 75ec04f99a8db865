// SPDX-License-Identifier: MIT OR Apache-2.0
//! Network namespaces: that of the calling thread, and others.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns};

use super::polling::option;

/// The namespace of the calling thread.
pub(super) const OWN: &str = "/proc/thread-self/ns/net";

/// asm-generic/socket.h, since Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// The number of its inode, which distinguishes it from all others of the host.
///
/// # Errors
/// When /proc does not show it.
pub fn inode() -> Result<u64> {
    let netns = fs::metadata(OWN).context("/proc shows no network namespace: is it mounted?")?;
    Ok(netns.ino())
}

/// Its cookie: no other one has it until the next boot, unlike the number of the inode.
///
/// # Errors
/// When no socket can be opened.
pub fn cookie() -> io::Result<u64> {
    option(&UnixDatagram::unbound()?, SO_NETNS_COOKIE)
}

/// Runs `f` in the namespace with this path, on a thread; `None` if it has ended meanwhile, or is out of
/// reach.
pub(crate) fn within<T: Send>(path: &Path, f: impl FnOnce() -> T + Send) -> Option<T> {
    let netns = File::open(path).ok()?;
    let inside = || setns(&netns, CloneFlags::CLONE_NEWNET).is_ok().then(f);
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, inside);
        thread.ok()?.join().ok()?
    })
}
