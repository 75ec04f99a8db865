// SPDX-License-Identifier: MIT OR Apache-2.0
//! File systems that are mounted at no folder: each is a descriptor's, and ends with it. What hides or
//! protects the host's own mounts from this process does not reach them.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

// linux/mount.h
const FSOPEN_CLOEXEC: u32 = 1;
const FSCONFIG_CMD_CREATE: u32 = 6;
const FSMOUNT_CLOEXEC: u32 = 1;

/// What [`mount()`] takes.
pub const NEEDS: &str = "this takes CAP_SYS_ADMIN and the system calls fsopen, fsconfig and fsmount: allow them (in a \
                         unit by SystemCallFilter=, as in rxsteer.service; in a container by its seccomp profile)";

/// The root of a file system of this type, as the calling thread's namespaces have it.
///
/// # Errors
/// When the kernel refuses; see [`NEEDS`].
pub fn mount(kind: &CStr) -> nix::Result<OwnedFd> {
    let opened = |fd: libc::c_long| {
        let fd = Errno::result(fd)?;
        // SAFETY: the kernel has just returned this descriptor, and there is no other owner.
        nix::Result::Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    };
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: a C string and a flag.
    let fs = opened(unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), FSOPEN_CLOEXEC) })?;
    // SAFETY: this command takes neither key nor value.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_fsconfig,
            fs.as_raw_fd(),
            FSCONFIG_CMD_CREATE,
            none,
            none,
            0,
        )
    })?;
    // SAFETY: a descriptor and flags.
    opened(unsafe { libc::syscall(libc::SYS_fsmount, fs.as_raw_fd(), FSMOUNT_CLOEXEC, 0) })
}

/// Writes to a file below such a root.
///
/// # Errors
/// When there is no such file, or the kernel refuses the value.
pub fn write(root: &OwnedFd, path: &str, value: &str) -> io::Result<()> {
    let flags = OFlag::O_WRONLY | OFlag::O_CLOEXEC;
    let file = openat(root, path, flags, Mode::empty())?;
    File::from(file).write_all(value.as_bytes())
}
