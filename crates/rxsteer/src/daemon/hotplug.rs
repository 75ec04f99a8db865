// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPUs that go offline and come back, as the kernel tells (kobject uevents).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

/// The multicast group of what the kernel itself sends; others are udev's.
const KERNEL: u32 = 1;

/// A CPU went offline or came online.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its number.
    pub cpu: u32,
    /// Whether it is there now.
    pub online: bool,
}

/// The stream of [`Event`]s: readable when there is something, not always an event.
pub struct Hotplug(OwnedFd);

impl Hotplug {
    /// Listens from now on.
    ///
    /// # Errors
    /// When the kernel has no such sockets.
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

    /// What has come since the last call, in order; `None` if the kernel had to throw some away.
    ///
    /// # Errors
    /// When the socket can't be read.
    pub fn take(&self) -> Result<Option<Vec<Event>>> {
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

/// `offline@/devices/system/cpu/cpu1`, then what it says again as variables.
fn parse(message: &[u8]) -> Option<Event> {
    let head = message.split(|byte| *byte == 0).next()?;
    let (action, path) = std::str::from_utf8(head).ok()?.split_once('@')?;
    let cpu = path.strip_prefix("/devices/system/cpu/cpu")?.parse().ok()?;
    match action {
        "online" => Some(Event { cpu, online: true }),
        "offline" => Some(Event { cpu, online: false }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_cpus_that_come_and_go_are_events() {
        let event = |text: &str| parse(text.as_bytes());
        let offline = "offline@/devices/system/cpu/cpu11\0ACTION=offline\0SEQNUM=7\0";
        let expected = Event {
            cpu: 11,
            online: false,
        };
        assert_eq!(event(offline), Some(expected));
        let online = "online@/devices/system/cpu/cpu0\0";
        assert!(event(online).is_some_and(|e| e.online && e.cpu == 0));
        assert_eq!(event("add@/devices/virtual/net/veth0\0"), None);
        assert_eq!(event("change@/devices/system/cpu/cpu0\0"), None);
        assert_eq!(event("libudev\0"), None);
    }
}
