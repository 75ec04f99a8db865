// SPDX-License-Identifier: MIT OR Apache-2.0
//! Netlink requests of one message, and their attributes.

use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    socket,
};

const NLMSG_HEADER: usize = 16;
const ATTR_HEADER: usize = 4;
/// linux/if_link.h: a name of any length, or an altname.
const IFLA_ALT_IFNAME: u16 = 53;
/// Bytes of `struct ifinfomsg`.
const IFINFOMSG: usize = 16;

/// Sends one request; returns the body of each reply, up to the acknowledgement or the dump's end.
///
/// # Errors
/// The kernel's.
pub(super) fn exchange(
    protocol: SockProtocol,
    kind: u16,
    flags: u16,
    request: &[u8],
) -> io::Result<Vec<Vec<u8>>> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        protocol,
    )?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;

    // A dump has an end message; other requests need an acknowledgement.
    let ack = if flags == 0 { libc::NLM_F_ACK } else { 0 };
    let flags = flags | (libc::NLM_F_REQUEST | ack) as u16;
    let len = (NLMSG_HEADER + request.len()) as u32;
    let mut message = Vec::with_capacity(len as usize);
    message.extend(len.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]); // sequence number and port: one request to a socket of its own
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

/// Appends the replies of one datagram to `replies`; returns true after the last one.
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
            // Both start with an error number: negative, or 0.
            let errno = body
                .get(..4)
                .map_or(0, |b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
            return match errno {
                0 => Ok(true),
                errno => Err(io::Error::from_raw_os_error(-errno)),
            };
        }
        replies.push(body.to_vec());
        datagram = datagram.get(align(len)..).unwrap_or_default();
    }
    Ok(false)
}

/// The attributes of device `ifindex` of the caller's network namespace (linux/if_link.h).
///
/// # Errors
/// ENODEV without such a device.
pub(super) fn link(ifindex: u32) -> io::Result<Vec<u8>> {
    let mut request = vec![0; IFINFOMSG];
    request[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    get_link(&request)
}

/// As [`link`], of the device with this name or altname.
pub(super) fn link_by_name(name: &str) -> io::Result<Vec<u8>> {
    let mut request = vec![0; IFINFOMSG];
    put_attr(&mut request, IFLA_ALT_IFNAME, name.as_bytes());
    get_link(&request)
}

fn get_link(request: &[u8]) -> io::Result<Vec<u8>> {
    let replies = exchange(SockProtocol::NetlinkRoute, libc::RTM_GETLINK, 0, request)?;
    let link = replies.first().and_then(|reply| reply.get(IFINFOMSG..));
    link.map(<[u8]>::to_vec)
        .ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "the kernel describes no device"))
}

pub(super) fn put_attr(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend(((ATTR_HEADER + value.len()) as u16).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
    message.resize(align(message.len()), 0);
}

/// The attributes of a message, as pairs of kind and value.
pub(super) fn attrs(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header = rest.get(..ATTR_HEADER)?;
        let len = u16::from_ne_bytes([header[0], header[1]]) as usize;
        let kind = u16::from_ne_bytes([header[2], header[3]]) & libc::NLA_TYPE_MASK as u16;
        let value = rest.get(ATTR_HEADER..len)?;
        rest = rest.get(align(len)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The value of an attribute.
pub(super) fn attr(message: &[u8], wanted: u16) -> Option<&[u8]> {
    let found = attrs(message).find(|(kind, _)| *kind == wanted);
    found.map(|(_, value)| value)
}

/// The value of an integer attribute: 4 bytes, or 8 for a large `uint`.
pub(super) fn number(reply: &[u8], wanted: u16) -> Option<u64> {
    let value = attr(reply, wanted)?;
    let small = <[u8; 4]>::try_from(value).map(|value| u32::from_ne_bytes(value).into());
    small
        .or_else(|_| value.try_into().map(u64::from_ne_bytes))
        .ok()
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
        // A truncated message yields no attribute that the whole one lacks.
        for len in 0..message.len() {
            assert!(attrs(&message[..len]).count() < 2);
        }
    }

    #[test]
    fn numbers_of_either_length() {
        let mut message = Vec::new();
        put_attr(&mut message, 5, &7u32.to_ne_bytes());
        put_attr(&mut message, 6, &(1u64 << 40).to_ne_bytes());
        put_attr(&mut message, 7, &[1, 2]);
        let read = [5, 6, 7, 8].map(|kind| number(&message, kind));
        assert_eq!(read, [Some(7), Some(1 << 40), None, None]);
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
}
