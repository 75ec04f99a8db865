// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ioctls of network devices, netdevice(7): their argument, and the socket that takes them.

use std::os::fd::OwnedFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockType};

/// A request for the device of this name, of at most 15 bytes.
pub(super) fn ifreq(name: &str) -> libc::ifreq {
    // SAFETY: all zeros is a valid `ifreq`.
    let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in ifreq.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    ifreq
}

/// A socket for devices of the calling thread's network namespace.
///
/// # Errors
/// When the process can't open sockets.
pub(super) fn socket() -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    nix::sys::socket::socket(AddressFamily::Inet, SockType::Datagram, flags, None)
}
