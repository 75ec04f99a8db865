// SPDX-License-Identifier: MIT OR Apache-2.0
//! `follow`: time until a flow arrives on the CPU to which its application has moved.
//!
//! A thread with a connected UDP socket changes its CPU. It measures the time from its migration
//! until the socket's SO_INCOMING_CPU, the CPU on which the stack processed the last packet, is the
//! new one. Other flows of the same rate go to another socket.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use indexmap::IndexMap;
use nix::errno::Errno;
use nix::unistd::Pid;

use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, detail, fit, headline,
};
use crate::bench::report::document::Better;
use crate::bench::report::document::SUBJECT;
use crate::bench::setup::mode::{Cpus, Mode, Way};
use crate::bench::setup::testbed::Testbed;
use crate::lab::frame::{Frames, UdpFlows};
use crate::lab::generator::GeneratorConfig;
use crate::lab::netns::bind;
use crate::lab::receiver::{Receiver, ReceiverConfig};
use crate::lab::sockets;

/// Packets per second of each flow.
const RATE: u64 = 10_000;

/// The flow that is measured, and others.
const NR_FLOWS: u32 = 8;

/// Minimum stay on a CPU.
const MIN_STAY: Duration = Duration::from_millis(5);

/// Limit on following.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Policies that follow regardless of load: rxsteer's default keeps flows inline while the polling
/// CPU has room.
const MODES: [(&str, Mode); 2] = [("kernel-rfs", Mode::KernelRfs), (SUBJECT, Mode::RxsteerRfs)];

pub struct Follow {
    testbed: Testbed,
    condition: Condition,
    seconds: f64,
}

impl Follow {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let condition = effort.conditions(&[Napi::Thread], &[Gro::On])[0];
        Ok(Self {
            testbed: Testbed::new(condition)?,
            condition,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for Follow {
    fn plan(&self) -> Plan {
        Plan {
            scenario: "follow",
            question: "How long does a flow take to arrive where its application has gone?",
            metrics: IndexMap::from([
                headline(
                    "arrived_us_p50",
                    "From move to arrival, median",
                    "us",
                    Better::Lower,
                ),
                headline(
                    "arrived_us_p99",
                    "From move to arrival, 99th percentile",
                    "us",
                    Better::Lower,
                ),
                detail("moves", "Moves of the application", "1", Better::Neither),
            ]),
            cases: vec![CasePlan {
                case: format!("{RATE} packets/s in each of {NR_FLOWS} flows"),
                modes: MODES.map(|(name, _)| name.to_owned()).to_vec(),
            }],
            conditions: self.testbed.conditions(&[self.condition]),
            notes: vec![
                "rxsteer runs under --policy rfs: by default, flows stay where they are received while \
                 that CPU has room."
                    .to_owned(),
            ],
            seconds_each: self.seconds + 0.15,
        }
    }

    fn measure(&mut self, _: usize, mode: usize) -> Result<Values> {
        let mut times = measure(&self.testbed, MODES[mode].1, self.seconds)?;
        fit!(!times.is_empty(), "the application never moved");
        times.sort_by(f64::total_cmp);
        let quantile = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
        Ok(vec![
            ("arrived_us_p50", quantile(0.5)),
            ("arrived_us_p99", quantile(0.99)),
            ("moves", times.len() as f64),
        ])
    }
}

/// Microseconds from each migration to the flow's arrival.
fn measure(testbed: &Testbed, mode: Mode, seconds: f64) -> Result<Vec<f64>> {
    let cpus: Vec<u32> = testbed.masks().all.iter().collect();
    let dut = &testbed.link.dut;
    let active = testbed.start(Way {
        mode,
        cpus: Cpus::All,
    })?;
    let flows = UdpFlows::to(dut, NR_FLOWS);
    let local = SocketAddr::new(flows.daddr, flows.dport);
    // Unconnected: receives the flows to which the other socket is not connected.
    let receiver = Receiver::start(&dut.netns, &ReceiverConfig::new(local))?;
    let socket = dut
        .netns
        .run(|| connected(local, SocketAddr::new(flows.saddr, flows.sport)))?;
    let config = GeneratorConfig::flood(Frames::Udp(flows)).at(RATE * u64::from(NR_FLOWS));
    let stop = Arc::new(AtomicBool::new(false));
    let seen = stop.clone();
    let generator = testbed.send(&config)?;
    let thread = dut
        .netns
        .spawn(None, "app", move || wander(&socket, &cpus, &seen))?;
    sleep(Duration::from_secs_f64(seconds));
    stop.store(true, Ordering::Relaxed);
    let times = thread.join()?;
    generator.stop()?;
    receiver.stop()?;
    active.stop()?;
    Ok(times)
}

fn connected(local: SocketAddr, peer: SocketAddr) -> Result<UdpSocket> {
    let socket = sockets::reuseport(local)?;
    socket.connect(peer)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    Ok(socket)
}

/// Migrates from CPU to CPU until stopped; returns the time of each arrival, us.
fn wander(socket: &UdpSocket, cpus: &[u32], stop: &AtomicBool) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    let mut buffer = [0; 2048];
    for &cpu in cpus.iter().cycle() {
        let gone = Instant::now();
        bind(Pid::from_raw(0), cpu)?;
        loop {
            socket.recv(&mut buffer).context("no packet comes")?;
            if incoming_cpu(socket)? == cpu {
                break;
            }
            ensure!(
                gone.elapsed() < TIMEOUT,
                "the flow does not follow to CPU {cpu}"
            );
        }
        times.push(gone.elapsed().as_secs_f64() * 1e6);
        while gone.elapsed() < MIN_STAY {
            socket.recv(&mut buffer).context("no packet comes")?;
        }
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    // The first CPU may be the one where the flow already was.
    times.remove(0);
    Ok(times)
}

/// CPU on which the stack processed the socket's last packet.
fn incoming_cpu(socket: &UdpSocket) -> Result<u32> {
    let mut cpu = 0i32;
    let mut len = size_of_val(&cpu) as libc::socklen_t;
    // SAFETY: `cpu` has `len` bytes.
    let ret = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_INCOMING_CPU,
            (&raw mut cpu).cast(),
            &mut len,
        )
    };
    Errno::result(ret).context("SO_INCOMING_CPU")?;
    u32::try_from(cpu).context("no packet has come yet")
}
