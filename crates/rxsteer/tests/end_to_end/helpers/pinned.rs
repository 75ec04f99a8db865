// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering pinned in a namespace's own BPF file system, which ends with the namespace.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use nix::mount::{MsFlags, mount};
use rxlab::lab::netns::Netns;
use rxlab::testing::testbed::{Testbed, until};
use rxsteer::host::bpffs::Folder;
use rxsteer::types::backlog;

/// Where BPF file systems are.
const BPFFS: &str = "/sys/fs/bpf";

/// Mounts a BPF file system that this namespace alone sees, as the manual does.
pub fn mount_bpffs(netns: &Netns) -> Result<()> {
    mount_bpffs_with(netns, "mode=0700")
}

/// As [`mount_bpffs`], with other options.
pub fn mount_bpffs_with(netns: &Netns, options: &str) -> Result<()> {
    netns.run(|| {
        let none = MsFlags::empty();
        mount(Some("bpf"), BPFFS, Some("bpf"), none, Some(options)).context("no bpffs")
    })
}

/// The default folder of a namespace.
pub fn folder(netns: &Netns) -> Result<PathBuf> {
    Ok(Path::new(BPFFS).join(format!("rxsteer/net-{}", netns.inode()?)))
}

/// All files below a folder of the namespace's BPF file system; empty if there is none.
pub fn files(netns: &Netns, folder: &Path) -> Result<Vec<PathBuf>> {
    fn below(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            match path.is_dir() {
                true => below(&path, files)?,
                false => files.push(path),
            }
        }
        Ok(())
    }
    netns.run(|| {
        let mut files = Vec::new();
        if folder.exists() {
            below(folder, &mut files)?;
        }
        Ok(files)
    })
}

/// A pinned map with this name.
pub fn map(netns: &Netns, name: &str) -> Result<MapHandle> {
    let files = files(netns, &folder(netns)?)?;
    let mut files = files.into_iter();
    let path = files.find(|path| path.file_name().is_some_and(|file| file == name));
    let path = path.with_context(|| format!("{name} is not pinned"))?;
    netns.run(|| Ok(MapHandle::from_pinned_path(path)?))
}

/// The pinned backlogs, in the order of their indices.
pub fn backlogs(bed: &Testbed) -> Result<Vec<backlog>> {
    let backlogs = map(&bed.link.dut.netns, "backlogs")?;
    let read = |index: u32| {
        let bytes = backlogs.lookup(&index.to_ne_bytes(), MapFlags::ANY)?;
        let bytes = bytes.context("an array has all elements")?;
        assert!(bytes.len() >= size_of::<backlog>());
        // SAFETY: the bytes are long enough, and any are a value.
        Ok(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<backlog>()) })
    };
    (0..backlogs.max_entries()).map(read).collect()
}

/// Frames that have been redirected and dequeued, by the pinned counters.
pub fn redirected(bed: &Testbed) -> Result<(u64, u64)> {
    let sum = |(tail, dequeued), b: &backlog| (tail + b.tail, dequeued + b.dequeued);
    Ok(backlogs(bed)?.iter().fold((0, 0), sum))
}

/// Waits until more frames are redirected and dequeued, by the pinned counters.
pub fn goes_on(bed: &Testbed) -> Result<()> {
    let before = redirected(bed)?;
    until("frames are redirected and counted", || {
        let now = redirected(bed)?;
        Ok((now.0 > before.0 + 1_000 && now.1 > before.1 + 1_000).then_some(()))
    })
    .with_context(|| format!("{before:?}, {:?}", redirected(bed)))
}

/// Names of the generations in the default folder of a namespace.
pub fn generations(netns: &Netns) -> Result<Vec<String>> {
    let folder = folder(netns)?;
    netns.run(|| Folder::find(&folder)?.context("nothing is pinned")?.names())
}

/// Pins the objects of the only generation, but its XDP links, in a second one.
pub fn pin_again(netns: &Netns, with_record: bool) -> Result<()> {
    let folder = folder(netns)?;
    let first = folder.join(&generations(netns)?[0]);
    let second = folder.join("0000000000000001");
    for file in files(netns, &first)? {
        let name = file.strip_prefix(&first)?;
        if name.starts_with("xdp") || (name.starts_with("record") && !with_record) {
            continue;
        }
        let to = second.join(name);
        let [from, to] = [&file, &to].map(|path| path.parent().context("a folder"));
        let (from, to) = (from?, to?);
        let name = name.file_name().and_then(|name| name.to_str());
        let name = name.context("a name")?;
        netns.run(|| {
            let from = Folder::find(from)?.context("it is there")?;
            Folder::make(to)?.pin(name, from.open(name)?.as_fd())
        })?;
    }
    Ok(())
}
