// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tun and tap devices, which the kernel removes when their last queue is closed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, anyhow};

use super::caps::Missing;
use super::ifreq::{ifreq, name_in, set_up};

/// The kernel's interface.
const TUN: &str = "/dev/net/tun";

fn open() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(TUN)
}

/// The interface, by the error of opening it.
fn lacks(error: &io::Error) -> Option<Missing> {
    let how_to_get = match error.raw_os_error()? {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => {
            "`modprobe tun` makes it (CONFIG_TUN); for a container also `docker run --device /dev/net/tun`, \
             for a pod a hostPath volume of type CharDevice"
        }
        // As a control group of devices refuses it.
        libc::EPERM => {
            "it may not be opened here: for a container `docker run --device /dev/net/tun`, for a unit \
             DeviceAllow=/dev/net/tun rw"
        }
        _ => return None,
    };
    Some(Missing {
        what: TUN.to_owned(),
        how_to_get: how_to_get.to_owned(),
    })
}

/// A queue of a device.
#[derive(Debug)]
pub struct Queue {
    /// Each read is a packet that the device sends, each write one that it receives.
    pub file: File,
    /// The device's name.
    pub name: String,
}

nix::ioctl_write_ptr_bad!(tunsetiff, 0x4004_54ca, libc::ifreq);

impl Queue {
    /// Opens a queue of the device of this name, in the network namespace of the calling thread;
    /// the first one makes the device. `name`: of at most 15 bytes; `%d` stands for a free number.
    /// `kind`: `IFF_TUN`, for packets that begin with the IP header, or `IFF_TAP`.
    ///
    /// # Errors
    /// When the kernel has no tun devices, or the device has as many queues as it may have.
    pub fn open(name: &str, kind: libc::c_int) -> Result<Self> {
        let file = open().map_err(|e| match lacks(&e) {
            Some(missing) => anyhow!("{missing}"),
            None => anyhow::Error::new(e).context(format!("cannot open {TUN}")),
        })?;
        let mut request = ifreq(name);
        request.ifr_ifru.ifru_flags = (kind | libc::IFF_NO_PI) as libc::c_short;
        // SAFETY: the request outlives the call; the kernel writes the device's name to it.
        unsafe { tunsetiff(file.as_raw_fd(), &request) }
            .context("the kernel refused a tun device")?;
        Ok(Self {
            file,
            name: name_in(&request).to_string_lossy().into_owned(),
        })
    }

    /// Sets the device up.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_up(&self) -> Result<()> {
        set_up(&self.name).with_context(|| format!("{} can't be set up", self.name))
    }
}
