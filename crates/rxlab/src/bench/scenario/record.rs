// SPDX-License-Identifier: MIT OR Apache-2.0
//! `record`: cost for an application of rxsteer's recording of its CPU.
//!
//! Calls that find nothing to read are the cheapest, and pass the same tracepoint: the difference
//! with the programs of `bpf/socket.bpf.c` attached is the cost of these.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Instant;

use anyhow::Result;
use indexmap::IndexMap;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use rxsteer::datapath::policy::Policy;
use rxsteer::datapath::{Datapath, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES};

use crate::bench::experiment::{CasePlan, Effort, Experiment, Plan, Values, fit, headline};
use crate::bench::report::document::Better;
use crate::bench::report::document::SUBJECT;
use crate::bench::scenario::decide::Subject;
use crate::lab::netns::Netns;

/// Calls between two readings of the clock.
const CALLS: u32 = 1000;

type Call = Box<dyn FnMut() -> std::io::Result<()> + Send>;

/// Without the programs of `bpf/socket.bpf.c`, and with them.
const MODES: [&str; 2] = ["none", SUBJECT];

pub struct Record {
    datapath: Datapath,
    _netns: Netns,
    cases: Vec<(&'static str, Call)>,
    seconds: f64,
}

impl Record {
    /// Loads the programs and creates the sockets.
    ///
    /// # Errors
    /// When a program can't be loaded, or a socket not be created.
    pub fn new(effort: &Effort) -> Result<Self> {
        let netns = Netns::new("app")?;
        Ok(Self {
            datapath: super::decide::subject(Subject::Rps, 0, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES)?,
            cases: netns.run(cases)?,
            _netns: netns,
            // A single value of one thread needs less time.
            seconds: effort.seconds / 2.0,
        })
    }
}

impl Experiment for Record {
    fn plan(&self) -> Plan {
        Plan {
            scenario: "record",
            question: "What does it cost an application that rxsteer notes where it runs?",
            metrics: IndexMap::from([headline("ns_per_call", "Time of one call", "ns", Better::Lower)]),
            cases: self
                .cases
                .iter()
                .map(|(case, _)| CasePlan {
                    case: (*case).to_owned(),
                    modes: MODES.map(str::to_owned).to_vec(),
                })
                .collect(),
            conditions: IndexMap::new(),
            notes: vec![
                "Calls that find nothing to read, but for those that read a datagram, which is sent \
                 over loopback before and counts as part of the call."
                    .to_owned(),
            ],
            seconds_each: self.seconds,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let unseen = self
            .datapath
            .steer_by([Policy::RPS, Policy::RFS][mode])?
            .unwrap_or_default();
        fit!(unseen.is_empty(), "{}", unseen.join("; "));
        let call = &mut self.cases[case].1;
        let seconds = self.seconds;
        let ns = std::thread::scope(|scope| scope.spawn(|| mean_ns(call, seconds)).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(vec![("ns_per_call", ns)])
    }
}

/// Mean ns of a call. On one CPU, since the table is written only when the caller has migrated.
fn mean_ns(call: &mut Call, seconds: f64) -> Result<f64> {
    let mut cpu = CpuSet::new();
    cpu.set(0)?;
    sched_setaffinity(Pid::from_raw(0), &cpu)?;
    let start = Instant::now();
    let mut calls = 0;
    while calls == 0 || start.elapsed().as_secs_f64() < seconds {
        for _ in 0..CALLS {
            call()?;
        }
        calls += CALLS;
    }
    Ok(start.elapsed().as_nanos() as f64 / f64::from(calls))
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

/// Sends a datagram over loopback and receives it; on an unconnected socket with its source
/// address, which the hook for peers needs.
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
