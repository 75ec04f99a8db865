// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ioctls of network devices, netdevice(7): their argument, and the socket that takes them.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use nix::sys::socket::{AddressFamily, SockFlag, SockType};

nix::ioctl_readwrite_bad!(siocgifname, libc::SIOCGIFNAME, libc::ifreq);
nix::ioctl_read_bad!(siocgifflags, libc::SIOCGIFFLAGS, libc::ifreq);
nix::ioctl_write_ptr_bad!(siocsifflags, libc::SIOCSIFFLAGS, libc::ifreq);

/// A request for the device of this name, of at most 15 bytes.
pub(super) fn ifreq(name: &str) -> libc::ifreq {
    // SAFETY: all zeros is a valid `ifreq`.
    let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in ifreq.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    ifreq
}

/// A request for the device with this index in the namespace of `socket`, whatever it is called now.
///
/// # Errors
/// ENODEV without such a device.
pub(super) fn ifreq_of(socket: &OwnedFd, ifindex: u32) -> nix::Result<libc::ifreq> {
    let mut ifreq = ifreq("");
    ifreq.ifr_ifru.ifru_ifindex = ifindex as libc::c_int;
    // SAFETY: the request outlives the call; the kernel writes the device's name to it.
    unsafe { siocgifname(socket.as_raw_fd(), &mut ifreq) }?;
    Ok(ifreq)
}

/// The name in a request; a device may have one that is not UTF-8.
pub(super) fn name_in(ifreq: &libc::ifreq) -> OsString {
    let bytes = ifreq.ifr_name.iter().map(|&c| c as u8);
    let name: Vec<u8> = bytes.take_while(|&c| c != 0).collect();
    OsStr::from_bytes(&name).to_owned()
}

/// A socket for devices of the calling thread's network namespace.
///
/// # Errors
/// When the process can't open sockets.
pub(super) fn socket() -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    nix::sys::socket::socket(AddressFamily::Inet, SockType::Datagram, flags, None)
}

/// Sets a device of the calling thread's network namespace up.
///
/// # Errors
/// When there is none, or the kernel refuses.
pub(super) fn set_up(name: &str) -> nix::Result<()> {
    let socket = socket()?;
    let mut request = ifreq(name);
    // SAFETY: the request outlives both calls; the kernel has written its flags before they are read.
    unsafe {
        siocgifflags(socket.as_raw_fd(), &mut request)?;
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
        siocsifflags(socket.as_raw_fd(), &request)?;
    }
    Ok(())
}
