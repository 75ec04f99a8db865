// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attaching XDP programs, ours and the lab's.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use libbpf_rs::{MapCore, MapHandle, MapInfo};

use crate::host::device::XdpMode;

/// A program that is bound to a device, to be dropped when the last reference to it has been.
///
/// The kernel lets go of such a program some time later (bpf_prog_free_deferred()). Should the device
/// go first, Linux 6.18 writes to where the verifier had once put the program
/// (__bpf_prog_offload_destroy() in kernel/bpf/offload.c), and dies with the RTNL held. So this
/// waits. A process that is killed can't.
pub struct Bound {
    /// The id of a map that only this program uses.
    map: u32,
}

impl Bound {
    /// How long to wait at most: somebody else may hold the program.
    const PATIENCE: Duration = Duration::from_secs(2);

    /// Maps go right before the program does.
    const REST: Duration = Duration::from_millis(20);

    /// `map` is one that nobody else uses, as the constants are the program's own.
    ///
    /// # Errors
    /// When the map does not tell its id.
    pub fn with(map: &impl MapCore) -> libbpf_rs::Result<Self> {
        Ok(Self {
            map: MapInfo::new(map.as_fd())?.info.id,
        })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let start = Instant::now();
        while MapHandle::from_map_id(self.map).is_ok() && start.elapsed() < Self::PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Self::REST);
    }
}

/// Attaches `program` to the device for as long as the returned link is open. A link, because the
/// kernel removes it with its last file descriptor, and lets nobody replace it before.
///
/// # Errors
/// The kernel's: `EBUSY` when a program is attached already, `EOPNOTSUPP` when the driver has no
/// native XDP.
pub fn attach(program: BorrowedFd<'_>, ifindex: u32, mode: XdpMode) -> std::io::Result<OwnedFd> {
    let opts = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags: match mode {
            XdpMode::Native => libbpf_sys::XDP_FLAGS_DRV_MODE,
            XdpMode::Generic => libbpf_sys::XDP_FLAGS_SKB_MODE,
        },
        ..Default::default()
    };
    let ifindex = i32::try_from(ifindex).map_err(std::io::Error::other)?;
    // SAFETY: `opts` lives through the call; the kernel checks the rest.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(program.as_raw_fd(), ifindex, libbpf_sys::BPF_XDP, &opts)
    };
    if fd < 0 {
        return Err(std::io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the kernel has just given us this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts `program` in the place of the one that the link attached, between two packets.
///
/// # Errors
/// The kernel's: `EINVAL` when the programs differ in what the driver must know of them.
pub fn update(link: &OwnedFd, program: BorrowedFd<'_>) -> std::io::Result<()> {
    // SAFETY: two descriptors and no options.
    let ret = unsafe {
        libbpf_sys::bpf_link_update(link.as_raw_fd(), program.as_raw_fd(), std::ptr::null())
    };
    match ret {
        0 => Ok(()),
        error => Err(std::io::Error::from_raw_os_error(-error)),
    }
}
