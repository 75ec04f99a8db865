// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sees where each flow goes.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;

use anyhow::{Result, ensure};
use libc::c_int;
use nix::errno::Errno;
use nix::sys::socket::{SockaddrStorage, recvfrom};
use rxlab::lab::filter::{extension, instruction};
use rxlab::lab::link::{End, Link};
use rxlab::testing::testbed::until;
use socket2::{Domain, Protocol, SockAddr, SockFilter, Socket, Type};

/// A place for each flow, by the flow's port.
pub type Places = BTreeMap<u16, u32>;

// Offsets in an IPv4 packet.
pub const SOURCE_PORT: usize = 20;
pub const DESTINATION_PORT: usize = 22;

/// The flows' packets have this length at least; a handshake's packets are shorter.
const LENGTH: u32 = 200;

/// Sockets that receive the flows' packets: UDP sockets, or packet sockets.
pub struct Watch {
    pub sockets: Vec<Socket>,
    /// Offset of the flow's port. For UDP sockets it is the sender's.
    pub port: usize,
    /// Offset of the place. Without, it is the number of the socket.
    pub place: Option<usize>,
}

impl Watch {
    /// By the transmit queue of the other end, in which the packets were sent.
    pub fn queues(end: &End, nr_queues: u32, port: usize) -> Result<Self> {
        let queue = |queue| {
            let jump = |to| (libc::BPF_JMP | to | libc::BPF_K) as u16;
            let filters = [
                instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_LEN, 0),
                SockFilter::new(jump(libc::BPF_JGE), 0, 3, LENGTH),
                extension(libc::SKF_AD_QUEUE),
                SockFilter::new(jump(libc::BPF_JEQ), 0, 1, queue),
                instruction(libc::BPF_RET | libc::BPF_K, u32::MAX),
                instruction(libc::BPF_RET | libc::BPF_K, 0),
            ];
            packets(end, libc::ETH_P_IP, &filters)
        };
        Ok(Self {
            sockets: (0..nr_queues).map(queue).collect::<Result<_>>()?,
            port,
            place: None,
        })
    }

    /// By the device at which they arrive.
    pub fn devices(links: &[Link]) -> Result<Self> {
        let sockets = links
            .iter()
            .map(|link| packets(&link.dut, libc::ETH_P_IP, &[]));
        Ok(Self::of(sockets.collect::<Result<_>>()?))
    }

    pub fn of(sockets: Vec<Socket>) -> Self {
        Self {
            sockets,
            port: SOURCE_PORT,
            place: None,
        }
    }

    /// Returns once a packet of each of so many flows has come.
    pub fn places(&self, nr_flows: u16) -> Result<Places> {
        let mut places = Places::new();
        until("a packet of each flow has come", || {
            for (number, socket) in (0..).zip(&self.sockets) {
                while let Some((port, place)) = self.read(socket)? {
                    let before = places.insert(port, place.unwrap_or(number));
                    ensure!(before.is_none(), "port {port} twice: {places:?}");
                }
            }
            Ok((places.len() >= nr_flows.into()).then_some(()))
        })?;
        Ok(places)
    }

    /// The number of a socket to which a packet has come.
    pub fn next(&self) -> Result<Option<u32>> {
        for (number, socket) in (0..).zip(&self.sockets) {
            if self.read(socket)?.is_some() {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// The next packet's port, and place.
    fn read(&self, socket: &Socket) -> Result<Option<(u16, Option<u32>)>> {
        let mut packet = [0; 256];
        let from = match recvfrom::<SockaddrStorage>(socket.as_raw_fd(), &mut packet) {
            Err(Errno::EAGAIN) => return Ok(None),
            received => received?.1,
        };
        let word = |at| u16::from_be_bytes([packet[at], packet[at + 1]]);
        let udp = from.and_then(|from| from.as_sockaddr_in().map(|from| from.port()));
        let port = udp.unwrap_or_else(|| word(self.port));
        Ok(Some((port, self.place.map(|at| word(at).into()))))
    }
}

/// A packet socket, whose packets begin with the IP header. `protocol`: `ETH_P_IP`, for IPv4 that the kernel
/// receives, or `ETH_P_ALL`, for whatever the device has.
pub fn packets(end: &End, protocol: c_int, filters: &[SockFilter]) -> Result<Socket> {
    let protocol = (protocol as u16).to_be();
    end.netns.run(|| {
        let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(Protocol::from(0)))?;
        if !filters.is_empty() {
            socket.attach_filter(filters)?;
        }
        // SAFETY: the storage is zeroed, and has room for any address.
        let ((), at) = unsafe {
            SockAddr::try_init(|storage, len| {
                let at = storage.cast::<libc::sockaddr_ll>();
                (*at).sll_family = libc::AF_PACKET as u16;
                (*at).sll_protocol = protocol;
                (*at).sll_ifindex = end.ifindex as i32;
                *len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
                Ok(())
            })
        }?;
        socket.bind(&at)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    })
}
