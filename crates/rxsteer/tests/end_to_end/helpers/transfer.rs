// SPDX-License-Identifier: MIT OR Apache-2.0
//! A TCP connection and datagrams between two namespaces.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rxlab::lab::netns::Netns;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU};

/// Bytes of a connection.
const BYTES: usize = 16 << 20;

const DATAGRAMS: u32 = 20_000;

/// Datagrams on the way at most: a sender on another CPU would fill the socket. In native mode each
/// takes a page of its buffer, which by default has room for 52 pages (net.core.rmem_default).
const WINDOW: u32 = 32;

/// Limit on the arrival of a datagram, and of more bytes.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Sends over TCP to `to`, whose reader runs on the other CPU; every byte must arrive.
pub fn transfer(from: &Netns, to: &Netns, at: Ipv4Addr) -> Result<()> {
    let listener = to.run(|| Ok(TcpListener::bind((at, 0))?))?;
    let at = listener.local_addr()?;
    let reader = to.spawn(Some(OTHER_CPU), "reader", move || {
        let (mut stream, _) = listener.accept()?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut bytes = Vec::new();
        let read = stream.read_to_end(&mut bytes);
        read.with_context(|| format!("after {} bytes", bytes.len()))?;
        anyhow::Ok(bytes)
    })?;
    let sent: Vec<u8> = (0..BYTES).map(|n| (n ^ n >> 8) as u8).collect();
    let bytes = sent.clone();
    let writer = from.spawn(Some(POLLING_CPU), "writer", move || {
        let mut stream = TcpStream::connect_timeout(&at, TIMEOUT)?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.write_all(&bytes)?;
        anyhow::Ok(())
    })?;
    writer.join()?;
    let received = reader.join()?;
    ensure!(received == sent, "{} bytes arrived", received.len());
    Ok(())
}

/// Sends numbered datagrams to `at`, whose reader runs on the other CPU; they arrive in order, and none
/// is missing.
#[allow(dead_code, reason = "not all tests use it")]
pub fn datagrams(from: &Netns, to: &Netns, at: IpAddr) -> Result<()> {
    let any: (IpAddr, u16) = match at {
        IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED.into(), 0),
        IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED.into(), 0),
    };
    let sink = to.run(|| Ok(UdpSocket::bind((at, 0))?))?;
    let port = sink.local_addr()?;
    sink.set_read_timeout(Some(TIMEOUT))?;
    let sender = from.spawn(Some(POLLING_CPU), "sender", move || {
        let socket = UdpSocket::bind(any)?;
        socket.connect(port)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        for number in 0..DATAGRAMS {
            socket.send(&number.to_be_bytes())?;
            if number % WINDOW == WINDOW - 1 {
                socket.recv(&mut [0; 4])?;
            }
        }
        anyhow::Ok(())
    })?;
    let reader = to.spawn(Some(OTHER_CPU), "reader", move || {
        for number in 0..DATAGRAMS {
            let mut datagram = [0; 4];
            let (_, from) = sink
                .recv_from(&mut datagram)
                .context("a datagram is missing")?;
            let now = u32::from_be_bytes(datagram);
            ensure!(now == number, "{now} instead of {number}");
            if number % WINDOW == WINDOW - 1 {
                sink.send_to(&datagram, from)?;
            }
        }
        anyhow::Ok(())
    })?;
    sender.join()?;
    reader.join()
}

/// Flows of [`many_flows`].
const FLOWS: u32 = 16;

/// Sends numbered datagrams of [`FLOWS`] flows to `at`; those of each flow arrive in order, and none is
/// missing.
pub fn many_flows(from: &Netns, to: &Netns, at: IpAddr) -> Result<()> {
    const ROUNDS: u32 = 200;
    const OF_EACH: u32 = WINDOW / FLOWS;
    let sink = to.run(|| Ok(UdpSocket::bind((at, 0))?))?;
    let port = sink.local_addr()?;
    sink.set_read_timeout(Some(TIMEOUT))?;
    let (done, is_done) = mpsc::channel();
    let sender = from.spawn(Some(POLLING_CPU), "sender", move || {
        let socket = |_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0));
        let sockets: Vec<_> = (0..FLOWS).map(socket).collect::<std::io::Result<_>>()?;
        for number in 0..ROUNDS * OF_EACH {
            for socket in &sockets {
                socket.send_to(&number.to_be_bytes(), port)?;
            }
            if number % OF_EACH == OF_EACH - 1 {
                is_done.recv_timeout(TIMEOUT)?;
            }
        }
        anyhow::Ok(())
    })?;
    let mut next = BTreeMap::new();
    for _ in 0..ROUNDS {
        for _ in 0..WINDOW {
            let mut datagram = [0; 4];
            let (_, flow) = sink
                .recv_from(&mut datagram)
                .context("a datagram is missing")?;
            let (now, next) = (u32::from_be_bytes(datagram), next.entry(flow).or_insert(0));
            ensure!(now == *next, "{now} instead of {next}");
            *next += 1;
        }
        done.send(()).context("the sender has ended")?;
    }
    sender.join()
}
