// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPUs that go offline and come back, devices that come and go, are renamed, or change their queues,
//! as reported by the kernel (kobject uevents).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

/// Multicast group of the kernel's own events; others are udev's.
const KERNEL: u32 = 1;

/// What has changed.
#[derive(Debug, PartialEq, Eq)]
pub struct Events {
    /// The CPUs that have gone offline or come online; `None` if the kernel had to drop events.
    pub cpus: Option<Vec<u32>>,
    /// Network devices or their queues have changed.
    pub devices: bool,
}

/// The stream of events: readable when there are messages of the kernel, not all of which concern a
/// CPU or a network device. Those of network devices come from the caller's network namespace alone.
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

    /// What has changed since the last call.
    ///
    /// # Errors
    /// When the socket can't be read.
    pub fn take(&self) -> Result<Events> {
        let (mut cpus, mut devices) = (Some(Vec::new()), false);
        let mut message = [0; 4096];
        loop {
            match recv(self.0.as_raw_fd(), &mut message, MsgFlags::empty()) {
                Ok(len) => match (parse(&message[..len]), &mut cpus) {
                    (Some(Event::Cpu(cpu)), Some(cpus)) => cpus.push(cpu),
                    (Some(Event::Device), _) => devices = true,
                    _ => {}
                },
                Err(Errno::EAGAIN) => return Ok(Events { cpus, devices }),
                Err(Errno::ENOBUFS) => (cpus, devices) = (None, true),
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

#[derive(Debug, PartialEq, Eq)]
enum Event {
    Cpu(u32),
    Device,
}

/// The first words of an event, such as `offline@/devices/system/cpu/cpu1` or
/// `add@/devices/virtual/net/veth0`; the same as variables follows.
fn parse(message: &[u8]) -> Option<Event> {
    let head = message.split(|byte| *byte == 0).next()?;
    let (action, path) = std::str::from_utf8(head).ok()?.split_once('@')?;
    if path.contains("/net/") {
        return Some(Event::Device);
    }
    let cpu = path.strip_prefix("/devices/system/cpu/cpu")?.parse().ok()?;
    ["online", "offline"]
        .contains(&action)
        .then_some(Event::Cpu(cpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_and_devices_that_come_and_go_are_events() {
        let event = |text: &str| parse(text.as_bytes());
        let offline = "offline@/devices/system/cpu/cpu11\0ACTION=offline\0SEQNUM=7\0";
        assert_eq!(event(offline), Some(Event::Cpu(11)));
        assert_eq!(
            event("online@/devices/system/cpu/cpu0\0"),
            Some(Event::Cpu(0))
        );
        assert_eq!(
            event("add@/devices/virtual/net/veth0\0"),
            Some(Event::Device)
        );
        let queue = "remove@/devices/pci0000:00/0000:00:03.0/net/eth0/queues/rx-1\0";
        assert_eq!(event(queue), Some(Event::Device));
        assert_eq!(event("add@/devices/virtual/block/loop0\0"), None);
        assert_eq!(event("change@/devices/system/cpu/cpu0\0"), None);
        assert_eq!(event("libudev\0"), None);
    }
}
