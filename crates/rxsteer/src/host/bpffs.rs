// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects pinned in a BPF file system: the kernel keeps them as long as their files, without a
//! process.

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

/// Fails unless the folder, which may not exist yet, is in a BPF file system.
///
/// # Errors
/// With the command that mounts one.
pub fn ensure_is_in(folder: &Path) -> Result<()> {
    let exists = folder.ancestors().find(|path| path.exists());
    let exists = exists.with_context(|| format!("{} is no path", folder.display()))?;
    let kind = statfs(exists).with_context(|| exists.display().to_string())?;
    ensure!(
        kind.filesystem_type() == BPF_FS_MAGIC,
        "{} is not in a BPF file system, where alone steering can be pinned: mount one by `mount -t \
         bpf bpf /sys/fs/bpf`",
        folder.display()
    );
    Ok(())
}

/// Pins an object (a map, a program or a link).
///
/// # Errors
/// When there is such a file, or the kernel refuses.
pub fn pin(object: BorrowedFd<'_>, path: &Path) -> Result<()> {
    let name = name_of(path)?;
    // SAFETY: a descriptor and a C string.
    let ret = unsafe { libbpf_sys::bpf_obj_pin(object.as_raw_fd(), name.as_ptr()) };
    ensure!(ret == 0, "pinning {}: {}", path.display(), error(ret));
    Ok(())
}

/// Opens a pinned object.
///
/// # Errors
/// When there is no such file.
pub fn open(path: &Path) -> Result<OwnedFd> {
    let name = name_of(path)?;
    // SAFETY: a C string.
    let fd = unsafe { libbpf_sys::bpf_obj_get(name.as_ptr()) };
    ensure!(fd >= 0, "opening {}: {}", path.display(), error(fd));
    // SAFETY: the kernel has just opened this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The names in a folder, sorted; none if there is no such folder.
///
/// # Errors
/// When it can't be read.
pub fn names(folder: &Path) -> Result<Vec<String>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let name = |entry: std::io::Result<fs::DirEntry>| {
        Ok(entry?.file_name().to_string_lossy().into_owned())
    };
    let mut names: Vec<String> = entries.map(name).collect::<Result<_>>()?;
    names.sort();
    Ok(names)
}

fn name_of(path: &Path) -> Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn error(ret: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(-ret)
}
