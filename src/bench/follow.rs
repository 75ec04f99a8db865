// SPDX-License-Identifier: MIT OR Apache-2.0
//! `follow`: how long a flow takes to arrive where its application has gone.
//!
//! A thread with a connected UDP socket goes from CPU to CPU; each time it measures from its move
//! to the moment when the socket says that the network stack has processed a packet on its new CPU
//! (SO_INCOMING_CPU). Other flows of the same rate go to another socket meanwhile.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::unistd::Pid;

use super::flood::{Bed, INTERRUPT_CPU};
use super::mode::{Active, Mode};
use super::{Effort, Report, Rounds};
use crate::lab::frame::{Frames, UdpFlows};
use crate::lab::netns::bind;
use crate::lab::sink::{Sink, SinkConfig};
use crate::lab::sockets;
use crate::lab::wire::{Wire, WireConfig};

/// Packets per second of each flow.
const RATE: u64 = 10_000;

/// The one that is measured, and others.
const NR_FLOWS: u32 = 8;

/// How long a thread stays before it goes again.
const STAY: Duration = Duration::from_millis(5);

/// A flow that takes longer has not followed.
const PATIENCE: Duration = Duration::from_secs(2);

/// Compares kernel RFS and rxsteer.
///
/// # Errors
/// When a mode can't be had, or no packet comes.
pub fn follow(effort: &Effort<'_>) -> Result<Report> {
    const MODES: [Mode; 2] = [Mode::KernelRfs, Mode::Rxsteer];
    let mut bed = Bed::new()?;
    let total = u64::from(effort.rounds) * MODES.len() as u64;
    let mut rounds = Rounds::default();
    for _ in 0..effort.rounds {
        for mode in MODES {
            (effort.progress)(&mode.to_string(), total);
            let mut times =
                measure(&mut bed, mode, effort.seconds).with_context(|| mode.to_string())?;
            ensure!(!times.is_empty(), "{mode}: the application never moved");
            times.sort_by(f64::total_cmp);
            let quantile = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
            let mode = mode.to_string();
            rounds.add("10k packets/s", &mode, "moves", times.len() as f64);
            rounds.add("10k packets/s", &mode, "arrived_us_p50", quantile(0.5));
            rounds.add("10k packets/s", &mode, "arrived_us_p99", quantile(0.99));
        }
    }
    Ok(rounds.report("follow", effort.rounds))
}

/// Microseconds from each move to the flow's arrival.
fn measure(bed: &mut Bed, mode: Mode, seconds: f64) -> Result<Vec<f64>> {
    let all = bed.masks()[1].1.clone();
    let cpus: Vec<u32> = all.iter().collect();
    let dut = &bed.link.dut;
    let active = Active::start(dut, mode, &all)?;
    bed.nic.bind()?;
    let flows = UdpFlows::to(dut, NR_FLOWS);
    let local = SocketAddr::new(flows.daddr, flows.dport);
    // Unconnected: it gets what the other socket is not connected to.
    let sink = Sink::start(&dut.netns, &SinkConfig::new(local))?;
    let socket = dut
        .netns
        .run(|| connected(local, SocketAddr::new(flows.saddr, flows.sport)))?;
    let config = WireConfig {
        frames: Frames::Udp(flows),
        count: None,
        rate: Some(RATE * u64::from(NR_FLOWS)),
        lossless: false,
        window: None,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let seen = stop.clone();
    let wire = Wire::start(&bed.link, INTERRUPT_CPU, &config)?;
    let thread = dut
        .netns
        .spawn(None, "app", move || wander(&socket, &cpus, &seen))?;
    sleep(Duration::from_secs_f64(seconds));
    stop.store(true, Ordering::Relaxed);
    let times = match thread.join() {
        Ok(times) => times.context("the application did not start")??,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    wire.stop()?;
    sink.stop()?;
    active.stop()?;
    Ok(times)
}

fn connected(local: SocketAddr, peer: SocketAddr) -> Result<UdpSocket> {
    let socket = sockets::reuseport(local)?;
    socket.connect(peer)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(socket)
}

/// From CPU to CPU until told to stop, staying a while on each.
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
                gone.elapsed() < PATIENCE,
                "the flow does not follow to CPU {cpu}"
            );
        }
        times.push(gone.elapsed().as_secs_f64() * 1e6);
        while gone.elapsed() < STAY {
            socket.recv(&mut buffer).context("no packet comes")?;
        }
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    // From where it started, nothing had to move.
    times.remove(0);
    Ok(times)
}

/// The CPU on which the stack processed the socket's latest packet.
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
