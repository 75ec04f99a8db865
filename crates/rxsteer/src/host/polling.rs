// SPDX-License-Identifier: MIT OR Apache-2.0
//! Busy-poll settings of sockets and epoll instances: socket(7), ioctl_eventpoll(2).

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixDatagram;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

// asm-generic/socket.h: all architectures except alpha, mips, parisc and sparc.
const SO_INCOMING_NAPI_ID: libc::c_int = 56;
const SO_COOKIE: libc::c_int = 57;
const SO_PREFER_BUSY_POLL: libc::c_int = 69;

/// Busy-poll settings of a socket or an epoll instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Polling {
    /// The longest time that a call polls, us; 0 disables polling.
    pub usecs: u32,
    /// Keep interrupts masked while the application polls.
    pub prefer: bool,
}

impl Polling {
    /// Reads a socket's settings.
    ///
    /// # Errors
    /// ENOPROTOOPT from a kernel without busy polling.
    pub fn of_socket(socket: &impl AsFd) -> io::Result<Self> {
        Ok(Self {
            usecs: option::<u32>(socket, libc::SO_BUSY_POLL)?,
            prefer: option::<u32>(socket, SO_PREFER_BUSY_POLL)? != 0,
        })
    }

    /// Sets a socket's settings.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN when a value is raised.
    pub fn set_socket(self, socket: &impl AsFd) -> io::Result<()> {
        set_option(socket, libc::SO_BUSY_POLL, self.usecs)?;
        set_option(socket, SO_PREFER_BUSY_POLL, self.prefer.into())
    }

    /// Reads an epoll instance's settings.
    ///
    /// # Errors
    /// ENOTTY or EINVAL before Linux 6.9.
    pub fn of_epoll(epoll: &impl AsFd) -> io::Result<Self> {
        let params = epoll_params(epoll)?;
        Ok(Self {
            usecs: params.busy_poll_usecs,
            prefer: params.prefer_busy_poll != 0,
        })
    }

    /// Sets an epoll instance's settings; its packet budget stays unchanged.
    ///
    /// # Errors
    /// As [`Self::of_epoll`].
    pub fn set_epoll(self, epoll: &impl AsFd) -> io::Result<()> {
        let mut params = epoll_params(epoll)?;
        params.busy_poll_usecs = self.usecs;
        params.prefer_busy_poll = self.prefer.into();
        // SAFETY: the kernel reads a structure of this type.
        let done = unsafe {
            libc::ioctl(
                epoll.as_fd().as_raw_fd(),
                libc::EPIOCSPARAMS,
                &raw const params,
            )
        };
        Errno::result(done)?;
        Ok(())
    }
}

/// `net.core.busy_read`, us: the polling time that a new socket of any kind inherits. The file in
/// /proc/sys exists in the initial network namespace alone. 0 if the kernel has no busy polling.
///
/// # Errors
/// When no socket can be opened.
pub fn host_busy_read() -> io::Result<u32> {
    let new = UnixDatagram::unbound()?;
    Ok(Polling::of_socket(&new).unwrap_or_default().usecs)
}

fn epoll_params(epoll: &impl AsFd) -> io::Result<libc::epoll_params> {
    // SAFETY: the structure has integers only; all zeros is valid.
    let mut params: libc::epoll_params = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes a structure of this type.
    let done = unsafe {
        libc::ioctl(
            epoll.as_fd().as_raw_fd(),
            libc::EPIOCGPARAMS,
            &raw mut params,
        )
    };
    Errno::result(done)?;
    Ok(params)
}

/// The socket's cookie: unique on this host since boot.
///
/// # Errors
/// When `socket` is no socket.
pub fn cookie(socket: &impl AsFd) -> io::Result<u64> {
    option(socket, SO_COOKIE)
}

/// The id of the NAPI instance that delivered the socket's latest packet, and which the socket
/// polls. `None` before the first packet, or if the device has no NAPI.
///
/// # Errors
/// ENOPROTOOPT from a kernel without busy polling.
pub fn napi_id(socket: &impl AsFd) -> io::Result<Option<u32>> {
    let id = option(socket, SO_INCOMING_NAPI_ID)?;
    Ok(Some(id).filter(|id| *id != 0))
}

/// Reads a socket option of an integer type.
pub(super) fn option<T: Default>(socket: &impl AsFd, name: libc::c_int) -> io::Result<T> {
    let (mut value, mut len) = (T::default(), size_of::<T>() as libc::socklen_t);
    // SAFETY: the kernel writes at most `len` bytes; an integer has no invalid value.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    Errno::result(done)?;
    Ok(value)
}

fn set_option(socket: &impl AsFd, name: libc::c_int, value: u32) -> io::Result<()> {
    let fd = socket.as_fd().as_raw_fd();
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes.
    let done =
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, name, (&raw const value).cast(), len) };
    Errno::result(done)?;
    Ok(())
}
