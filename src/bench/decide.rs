// SPDX-License-Identifier: MIT OR Apache-2.0
//! `decide`: what one decision costs, against a program that only passes.
//!
//! The XDP program runs over one packet again and again (`BPF_PROG_TEST_RUN`), with tables of its
//! own that are never attached: nothing is redirected in truth, the caches are warm. The kernel
//! reports the mean time of a run in ns.

use std::os::fd::{AsRawFd, BorrowedFd};

use anyhow::{Context, Result};
use etherparse::PacketBuilder;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use super::{Effort, Report, Rounds};
use crate::cli::Tunnel;
use crate::datapath::{
    Config, Datapath, DeviceConfig, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES, draw_secret,
};
use crate::device::XdpMode;
use crate::lab_skel::LabSkelBuilder;
use crate::rps_map::RpsMap;

/// Runs of the program in one measured system call.
const REPEAT: u32 = 200_000;

struct Packet {
    case: &'static str,
    tunnels: u32,
    bytes: Vec<u8>,
}

/// Measures each packet in turn, the empty program and rxsteer interleaved.
///
/// # Errors
/// When the programs can't be loaded or run.
pub fn decide(effort: &Effort<'_>) -> Result<Report> {
    let mut object = std::mem::MaybeUninit::uninit();
    let mut lab = LabSkelBuilder::default().open(&mut object)?;
    lab.progs.empty.set_autoload(true);
    let lab = lab.load()?;
    let empty = std::os::fd::AsFd::as_fd(&lab.progs.empty);
    let packets = packets()?;
    let total = u64::from(effort.rounds) * packets.len() as u64;

    let subjects = packets
        .iter()
        .map(|p| {
            let rps = subject(p.tunnels, false)?;
            let mut rfs = subject(p.tunnels, false)?;
            rfs.follow(true)?;
            let mut unguarded = subject(p.tunnels, true)?;
            unguarded.follow(true)?;
            Ok([rps, rfs, unguarded])
        })
        .collect::<Result<Vec<_>>>()?;
    let mut rounds = Rounds::default();
    for _ in 0..effort.rounds {
        for (packet, subject) in packets.iter().zip(&subjects) {
            (effort.progress)(packet.case, total);
            let [rps, rfs, unguarded] = subject;
            let programs = [empty, rps.program(0), rfs.program(0), unguarded.program(0)];
            let modes = ["none", "rxsteer-rps", "rxsteer", "unguarded"];
            let found = interleaved(programs, packet, effort.seconds)?;
            for (mode, ns) in modes.into_iter().zip(found) {
                rounds.add(packet.case, mode, "ns_per_packet", ns);
            }
        }
    }
    Ok(rounds.report("decide", effort.rounds))
}

/// A data path with one queue whose flows all go to a backlog: the whole way through the program.
/// `unguarded` leaves out the rule of order.
pub(super) fn subject(tunnels: u32, unguarded: bool) -> Result<Datapath> {
    let config = Config {
        // Nothing is ever taken off, so that no limit would do.
        backlog_limit: u32::MAX,
        backlog_nice: 0,
        rps_sock_flow_entries: RPS_SOCK_FLOW_ENTRIES,
        rps_flow_cnt: RPS_FLOW_CNT,
        unconnected: true,
        dry_run: false,
        tunnels,
        rx_hash: false,
        unguarded,
        secret: draw_secret()?,
    };
    let datapath = Datapath::load(
        &config,
        &[DeviceConfig {
            ifindex: 1,
            nr_rx_queues: 1,
            mode: XdpMode::Native,
        }],
    )?;
    // The measuring thread runs on CPU 0, so that CPU 1 is another; on a host with a single CPU
    // the kernel makes no backlog for it, and that is an error.
    datapath.backlogs().make(0, 1)?;
    datapath.set_rps_map(0, &RpsMap::inline().spread_over(&[1]))?;
    datapath.settle(0)?;
    Ok(datapath)
}

/// Mean ns per run of each program, in turns until `seconds` have passed.
fn interleaved<const N: usize>(
    programs: [BorrowedFd<'_>; N],
    packet: &Packet,
    seconds: f64,
) -> Result<[f64; N]> {
    let mut sums = [0.0; N];
    let mut turns = 0.0;
    let start = std::time::Instant::now();
    while turns == 0.0 || start.elapsed().as_secs_f64() < seconds {
        for (sum, program) in sums.iter_mut().zip(programs) {
            *sum += f64::from(test_run(program, &packet.bytes)?);
        }
        turns += 1.0;
    }
    Ok(sums.map(|sum| sum / turns))
}

fn test_run(program: BorrowedFd<'_>, packet: &[u8]) -> Result<u32> {
    let mut opts = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: packet.as_ptr().cast(),
        data_size_in: packet.len() as u32,
        repeat: REPEAT as i32,
        ..Default::default()
    };
    // SAFETY: the packet and the options live through the call.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut opts) };
    if result < 0 {
        return Err(std::io::Error::from_raw_os_error(-result)).context("running the program");
    }
    Ok(opts.duration)
}

/// Plain packets and one tunnel, as small as they come: the payload is never read.
fn packets() -> Result<Vec<Packet>> {
    const MACS: ([u8; 6], [u8; 6]) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    const V4: ([u8; 4], [u8; 4]) = ([192, 0, 2, 1], [192, 0, 2, 2]);
    const V6: ([u8; 16], [u8; 16]) = ([0x20; 16], [0x21; 16]);
    let ethernet = || PacketBuilder::ethernet2(MACS.0, MACS.1);
    let ipv4 = || ethernet().ipv4(V4.0, V4.1, 64);
    let vlan = || ethernet().single_vlan(etherparse::VlanId::try_new(7).expect("below 4096"));

    let mut inner = Vec::new();
    ipv4().tcp(40_000, 443, 1, 1024).write(&mut inner, &[])?;
    let mut vxlan = vec![8, 0, 0, 0, 0, 0, 42, 0];
    vxlan.extend(&inner);

    let mut packets = Vec::new();
    let mut add = |case, tunnels, write: &dyn Fn(&mut Vec<u8>) -> Result<(), _>| {
        let mut bytes = Vec::new();
        let written: Result<(), etherparse::err::packet::BuildWriteError> = write(&mut bytes);
        packets.push(Packet {
            case,
            tunnels,
            bytes,
        });
        written
    };
    add("tcp4", 0, &|b| {
        ipv4().tcp(40_000, 443, 1, 1024).write(b, &[])
    })?;
    add("udp4", 0, &|b| ipv4().udp(40_000, 443).write(b, &[0; 18]))?;
    add("tcp6", 0, &|b| {
        ethernet()
            .ipv6(V6.0, V6.1, 64)
            .tcp(40_000, 443, 1, 1024)
            .write(b, &[])
    })?;
    add("vlan-tcp4", 0, &|b| {
        vlan()
            .ipv4(V4.0, V4.1, 64)
            .tcp(40_000, 443, 1, 1024)
            .write(b, &[])
    })?;
    add("vxlan-tcp4", Tunnel::Vxlan.bits(), &|b| {
        ipv4().udp(40_000, 4789).write(b, &vxlan)
    })?;
    Ok(packets)
}
