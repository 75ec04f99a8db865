// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sockets of applications: servers, connected sockets, and TCP without a handshake.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Socket, Type};

use rxsteer::host::polling::Polling;

use super::frame::{TcpFlows, UdpFlows};
use super::netns::Netns;
use super::option;
use super::receiver::IDLE;

/// One unconnected UDP socket for all flows.
///
/// # Errors
/// The address is taken, or not in the namespace.
pub fn server(netns: &Netns, flows: &UdpFlows, rcvbuf: usize) -> Result<OwnedFd> {
    let local = SocketAddr::new(flows.daddr, flows.dport);
    netns.run(|| Ok(bound(local, rcvbuf)?.into()))
}

/// A UDP socket that shares its address (SO_REUSEPORT), in the caller's namespace.
///
/// # Errors
/// The address is taken, or not in the namespace.
pub fn reuseport(local: SocketAddr) -> Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(local), Type::DGRAM, None)?;
    socket.set_reuse_port(true)?;
    socket.bind(&local.into())?;
    Ok(socket.into())
}

/// A UDP socket that shares its address (SO_REUSEADDR), in the caller's namespace.
///
/// # Errors
/// As [`reuseport`].
pub fn reuseaddr(local: SocketAddr) -> Result<UdpSocket> {
    Ok(bound(local, 0)?.into())
}

/// A UDP socket that sends from one address to another, in the caller's namespace.
///
/// # Errors
/// As [`reuseport`].
pub fn sender(from: SocketAddr, to: SocketAddr) -> Result<UdpSocket> {
    let socket = UdpSocket::bind(from).with_context(|| format!("cannot send from {from}"))?;
    socket.connect(to)?;
    Ok(socket)
}

/// One UDP socket per flow, connected to its source.
///
/// # Errors
/// As [`server`], and when a source can't be reached.
pub fn connected(netns: &Netns, flows: &UdpFlows, rcvbuf: usize) -> Result<Vec<OwnedFd>> {
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let sources = (0..flows.nr_flows).map(|flow| flows.source(flow));
    connected_to(netns, local, sources, rcvbuf)
}

/// One UDP socket per source, connected to it.
///
/// # Errors
/// As [`server`], and when a source can't be reached.
pub fn connected_to(
    netns: &Netns,
    local: SocketAddr,
    sources: impl Iterator<Item = SocketAddr> + Send,
    rcvbuf: usize,
) -> Result<Vec<OwnedFd>> {
    let open = |source: SocketAddr| -> Result<OwnedFd> {
        let socket = bound(local, rcvbuf)?;
        socket.connect(&source.into())?;
        Ok(socket.into())
    };
    netns.run(|| sources.map(open).collect())
}

/// One established TCP socket per flow with room for `rcvbuf` bytes, which expects the flow's first
/// segment. There is no peer: nothing may answer what the sockets send. Closing them sends a reset
/// at most.
///
/// # Errors
/// Without CAP_NET_ADMIN, or when a source can't be reached.
pub fn established(netns: &Netns, tcp: &TcpFlows, rcvbuf: usize) -> Result<Vec<OwnedFd>> {
    let establish = |flow| -> Result<OwnedFd> {
        let local = SocketAddr::new(tcp.flows.daddr, tcp.flows.dport);
        let socket = open(Type::STREAM, local, rcvbuf)?;
        let set = |name, value: &[u32]| option::set(&socket, libc::IPPROTO_TCP, name, value);
        // Under repair all sockets may share the port, and connect() sends no packet.
        set(libc::TCP_REPAIR, &[1]).context("no TCP_REPAIR here")?;
        bind_to(&socket, local)?;
        for (queue, seq) in [(TCP_RECV_QUEUE, tcp.first_seq), (TCP_SEND_QUEUE, tcp.ack)] {
            set(libc::TCP_REPAIR_QUEUE, &[queue])?;
            set(libc::TCP_QUEUE_SEQ, &[seq])?;
        }
        socket.connect(&tcp.flows.source(flow).into())?;
        set(libc::TCP_REPAIR_OPTIONS, &[TCPOPT_WINDOW, 14 << 16 | 14])?;
        let window = rcvbuf as u32;
        set(
            libc::TCP_REPAIR_WINDOW,
            &[tcp.first_seq, 1 << 20, 1 << 20, window, tcp.first_seq],
        )?;
        socket.set_linger(Some(Duration::ZERO))?;
        set(libc::TCP_REPAIR, &[TCP_REPAIR_OFF_NO_WP])?;
        Ok(socket.into())
    };
    netns.run(|| {
        (0..tcp.flows.nr_flows)
            .map(|flow| establish(flow).with_context(|| format!("TCP flow {flow}")))
            .collect()
    })
}

/// Makes reads poll the device's queue for up to `us` microseconds, in preference to its interrupt.
///
/// # Errors
/// Without CAP_NET_ADMIN.
pub fn busy_poll(socket: &OwnedFd, us: u32) -> Result<()> {
    let polling = Polling {
        usecs: us,
        prefer: true,
    };
    polling.set_socket(socket).context("SO_BUSY_POLL")
}

/// Limits TCP's sending rate, bytes per second (SO_MAX_PACING_RATE).
///
/// # Errors
/// When it is no socket.
pub fn pace(socket: &impl AsRawFd, bytes_per_s: u32) -> Result<()> {
    let rate = libc::SO_MAX_PACING_RATE;
    option::set(socket, libc::SOL_SOCKET, rate, &bytes_per_s)
}

// linux/tcp.h, and an enum in net/ipv4/tcp.c.
const TCP_RECV_QUEUE: u32 = 1;
const TCP_SEND_QUEUE: u32 = 2;
const TCPOPT_WINDOW: u32 = 3;
/// -1: no window probe.
const TCP_REPAIR_OFF_NO_WP: u32 = u32::MAX;

fn open(kind: Type, local: SocketAddr, rcvbuf: usize) -> Result<Socket> {
    let socket = Socket::new(Domain::for_address(local), kind, None)?;
    // Allows many UDP sockets on one port.
    socket.set_reuse_address(true)?;
    // RcvBufForce: leaves net.core.rmem_max, a setting of the host, alone.
    setsockopt(&socket, sockopt::RcvBufForce, &rcvbuf)?;
    socket.set_read_timeout(Some(IDLE))?;
    Ok(socket)
}

fn bind_to(socket: &Socket, local: SocketAddr) -> Result<()> {
    let bound = socket.bind(&local.into());
    bound.with_context(|| format!("cannot receive on {local}"))
}

fn bound(local: SocketAddr, rcvbuf: usize) -> Result<Socket> {
    let socket = open(Type::DGRAM, local, rcvbuf)?;
    bind_to(&socket, local)?;
    Ok(socket)
}

/// A non-blocking TCP listener that shares its address (SO_REUSEPORT), in the caller's namespace.
///
/// # Errors
/// The address is taken, or not in the namespace.
pub fn listener(local: SocketAddr) -> Result<TcpListener> {
    /// Pending connections: the default of net.core.somaxconn, which caps it.
    const BACKLOG: i32 = 4096;
    let socket = Socket::new(Domain::for_address(local), Type::STREAM, None)?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket
        .bind(&local.into())
        .with_context(|| format!("cannot listen at {local}"))?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Accepts `count` TCP connections. Reads from them time out after `IDLE`.
///
/// # Errors
/// When a connection does not come within `timeout`.
pub fn accepted(listener: &TcpListener, count: u32, timeout: Duration) -> Result<Vec<TcpStream>> {
    let deadline = Instant::now() + timeout;
    listener.set_nonblocking(true)?;
    let mut streams = Vec::new();
    while streams.len() < count as usize {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(IDLE))?;
                stream.set_nodelay(true)?;
                streams.push(stream);
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(e) => {
                return Err(e).context(format!("{} of {count} connections came", streams.len()));
            }
        }
    }
    Ok(streams)
}
