// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mounts in a namespace's mount namespace, as containers and units have them.

use std::path::Path;

use anyhow::Result;
use nix::mount::{MsFlags, mount};
use rxlab::lab::netns::Netns;

fn mounted(what: &str, on: &str, flags: MsFlags) -> Result<()> {
    let kind = (what == "tmpfs").then_some("tmpfs");
    Ok(mount(Some(what), on, kind, flags, None::<&str>)?)
}

/// Hides what is in the folder.
pub fn hide(netns: &Netns, folder: &str) -> Result<()> {
    netns.run(|| mounted("tmpfs", folder, MsFlags::empty()))
}

/// Makes the mount read-only, not its file system.
pub fn read_only(netns: &Netns, folder: &str) -> Result<()> {
    let again = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    netns.run(|| {
        mounted(folder, folder, MsFlags::MS_BIND | MsFlags::MS_REC)?;
        mounted(folder, folder, again)
    })
}

/// Shows what is at one path at another one too.
pub fn bind(netns: &Netns, what: &Path, on: &Path) -> Result<()> {
    netns.run(|| {
        Ok(mount(
            Some(what),
            on,
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )?)
    })
}
