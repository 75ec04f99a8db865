// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel tunables: files in /sys and /proc/sys, which containers and units often mount read-only.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::caps::Missing;
use super::detached;

/// A file system with tunables, for settings that end with this process: written through a mount of its
/// own, which is writable where the host's is not, unless the file system itself is read-only: containers make
/// it so in network namespaces of their own. Where there may be none, through the host's.
#[derive(Debug)]
pub struct Tunables {
    folder: &'static str,
    own: nix::Result<OwnedFd>,
}

impl Tunables {
    /// Of devices.
    pub fn sys() -> Self {
        Self::new("/sys", c"sysfs")
    }

    /// Of the stack.
    pub fn proc() -> Self {
        Self::new("/proc", c"proc")
    }

    fn new(folder: &'static str, kind: &CStr) -> Self {
        Self {
            folder,
            own: detached::mount(kind),
        }
    }

    /// Writes a value to the file at `path` below the folder.
    ///
    /// # Errors
    /// As [`write()`].
    pub fn write(&self, path: &str, value: &str) -> Result<()> {
        let full = format!("{}/{path}", self.folder);
        match &self.own {
            Ok(root) => explained(detached::write(root, path, value), &full, value),
            Err(e) => write(&full, value).with_context(|| {
                format!(
                    "no {} of its own can be had ({e}): {}",
                    self.folder,
                    detached::NEEDS
                )
            }),
        }
    }
}

/// Writes a value to such a file.
///
/// # Errors
/// When the kernel refuses the value; with a remedy when the file system is read-only.
pub fn write(path: &str, value: &str) -> Result<()> {
    explained(fs::write(path, value), path, value)
}

fn explained(written: io::Result<()>, path: &str, value: &str) -> Result<()> {
    let Err(e) = written else {
        return Ok(());
    };
    let said = format!("cannot write {value} to {path}");
    let mount = ["/sys", "/proc/sys"]
        .into_iter()
        .find(|mount| path.starts_with(mount));
    match mount.and_then(read_only) {
        Some(missing) => bail!("{said}: {missing}"),
        None => Err(e).context(said),
    }
}

/// The file system that is mounted here, if it is read-only in this mount namespace.
fn read_only(mount: &str) -> Option<Missing> {
    let flags = statvfs(mount).ok()?.flags();
    flags.contains(FsFlags::ST_RDONLY).then(|| Missing {
        what: format!("a writable {mount}"),
        how_to_get: format!(
            "it is mounted read-only: `mount -o remount,rw {mount}`; for a container start it with \
             `docker run --privileged`, for a unit set ProtectKernelTunables=no"
        ),
    })
}
