// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tun and tap devices, which the kernel removes when their last queue is closed.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};

use super::ifreq::{ifreq, socket};

/// A queue of a device.
#[derive(Debug)]
pub struct Queue {
    /// Each read is a packet that the device sends, each write one that it receives.
    pub file: File,
    /// The device's name.
    pub name: String,
    kind: libc::c_int,
}

nix::ioctl_write_ptr_bad!(tunsetiff, 0x4004_54ca, libc::ifreq);
nix::ioctl_read_bad!(siocgifflags, libc::SIOCGIFFLAGS, libc::ifreq);
nix::ioctl_write_ptr_bad!(siocsifflags, libc::SIOCSIFFLAGS, libc::ifreq);

impl Queue {
    /// Opens a queue of the device of this name, in the network namespace of the calling thread;
    /// the first one makes the device. `name`: of at most 15 bytes; `%d` stands for a free number.
    /// `kind`: `IFF_TUN`, for packets that begin with the IP header, or `IFF_TAP`; with
    /// `IFF_MULTI_QUEUE` there may be more queues.
    ///
    /// # Errors
    /// When the kernel has no tun devices, or the device has as many queues as it may have.
    pub fn open(name: &str, kind: libc::c_int) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/net/tun")
            .context("the kernel needs tun devices, CONFIG_TUN: /dev/net/tun")?;
        let mut request = ifreq(name);
        request.ifr_ifru.ifru_flags = (kind | libc::IFF_NO_PI) as libc::c_short;
        // SAFETY: the request outlives the call; the kernel writes the device's name to it.
        unsafe { tunsetiff(file.as_raw_fd(), &request) }
            .context("the kernel refused a tun device")?;
        let bytes = request.ifr_name.iter().map(|&c| c as u8);
        let name: Vec<u8> = bytes.take_while(|&c| c != 0).collect();
        Ok(Self {
            file,
            name: String::from_utf8_lossy(&name).into_owned(),
            kind,
        })
    }

    /// Opens another queue of the same device.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn another(&self) -> Result<Self> {
        Self::open(&self.name, self.kind)
    }

    /// Sets the device up.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_up(&self) -> Result<()> {
        let socket = socket()?;
        let mut request = ifreq(&self.name);
        // SAFETY: the request outlives both calls; the kernel has written its flags before they are
        // read.
        unsafe {
            siocgifflags(socket.as_raw_fd(), &mut request)
                .and_then(|_| {
                    request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
                    siocsifflags(socket.as_raw_fd(), &request)
                })
                .with_context(|| format!("{} can't be set up", self.name))?;
        }
        Ok(())
    }
}
