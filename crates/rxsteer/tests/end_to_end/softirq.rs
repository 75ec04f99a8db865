// SPDX-License-Identifier: MIT OR Apache-2.0
//! Softirq mode: devices as they are, real sockets at both ends, and nothing left behind.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::mpsc;
use std::time::Duration;

use crate::helpers::process::Rxsteer;
use crate::helpers::transfer::transfer;
use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{End, Link, LinkConfig};
use rxlab::lab::netns::{Netns, Thread, bind};
use rxlab::lab::resident::Resident;
use rxlab::lab::tun::Tunnel;
use rxlab::testing::not_run;
use rxlab::testing::testbed::{POLLING_CPU, Testbed, until};
use rxlab::{in_lab, test_name};
use rxsteer::host::device::Device;
use rxsteer::host::{kernel, softnet};

/// A plain veth pair: no XDP, no GRO, checksums left out by the sender.
fn plain() -> Result<Link> {
    let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
    let config = LinkConfig {
        gro: false,
        ..LinkConfig::default()
    };
    Link::new(&tester, &dut, &config)
}

/// Whether a program can take the sockets' hash from packets where they are sent, in another namespace.
fn other_end_is_reached(test: &str) -> bool {
    let reached = kernel::version() >= [6, 6, 0];
    if !reached {
        not_run(
            test,
            "before Linux 6.6 nothing is attached to the other end of a veth",
        );
    }
    reached
}

/// The files by which the kernel asks for a CPU.
fn asked(dut: &End) -> Result<Vec<String>> {
    let device = dut.netns.run(|| Device::open(&dut.name))?;
    Ok(device.kernel_rps)
}

fn steer(dut: &End, device: &str, args: &[&str]) -> Result<Rxsteer> {
    let args: Vec<&str> = [&[device, "--rps-cpus=0-1"], args].concat();
    Rxsteer::steering(&dut.netns, &args)
}

#[test]
fn a_plain_veth_needs_no_preparation() -> Result<()> {
    in_lab!();
    if !other_end_is_reached(test_name!()) {
        return Ok(());
    }
    let link = plain()?;
    // By which the sending end is found.
    let _sender = Resident::start(&link.tester.netns)?;
    let dut = &link.dut;
    let rxsteer = steer(dut, &dut.name, &["--mode=softirq"])?;
    transfer(&link.tester.netns, &dut.netns, dut.ipv4)?;
    let sums = rxsteer.at_rest()?;
    ensure!(sums.redirected > 0 && sums.lost == 0, "{sums:?}");
    ensure!(sums.delivered == sums.redirected, "{sums:?}");
    // The first frame of each backlog is measured.
    for queue in &rxsteer.status()?.devices[0].queues {
        for backlog in queue.backlogs.iter().filter(|b| b.terms.redirected > 0) {
            let most = backlog.terms.redirected.div_ceil(64);
            ensure!((1..=most).contains(&backlog.waits.samples()), "{backlog:?}");
        }
    }
    ensure!(rxsteer.stop(Signal::SIGTERM)?.code == Some(0));
    ensure!(asked(dut)?.is_empty(), "the kernel still asks");
    transfer(&link.tester.netns, &dut.netns, dut.ipv4)
}

#[test]
fn nothing_stays_after_a_kill() -> Result<()> {
    in_lab!();
    let link = plain()?;
    let dut = &link.dut;
    let rxsteer = steer(dut, &dut.name, &["--mode=softirq"])?;
    // The control: there is something to leave behind.
    ensure!(asked(dut)? == ["rx-0/rps_flow_cnt"]);
    rxsteer.stop(Signal::SIGKILL)?;
    until("the kernel asks no more", || {
        Ok(asked(dut)?.is_empty().then_some(()))
    })?;
    transfer(&link.tester.netns, &dut.netns, dut.ipv4)?;
    // The place is free.
    let again = steer(dut, &dut.name, &["--mode=softirq"])?;
    ensure!(again.stop(Signal::SIGTERM)?.code == Some(0));
    Ok(())
}

/// Sends a datagram each millisecond to a device that is not steered, whose polls are then the only
/// ones on [`POLLING_CPU`]. Returns when this sender is dropped.
fn other_traffic(link: &Link) -> Result<(mpsc::Sender<()>, Thread<Result<()>>)> {
    let (goes_on, is_over) = mpsc::channel();
    let at = (link.dut.ipv4, 9);
    let thread = link
        .tester
        .netns
        .spawn(Some(POLLING_CPU), "others", move || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            let pause = Duration::from_millis(1);
            while is_over.recv_timeout(pause) == Err(mpsc::RecvTimeoutError::Timeout) {
                socket.send_to(b"others", at)?;
            }
            anyhow::Ok(())
        })?;
    Ok((goes_on, thread))
}

/// Packets with and without an Ethernet header, which a process writes: they are received outside of
/// polls, so flows leave INLINE after a poll of another device.
#[test]
fn tun_and_tap_devices_are_steered() -> Result<()> {
    in_lab!();
    let link = plain()?;
    let (tester, dut) = (&link.tester.netns, &link.dut);
    let (goes_on, others) = other_traffic(&link)?;
    for kind in [libc::IFF_TUN, libc::IFF_TAP] {
        let tunnel = Tunnel::new(tester, &dut.netns, kind, POLLING_CPU)?;
        let rxsteer = steer(dut, &tunnel.name, &["--mode=auto"])?;
        ensure!(rxsteer.status()?.devices[0].mode == "softirq");
        transfer(tester, &dut.netns, tunnel.ipv4)?;
        let sums = rxsteer.at_rest()?;
        ensure!(sums.redirected > 0 && sums.lost == 0, "{sums:?}");
        ensure!(sums.delivered == sums.redirected, "{sums:?}");
        ensure!(rxsteer.stop(Signal::SIGTERM)?.code == Some(0));
    }
    drop(goes_on);
    others.join()
}

/// Waits until the CPU's softnet backlog is empty. A sender that leaves the CPU earlier overtakes its own
/// packets on the way to the device, where nothing can be steered yet.
fn backlog_is_empty(cpu: u32) -> Result<()> {
    until("an empty backlog", || {
        let softnet = softnet::read()?;
        let waits = softnet.iter().any(|s| s.cpu == cpu && s.waiting > 0);
        Ok((!waits).then_some(()))
    })
}

/// A sender that changes its CPU: its packets arrive on both.
#[test]
fn packets_from_both_cpus_stay_in_order() -> Result<()> {
    in_lab!();
    if !other_end_is_reached(test_name!()) {
        return Ok(());
    }
    const DATAGRAMS: u32 = 100_000;
    let link = plain()?;
    // By which the sending end is found.
    let _sender = Resident::start(&link.tester.netns)?;
    let dut = &link.dut;
    let rxsteer = steer(dut, &dut.name, &["--mode=softirq"])?;
    let socket = dut.netns.run(|| Ok(UdpSocket::bind((dut.ipv4, 0))?))?;
    let at: SocketAddr = socket.local_addr()?;
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    let reader = dut.netns.spawn(None, "reader", move || {
        let (mut last, mut count, mut overtaken, mut cpu) = (0, 0u32, 0u32, 0);
        let mut bytes = [0; 4];
        while last + 1 < DATAGRAMS {
            // Datagrams may be lost at the socket, the last ones too.
            if socket.recv_from(&mut bytes).is_err() {
                break;
            }
            let number = u32::from_be_bytes(bytes);
            overtaken += u32::from(number < last);
            last = last.max(number);
            count += 1;
            if count.is_multiple_of(500) {
                cpu ^= 1;
                bind(Pid::from_raw(0), cpu)?;
            }
        }
        anyhow::Ok((count, overtaken))
    })?;
    let sender = link.tester.netns.spawn(None, "sender", move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(at)?;
        for number in 0..DATAGRAMS {
            if number.is_multiple_of(64) {
                let cpu = number / 64 % 2;
                backlog_is_empty(1 - cpu)?;
                bind(Pid::from_raw(0), cpu)?;
            }
            socket.send(&number.to_be_bytes())?;
        }
        anyhow::Ok(())
    })?;
    sender.join()?;
    let (count, overtaken) = reader.join()?;
    let status = rxsteer.status()?;
    let arrived = status.devices[0]
        .queues
        .iter()
        .filter(|q| q.received > 1000);
    ensure!(
        arrived.count() == 2,
        "packets arrived on one CPU: {status:?}"
    );
    let moves: u64 = status.devices[0].queues.iter().map(|q| q.moves).sum();
    ensure!(
        count > DATAGRAMS / 10 && moves > 0,
        "{count} arrived, {moves} moves"
    );
    ensure!(overtaken == 0, "{overtaken} of {count} overtaken");
    rxsteer.at_rest()?;
    Ok(())
}

/// Whoever changes the size of the kernel's table takes away its entries: packets come where they are received,
/// behind others that wait. They are dropped there, or all have been passed up, and the entries are written
/// again.
#[test]
fn the_kernels_table_is_filled_again() -> Result<()> {
    in_lab!(alone: "it changes the host's rps_sock_flow_entries");
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 20);
    let args = [
        &dut.name[..],
        "--mode=softirq",
        "--policy=rps",
        "--rps-cpus=1",
    ];
    let running = Rxsteer::steering(&dut.netns, &args)?;
    let sink = bed.receiver_in_order(&flows)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(50_000);
    let wire = Generator::start(&bed.link, POLLING_CPU, &paced)?;
    let redirected = || anyhow::Ok(running.sums()?.redirected);
    let goes_on = || {
        let before = redirected()?;
        until("packets are redirected", || {
            Ok((redirected()? > before + 1_000).then_some(()))
        })
    };
    goes_on()?;
    for _ in 0..5 {
        fs::write("/proc/sys/net/core/rps_sock_flow_entries", "0")?;
        until("the table is there again", || {
            let entries = fs::read_to_string("/proc/sys/net/core/rps_sock_flow_entries")?;
            Ok((entries.trim() != "0").then_some(()))
        })?;
        goes_on()?;
    }
    let sent = wire.stop()?;
    let sums = running.at_rest()?;
    let report = sink.stop()?;
    ensure!(report.reordered == 0, "{report:?}, {sums:?}");
    let lost = sums.lost + sums.vanished + sums.shed + sums.dropped;
    ensure!(
        report.received.iter().sum::<u64>() + lost >= sent.sent - sent.lost,
        "{sums:?}"
    );
    Ok(())
}
