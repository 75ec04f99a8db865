// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's `netdev` netlink family (6.3; NAPI instances 6.8):
//! Documentation/netlink/specs/netdev.yaml.

use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    socket,
};

/// A NAPI instance of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Napi {
    pub id: u32,
    /// The interrupt that schedules it, where the driver says so.
    pub irq: Option<u32>,
    /// The thread that polls it, when it is threaded.
    pub pid: Option<u32>,
}

const NLMSG_HEADER: usize = 16;
const GENL_HEADER: usize = 4;
const ATTR_HEADER: usize = 4;

// linux/netdev.h. Written out because Debian 12's headers, of 6.1, do not have it.
const NETDEV_CMD_NAPI_GET: u8 = 11;
const NETDEV_A_NAPI_IFINDEX: u16 = 1;
const NETDEV_A_NAPI_ID: u16 = 2;
const NETDEV_A_NAPI_IRQ: u16 = 3;
const NETDEV_A_NAPI_PID: u16 = 4;

/// The NAPI instances of device `ifindex` that have an id, in the order of their ids, which is
/// the order in which the driver made them: a device's receive queues in ascending order.
/// Instances that only clean transmit queues have no id.
///
/// `None` where the kernel does not say (before 6.8).
pub fn napis(ifindex: u32) -> Result<Option<Vec<Napi>>> {
    let Some(family) = family_id("netdev")? else {
        return Ok(None);
    };
    let mut request = Vec::new();
    put_attr(&mut request, NETDEV_A_NAPI_IFINDEX, &ifindex.to_ne_bytes());
    let replies = match dump(family, NETDEV_CMD_NAPI_GET, &request) {
        Ok(replies) => replies,
        // The family is there since 6.3, this command since 6.8.
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(None),
        Err(e) => return Err(e).context("cannot ask the kernel for the device's NAPI instances"),
    };
    let mut napis = Vec::new();
    for reply in &replies {
        let number = |wanted| {
            attrs(reply)
                .find(|(kind, _)| *kind == wanted)
                .and_then(|(_, value)| Some(u32::from_ne_bytes(value.try_into().ok()?)))
        };
        // Kernels that know the command but not the filter answer for every device.
        if number(NETDEV_A_NAPI_IFINDEX) != Some(ifindex) {
            continue;
        }
        if let Some(id) = number(NETDEV_A_NAPI_ID) {
            napis.push(Napi {
                id,
                irq: number(NETDEV_A_NAPI_IRQ),
                pid: number(NETDEV_A_NAPI_PID),
            });
        }
    }
    napis.sort_unstable_by_key(|napi| napi.id);
    Ok(Some(napis))
}

/// Whether the kernel has the family (6.3 and later).
pub fn is_known() -> Result<bool> {
    Ok(family_id("netdev")?.is_some())
}

/// The number of a generic netlink family; `None` if the kernel has no such family.
fn family_id(name: &str) -> Result<Option<u16>> {
    let mut request = Vec::new();
    let name = [name.as_bytes(), b"\0"].concat();
    put_attr(&mut request, libc::CTRL_ATTR_FAMILY_NAME as u16, &name);
    let command = libc::CTRL_CMD_GETFAMILY as u8;
    let replies = match exchange(libc::GENL_ID_CTRL as u16, command, 0, &request) {
        Ok(replies) => replies,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).context("cannot ask the kernel for its netlink families"),
    };
    let id = replies
        .iter()
        .flat_map(|reply| attrs(reply))
        .find(|(kind, _)| *kind == libc::CTRL_ATTR_FAMILY_ID as u16)
        .and_then(|(_, value)| Some(u16::from_ne_bytes(value.try_into().ok()?)));
    match id {
        Some(id) => Ok(Some(id)),
        None => bail!("the kernel answered without the family's number"),
    }
}

fn dump(family: u16, command: u8, request: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    exchange(family, command, libc::NLM_F_DUMP as u16, request)
}

/// Sends one request and returns the attributes of each answer, up to the acknowledgement or the
/// end of the dump.
fn exchange(family: u16, command: u8, flags: u16, request: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkGeneric,
    )?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;

    // A dump ends by itself; a plain request ends with the acknowledgement asked for here.
    let ack = if flags == 0 { libc::NLM_F_ACK } else { 0 };
    let flags = flags | (libc::NLM_F_REQUEST | ack) as u16;
    let len = (NLMSG_HEADER + GENL_HEADER + request.len()) as u32;
    let mut message = Vec::with_capacity(len as usize);
    message.extend(len.to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]); // sequence number and port: one request to a socket of its own
    message.extend([command, 1, 0, 0]); // command, version, reserved
    message.extend(request);
    send(socket.as_raw_fd(), &message, MsgFlags::empty())?;

    let mut replies = Vec::new();
    // The kernel fills at most 32 KiB into one datagram of a dump (netlink_recvmsg).
    let mut buffer = vec![0; 1 << 16];
    loop {
        let len = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        if read_datagram(&buffer[..len], &mut replies)? {
            return Ok(replies);
        }
    }
}

/// Adds the answers of one datagram to `replies`; true when it was the last.
fn read_datagram(mut datagram: &[u8], replies: &mut Vec<Vec<u8>>) -> io::Result<bool> {
    while let Some(header) = datagram.get(..NLMSG_HEADER) {
        let len = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let kind = i32::from(u16::from_ne_bytes([header[4], header[5]]));
        let Some(body) = datagram.get(NLMSG_HEADER..len) else {
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                "truncated netlink message",
            ));
        };
        if kind == libc::NLMSG_ERROR || kind == libc::NLMSG_DONE {
            // Both begin with a negative errno, or 0.
            let errno = body
                .get(..4)
                .map_or(0, |b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
            return match errno {
                0 => Ok(true),
                errno => Err(io::Error::from_raw_os_error(-errno)),
            };
        }
        replies.push(body.get(GENL_HEADER..).unwrap_or_default().to_vec());
        datagram = datagram.get(align(len)..).unwrap_or_default();
    }
    Ok(false)
}

fn put_attr(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend(((ATTR_HEADER + value.len()) as u16).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
    message.resize(align(message.len()), 0);
}

/// The attributes of a message: kind and value.
fn attrs(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header = rest.get(..ATTR_HEADER)?;
        let len = u16::from_ne_bytes([header[0], header[1]]) as usize;
        let kind = u16::from_ne_bytes([header[2], header[3]]) & libc::NLA_TYPE_MASK as u16;
        let value = rest.get(ATTR_HEADER..len)?;
        rest = rest.get(align(len)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Netlink pads to 4 bytes.
fn align(len: usize) -> usize {
    len.next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_read_back() {
        let mut message = Vec::new();
        put_attr(&mut message, 7, b"abc");
        put_attr(&mut message, 8, &5u32.to_ne_bytes());
        assert_eq!(message.len(), 16);
        let read: Vec<_> = attrs(&message).collect();
        assert_eq!(read, [(7, &b"abc"[..]), (8, &5u32.to_ne_bytes()[..])]);
        // Cut anywhere, nothing is invented.
        for len in 0..message.len() {
            assert!(attrs(&message[..len]).count() < 2);
        }
    }

    #[test]
    fn errors_and_ends_are_told_apart() {
        let message = |kind: i32, errno: i32| {
            let mut message = 20u32.to_ne_bytes().to_vec();
            message.extend((kind as u16).to_ne_bytes());
            message.extend([0; 10]);
            message.extend(errno.to_ne_bytes());
            message
        };
        let read = |message: &[u8]| read_datagram(message, &mut Vec::new());
        assert!(read(&message(libc::NLMSG_DONE, 0)).unwrap());
        assert!(read(&message(libc::NLMSG_ERROR, 0)).unwrap());
        let error = read(&message(libc::NLMSG_ERROR, -libc::EOPNOTSUPP)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
        assert!(!read(&message(100, 0)).unwrap());
        assert!(read(&message(100, 0)[..18]).is_err());
    }

    #[test]
    fn families_by_name() {
        // Asking needs no privilege, and every kernel has the controller itself.
        assert_eq!(
            family_id("nlctrl").unwrap(),
            Some(libc::GENL_ID_CTRL as u16)
        );
        assert_eq!(family_id("rxsteer-none").unwrap(), None);
    }

    #[test]
    fn the_loopback_device_has_no_napi() {
        if let Some(napis) = napis(1).unwrap() {
            assert_eq!(napis, []);
        }
    }
}
