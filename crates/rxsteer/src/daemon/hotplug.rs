// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPUs that go offline and come back, as reported by the kernel (kobject uevents).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

/// Multicast group of the kernel's own events; others are udev's.
const KERNEL: u32 = 1;

/// The stream of events: readable when there are messages of the kernel, not all of which concern a
/// CPU.
pub struct Hotplug(OwnedFd);

impl Hotplug {
    /// Listens from now on.
    ///
    /// # Errors
    /// When the kernel has no sockets for events.
    pub fn listen() -> Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkKObjectUEvent,
        )
        .context("no socket for the kernel's events")?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, KERNEL)).context("the kernel's events")?;
        Ok(Self(fd))
    }

    /// The CPUs that have gone offline or come online since the last call; `None` if the kernel had
    /// to drop events.
    ///
    /// # Errors
    /// When the socket can't be read.
    pub fn take(&self) -> Result<Option<Vec<u32>>> {
        let mut events = Some(Vec::new());
        let mut message = [0; 4096];
        loop {
            match recv(self.0.as_raw_fd(), &mut message, MsgFlags::empty()) {
                Ok(len) => {
                    if let Some(events) = &mut events {
                        events.extend(parse(&message[..len]));
                    }
                }
                Err(Errno::EAGAIN) => return Ok(events),
                Err(Errno::ENOBUFS) => events = None,
                Err(Errno::EINTR) => {}
                Err(e) => return Err(e).context("the kernel's events"),
            }
        }
    }
}

impl AsFd for Hotplug {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The CPU of `offline@/devices/system/cpu/cpu1` or `online@…`; the same as variables follows.
fn parse(message: &[u8]) -> Option<u32> {
    let head = message.split(|byte| *byte == 0).next()?;
    let (action, path) = std::str::from_utf8(head).ok()?.split_once('@')?;
    let cpu = path.strip_prefix("/devices/system/cpu/cpu")?.parse().ok()?;
    ["online", "offline"].contains(&action).then_some(cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_cpus_that_come_and_go_are_events() {
        let event = |text: &str| parse(text.as_bytes());
        let offline = "offline@/devices/system/cpu/cpu11\0ACTION=offline\0SEQNUM=7\0";
        assert_eq!(event(offline), Some(11));
        assert_eq!(event("online@/devices/system/cpu/cpu0\0"), Some(0));
        assert_eq!(event("add@/devices/virtual/net/veth0\0"), None);
        assert_eq!(event("change@/devices/system/cpu/cpu0\0"), None);
        assert_eq!(event("libudev\0"), None);
    }
}
