// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel tunables: files in /sys and /proc/sys, which containers and units often mount read-only.

use std::fs;

use anyhow::{Context, Result, bail};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::caps::Missing;

/// Of devices.
pub const SYS: &str = "/sys";
/// Of the stack.
pub const PROC_SYS: &str = "/proc/sys";

/// Writes a value to such a file.
///
/// # Errors
/// When the kernel refuses the value; with a remedy when the file system is read-only.
pub fn write(path: &str, value: &str) -> Result<()> {
    let Err(e) = fs::write(path, value) else {
        return Ok(());
    };
    let said = format!("cannot write {value} to {path}");
    let mount = [SYS, PROC_SYS]
        .into_iter()
        .find(|mount| path.starts_with(mount));
    match mount.and_then(read_only) {
        Some(missing) => bail!("{said}: {missing}"),
        None => Err(e).context(said),
    }
}

/// The file system that is mounted here, if it is read-only in this mount namespace.
pub fn read_only(mount: &str) -> Option<Missing> {
    let flags = statvfs(mount).ok()?.flags();
    flags.contains(FsFlags::ST_RDONLY).then(|| Missing {
        what: format!("a writable {mount}"),
        how_to_get: format!(
            "it is mounted read-only: `mount -o remount,rw {mount}`; for a container start it with \
             `docker run --privileged`, for a unit set ProtectKernelTunables=no"
        ),
    })
}
