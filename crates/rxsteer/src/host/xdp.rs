// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attaching XDP programs; rxlab uses this as well.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use libbpf_rs::query::{LinkInfo, LinkTypeInfo, ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore, MapHandle, MapInfo};

/// Waits on drop until the kernel has freed a device-bound program. Drop this last.
///
/// The kernel frees such a program asynchronously (bpf_prog_free_deferred()). If the device is
/// removed before, Linux 6.18 writes through a stale pointer (__bpf_prog_offload_destroy() in
/// kernel/bpf/offload.c), and crashes with the RTNL held. A killed process can't wait.
pub struct Bound {
    /// The id of a map that only this program uses.
    map: u32,
}

impl Bound {
    /// The longest wait: another process may hold the program.
    const TIMEOUT: Duration = Duration::from_secs(2);

    /// From the release of the program's maps to that of the program, which takes the RTNL: others
    /// may hold it for some tens of milliseconds.
    const FREE_DELAY: Duration = Duration::from_millis(200);

    /// `map` must be used by this program only, as the map of its constants is.
    ///
    /// # Errors
    /// When the kernel doesn't tell the map's id.
    pub fn with(map: &impl MapCore) -> libbpf_rs::Result<Self> {
        Ok(Self {
            map: MapInfo::new(map.as_fd())?.info.id,
        })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let start = Instant::now();
        while MapHandle::from_map_id(self.map).is_ok() && start.elapsed() < Self::TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Self::FREE_DELAY);
    }
}

/// Attaches `program` to the device, in its driver, until the returned link is closed. The kernel removes a link
/// with its last file descriptor, also after a crash, and lets no other program replace it before.
///
/// # Errors
/// The kernel's: `EBUSY` when a program is attached already, `EOPNOTSUPP` without native XDP.
pub fn attach(program: BorrowedFd<'_>, ifindex: u32) -> std::io::Result<OwnedFd> {
    link(program, ifindex, libbpf_sys::XDP_FLAGS_DRV_MODE)
}

/// As [`attach`], in the stack: generic XDP, which any device has.
///
/// # Errors
/// `EBUSY` when a program is attached already.
pub fn attach_in_stack(program: BorrowedFd<'_>, ifindex: u32) -> std::io::Result<OwnedFd> {
    link(program, ifindex, libbpf_sys::XDP_FLAGS_SKB_MODE)
}

fn link(program: BorrowedFd<'_>, ifindex: u32, flags: u32) -> std::io::Result<OwnedFd> {
    let opts = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags,
        ..Default::default()
    };
    let ifindex = i32::try_from(ifindex).map_err(std::io::Error::other)?;
    // SAFETY: `opts` outlives the call; the kernel checks the rest.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(program.as_raw_fd(), ifindex, libbpf_sys::BPF_XDP, &opts)
    };
    if fd < 0 {
        return Err(std::io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the kernel has just opened this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The interface index of a link's device, 0 if the device is gone, and the id of its program.
///
/// # Errors
/// When it is no link of an XDP program.
pub fn facts(link: &OwnedFd) -> libbpf_rs::Result<(u32, u32)> {
    let facts = LinkInfo::from_fd(link.as_fd())?;
    match facts.info {
        LinkTypeInfo::Xdp(xdp) => Ok((xdp.ifindex, facts.prog_id)),
        _ => Err(std::io::Error::from_raw_os_error(libc::EINVAL).into()),
    }
}

/// Ids of the maps that a loaded program uses; none if it is gone.
pub fn maps_of(program: u32) -> Vec<u32> {
    let options = ProgInfoQueryOptions::default().include_map_ids(true);
    let mut programs = ProgInfoIter::with_query_opts(options);
    let program = programs.find(|info| info.id == program);
    program.map(|info| info.map_ids).unwrap_or_default()
}

/// Atomically replaces the program of the link with `program`.
///
/// # Errors
/// The kernel's: `EINVAL` when the programs differ in flags that the driver depends on.
pub fn update(link: &OwnedFd, program: BorrowedFd<'_>) -> std::io::Result<()> {
    // SAFETY: the call takes two descriptors and no options.
    let ret = unsafe {
        libbpf_sys::bpf_link_update(link.as_raw_fd(), program.as_raw_fd(), std::ptr::null())
    };
    match ret {
        0 => Ok(()),
        error => Err(std::io::Error::from_raw_os_error(-error)),
    }
}
