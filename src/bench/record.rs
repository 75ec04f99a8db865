// SPDX-License-Identifier: MIT OR Apache-2.0
//! `record`: what it costs an application that rxsteer notes where it runs.
//!
//! Calls that find nothing to read are the cheapest there are, and pass the same tracepoint: what
//! they cost more with the programs of `bpf/socket.h` attached is the cost of these.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Instant;

use anyhow::{Result, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use super::{Effort, Report, Rounds};
use crate::datapath::Datapath;
use crate::lab::netns::Netns;

/// Calls in one measured turn.
const CALLS: u32 = 200_000;

/// Does one call.
type Call = Box<dyn FnMut() -> std::io::Result<()> + Send>;

/// Measures each case in turn, without and with the programs, interleaved.
///
/// # Errors
/// When the programs can't be loaded, or sockets not be made.
pub fn record(effort: &Effort<'_>) -> Result<Report> {
    let mut datapath: Datapath = super::decide::subject(0, false)?;
    let netns = Netns::new("app")?;
    let mut cases = netns.run(cases)?;
    let total = u64::from(effort.rounds) * cases.len() as u64;
    let mut rounds = Rounds::default();
    for _ in 0..effort.rounds {
        for (case, call) in &mut cases {
            (effort.progress)(case, total);
            let [none, rxsteer] = interleaved(&mut datapath, call, effort.seconds)?;
            rounds.add(case, "none", "ns_per_call", none);
            rounds.add(case, "rxsteer", "ns_per_call", rxsteer);
            rounds.add(case, "rxsteer", "ns_added", rxsteer - none);
        }
    }
    Ok(rounds.report("record", effort.rounds))
}

/// Mean ns of a call without and with the programs, in turns until `seconds` have passed.
fn interleaved(datapath: &mut Datapath, call: &mut Call, seconds: f64) -> Result<[f64; 2]> {
    let mut sums = [0.0; 2];
    let mut turns = 0.0;
    let start = Instant::now();
    while turns == 0.0 || start.elapsed().as_secs_f64() < seconds {
        for (sum, follow) in sums.iter_mut().zip([false, true]) {
            let unseen = datapath.follow(follow)?.unwrap_or_default();
            ensure!(unseen.is_empty(), "{}", unseen.join("; "));
            *sum += std::thread::scope(|scope| scope.spawn(|| turn(call)).join())
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        turns += 1.0;
    }
    Ok(sums.map(|sum| sum / turns))
}

/// On one CPU, since the table is written when the caller has moved.
fn turn(call: &mut Call) -> Result<f64> {
    let mut cpu = CpuSet::new();
    cpu.set(0)?;
    sched_setaffinity(Pid::from_raw(0), &cpu)?;
    let start = Instant::now();
    for _ in 0..CALLS {
        call()?;
    }
    Ok(start.elapsed().as_nanos() as f64 / f64::from(CALLS))
}

fn cases() -> Result<Vec<(&'static str, Call)>> {
    let (v4, v6) = (
        IpAddr::from(Ipv4Addr::LOCALHOST),
        IpAddr::from(Ipv6Addr::LOCALHOST),
    );
    Ok(vec![
        ("recv-tcp4", recv_tcp(v4)?),
        ("recv-udp4", recv_udp(v4)?),
        ("recv-udp6", recv_udp(v6)?),
        ("recvfrom-udp4-unconnected", datagram(v4, false)?),
        ("recv-udp4-one-datagram", datagram(v4, true)?),
    ])
}

fn nothing(result: std::io::Result<usize>) -> std::io::Result<()> {
    match result {
        Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(()),
        other => other.map(|_| ()),
    }
}

fn recv_tcp(local: IpAddr) -> Result<Call> {
    let listener = TcpListener::bind((local, 0))?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let (server, _) = listener.accept()?;
    server.set_nonblocking(true)?;
    let mut buffer = [0; 64];
    Ok(Box::new(move || {
        let _open = &client;
        nothing(std::io::Read::read(&mut &server, &mut buffer))
    }))
}

fn recv_udp(local: IpAddr) -> Result<Call> {
    let (socket, peer) = (UdpSocket::bind((local, 0))?, UdpSocket::bind((local, 0))?);
    socket.connect(peer.local_addr()?)?;
    socket.set_nonblocking(true)?;
    let mut buffer = [0; 64];
    Ok(Box::new(move || {
        let _open = &peer;
        nothing(socket.recv(&mut buffer))
    }))
}

/// A datagram sent over loopback and received: with its sender's address if the socket is not
/// connected, which is what the hook for peers sees.
fn datagram(local: IpAddr, connected: bool) -> Result<Call> {
    let (socket, sender) = (UdpSocket::bind((local, 0))?, UdpSocket::bind((local, 0))?);
    let to: SocketAddr = socket.local_addr()?;
    if connected {
        socket.connect(sender.local_addr()?)?;
    }
    let mut buffer = [0; 64];
    Ok(Box::new(move || {
        sender.send_to(&[0; 16], to)?;
        match connected {
            true => socket.recv(&mut buffer).map(|_| ()),
            false => socket.recv_from(&mut buffer).map(|_| ()),
        }
    }))
}
