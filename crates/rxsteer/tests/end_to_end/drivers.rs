// SPDX-License-Identifier: MIT OR Apache-2.0
//! Drivers of real and emulated network cards, in a virtual machine that has two such devices
//! (`make guest NIC=e1000e TEST=drivers`).

use std::io::Write;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::helpers::process::{RXSTEER, Rxsteer, rxsteer};
use crate::helpers::transfer::{datagrams, many_flows, transfer};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use nix::sys::socket::sockopt::ReceiveTimestampns;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, setsockopt};
use rxlab::lab::ports::Pair;
use rxlab::testing::not_run;
use rxlab::testing::testbed::until;
use rxlab::{in_lab, test_name};
use rxsteer::api::status::Terms;
use rxsteer::host::device::Device;

/// Both modes, with all packets to the other CPU.
const MODES: [&str; 2] = ["--mode=native", "--mode=softirq"];
const MOVED: [&str; 2] = ["--policy=rps", "--rps-cpus=1"];

/// The two devices; without them the test is not run.
macro_rules! devices {
    () => {
        match Pair::new() {
            Ok(pair) => pair,
            Err(error) => {
                not_run(test_name!(), &format!("{error:#}"));
                return Ok(());
            }
        }
    };
}

/// What a guest shows of a test that passes: written, since what is printed is then left out.
fn note(pair: &Pair, text: &str) {
    for line in text.lines() {
        let _ = writeln!(std::io::stderr(), "note: {}: {line}", pair.dut.driver);
    }
}

fn traffic(pair: &Pair) -> Result<()> {
    let (tester, dut) = (&pair.tester.netns, &pair.dut.netns);
    transfer(tester, dut, pair.dut.ipv4).context("TCP")?;
    datagrams(tester, dut, pair.dut.ipv4.into()).context("UDP")
}

/// Whether it arrives without steering; else the test is not run.
fn arrives_unsteered(pair: &Pair, test: &str) -> bool {
    let arrived = traffic(pair);
    if let Err(error) = &arrived {
        not_run(
            test,
            &format!("nothing arrives without steering either: {error:#}"),
        );
    }
    arrived.is_ok()
}

/// Starts rxsteer with these arguments alone, or returns why it refuses.
fn try_start(pair: &Pair, args: &[&str]) -> Result<Result<Rxsteer, String>> {
    let mut command = pair.dut.netns.command(RXSTEER)?;
    command.arg("run").arg(&pair.dut.name).args(args);
    let started = Rxsteer::spawn(&pair.dut.netns, command, true)?;
    Ok(started.map_err(|ended| ended.log))
}

/// As [`try_start`]; without options it must start.
fn start(pair: &Pair, args: &[&str]) -> Result<Rxsteer> {
    try_start(pair, args)?.map_err(|log| anyhow::anyhow!("{log}"))
}

/// Starts it in a mode with all packets to the other CPU. Offloads that native mode does without are turned off
/// meanwhile; other reasons to refuse it are named.
fn moved(pair: &Pair, mode: &str) -> Result<Option<Rxsteer>> {
    let prepare: &[_] = if mode == MODES[0] {
        &["--prepare"]
    } else {
        &[]
    };
    match try_start(pair, &[&[mode][..], prepare, &MOVED].concat())? {
        Ok(running) => Ok(Some(running)),
        Err(log) => {
            ensure!(mode == "--mode=native", "{log}");
            ensure!(
                log.contains("`") || log.contains("--mode"),
                "no remedy: {log}"
            );
            note(pair, &format!("{mode} is refused: {}", log.trim()));
            has_nothing_left(pair)?;
            Ok(None)
        }
    }
}

/// Runs `body` in each mode that the device has, up to an orderly end.
fn in_both_modes(pair: &Pair, body: impl Fn(&Rxsteer) -> Result<()>) -> Result<()> {
    for mode in MODES {
        if let Some(running) = moved(pair, mode)? {
            body(&running).context(mode)?;
            ends_in_order(running)?;
        }
    }
    Ok(())
}

fn ends_in_order(running: Rxsteer) -> Result<()> {
    let ended = running.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(!ended.log.contains("overtake"), "{ended:?}");
    Ok(())
}

/// The device has no program and is up.
fn has_nothing_left(pair: &Pair) -> Result<()> {
    let device = pair.dut.netns.run(|| Device::open(&pair.dut.name))?;
    ensure!(device.xdp.is_none() && device.up, "{device:?}");
    Ok(())
}

/// Fails unless at least so many packets were redirected, all of which were delivered.
fn are_delivered(sums: &Terms, at_least: u64) -> Result<()> {
    ensure!(sums.redirected >= at_least, "{sums:?}");
    ensure!(sums.delivered == sums.redirected, "{sums:?}");
    Ok(())
}

#[test]
fn a_device_needs_no_options() -> Result<()> {
    in_lab!();
    let pair = devices!();
    let doctor = rxsteer(&pair.dut.netns, &["doctor", &pair.dut.name])?;
    note(&pair, &String::from_utf8(doctor.stdout)?);
    let running = start(&pair, &[])?;
    let mode = running.status()?.devices.remove(0).mode;
    note(&pair, &format!("without options: {mode} mode"));
    // The control: before the traffic there is nothing.
    ensure!(are_delivered(&running.sums()?, 1).is_err());
    traffic(&pair)?;
    let (sums, received) = (running.at_rest()?, running.received()?);
    ensure!(received > 20_000, "{received}, {sums:?}");
    ensure!(sums.delivered == sums.redirected, "{sums:?}");
    ends_in_order(running)?;
    has_nothing_left(&pair)?;
    traffic(&pair)
}

#[test]
fn packets_move_in_both_modes() -> Result<()> {
    in_lab!();
    let pair = devices!();
    in_both_modes(&pair, |running| {
        traffic(&pair)?;
        are_delivered(&running.at_rest()?, 1_000)
    })?;
    traffic(&pair)
}

#[test]
fn a_vlan_arrives_with_its_tag() -> Result<()> {
    in_lab!();
    let pair = devices!();
    let vlan = pair.vlan(7)?;
    if !arrives_unsteered(&vlan, test_name!()) {
        return Ok(());
    }
    in_both_modes(&pair, |running| {
        traffic(&vlan)?;
        are_delivered(&running.at_rest()?, 1_000)
    })
}

#[test]
fn jumbo_frames_arrive() -> Result<()> {
    in_lab!();
    let pair = devices!();
    if let Err(refused) = pair.set_mtu(9000) {
        not_run(test_name!(), &format!("{refused:#}"));
        return Ok(());
    }
    if !arrives_unsteered(&pair, test_name!()) {
        return pair.set_mtu(1500);
    }
    in_both_modes(&pair, |running| {
        traffic(&pair)?;
        are_delivered(&running.at_rest()?, 100)
    })?;
    pair.set_mtu(1500)
}

/// A datagram has the kernel's time stamp of its arrival, which is before it was read.
#[test]
fn datagrams_have_time_stamps() -> Result<()> {
    in_lab!();
    let pair = devices!();
    in_both_modes(&pair, |_| {
        let sink = pair
            .dut
            .netns
            .run(|| Ok(UdpSocket::bind((pair.dut.ipv4, 0))?))?;
        setsockopt(&sink, ReceiveTimestampns, &true)?;
        sink.set_read_timeout(Some(Duration::from_secs(10)))?;
        let to = sink.local_addr()?;
        let sender = pair
            .tester
            .netns
            .run(|| Ok(UdpSocket::bind((pair.tester.ipv4, 0))?))?;
        sender.send_to(b"now", to)?;
        let mut buffer = nix::cmsg_space!(nix::sys::time::TimeSpec);
        let mut datagram = [0; 3];
        let mut parts = [std::io::IoSliceMut::new(&mut datagram)];
        let fd = std::os::fd::AsRawFd::as_raw_fd(&sink.as_fd());
        let message = recvmsg::<SockaddrIn>(fd, &mut parts, Some(&mut buffer), MsgFlags::empty())?;
        let stamped = message
            .cmsgs()?
            .any(|m| matches!(m, ControlMessageOwned::ScmTimestampns(_)));
        ensure!(stamped, "no time stamp");
        Ok(())
    })
}

/// Runs `change` again and again while a connection is busy, twice at least; returns how often it was done.
fn while_it_passes(pair: &Pair, change: impl Fn(u32) -> Result<()> + Sync) -> Result<u32> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changes = scope.spawn(|| {
            let mut done = 0;
            while !over.load(Ordering::Relaxed) || done < 2 {
                change(done)?;
                done += 1;
                // Drivers restart the device for it.
                until("the link is up again", || {
                    let has_carrier = pair.dut.netns.run(|| {
                        let path = format!("/sys/class/net/{}/carrier", pair.dut.name);
                        Ok(std::fs::read_to_string(path)?.trim() == "1")
                    });
                    Ok(has_carrier?.then_some(()))
                })?;
                std::thread::sleep(Duration::from_millis(500));
            }
            anyhow::Ok(done)
        });
        let passed = transfer(&pair.tester.netns, &pair.dut.netns, pair.dut.ipv4);
        over.store(true, Ordering::Relaxed);
        let done = changes.join().expect("it does not panic");
        passed?;
        done
    })
}

#[test]
fn rings_change_under_load() -> Result<()> {
    in_lab!();
    let pair = devices!();
    let ethtool = pair.dut.ethtool()?;
    let before = match ethtool.set_ring(256) {
        Ok(before) => before,
        Err(refused) => {
            not_run(test_name!(), &format!("{refused:#}"));
            return Ok(());
        }
    };
    in_both_modes(&pair, |running| {
        let sizes = [128, 256];
        let change = |n: u32| ethtool.set_ring(sizes[n as usize % 2]).map(drop);
        let done = while_it_passes(&pair, change)?;
        ensure!(done >= 2, "{done}");
        running.at_rest()?;
        traffic(&pair)?;
        Ok(())
    })?;
    ethtool.set_ring(before).map(drop)
}

#[test]
fn queues_change_under_load() -> Result<()> {
    in_lab!();
    let pair = devices!();
    let ethtool = pair.dut.ethtool()?;
    if let Err(refused) = ethtool
        .set_combined(2)
        .and_then(|()| ethtool.set_combined(1))
    {
        not_run(test_name!(), &format!("{refused:#}"));
        return Ok(());
    }
    in_both_modes(&pair, |running| {
        let mut refused = None;
        let change = |n: u32| ethtool.set_combined(1 + n % 2);
        match while_it_passes(&pair, change) {
            Ok(done) => ensure!(done >= 2, "{done}"),
            // A driver may need the queues for its program.
            Err(error) => refused = Some(format!("{error:#}")),
        }
        refused.iter().for_each(|why| note(&pair, why));
        running.at_rest()?;
        traffic(&pair)?;
        Ok(())
    })
}

/// The device's own hash is taken, or refused with the reason.
#[test]
fn the_devices_hash_is_taken_or_refused() -> Result<()> {
    in_lab!();
    let pair = devices!();
    for mode in MODES {
        match try_start(&pair, &[&[mode, "--hash=device"][..], &MOVED].concat())? {
            Ok(running) => {
                traffic(&pair).context(mode)?;
                are_delivered(&running.at_rest()?, 1_000).context(mode)?;
                note(&pair, &format!("{mode} --hash=device: taken"));
                ends_in_order(running)?;
            }
            Err(log) => {
                ensure!(log.contains('`'), "no remedy: {log}");
                note(
                    &pair,
                    &format!("{mode} --hash=device is refused: {}", log.trim()),
                );
                has_nothing_left(&pair)?;
            }
        }
    }
    Ok(())
}

#[test]
fn flows_keep_their_order_while_the_mask_changes() -> Result<()> {
    in_lab!();
    let pair = devices!();
    in_both_modes(&pair, |running| {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let changes = scope.spawn(|| {
                let mut nr = 0;
                while !over.load(Ordering::Relaxed) {
                    let cpus = format!("--rps-cpus={}", ["0-1", "1", "0"][nr % 3]);
                    let done = rxsteer(&pair.dut.netns, &["set", &pair.dut.name, &cpus])?;
                    ensure!(done.status.success(), "{done:?}");
                    nr += 1;
                }
                Ok(nr)
            });
            let arrived = many_flows(&pair.tester.netns, &pair.dut.netns, pair.dut.ipv4.into());
            over.store(true, Ordering::Relaxed);
            let changes = changes.join().expect("it does not panic")?;
            ensure!(changes > 0);
            arrived.with_context(|| format!("{changes} changes"))
        })?;
        running.at_rest()?;
        Ok(())
    })
}

#[test]
fn it_may_be_killed() -> Result<()> {
    in_lab!();
    let pair = devices!();
    let settings = || {
        let asked = pair
            .dut
            .netns
            .run(|| Device::open(&pair.dut.name))?
            .kernel_rps;
        anyhow::Ok((pair.dut.ethtool()?.features()?, asked))
    };
    let before = settings()?;
    for mode in MODES {
        let Some(running) = moved(&pair, mode)? else {
            continue;
        };
        traffic(&pair).context(mode)?;
        if mode == MODES[1] {
            // The control: rps_flow_cnt at least, and receive-hashing where the driver has it.
            ensure!(settings()? != before, "{before:?}");
        }
        ensure!(running.stop(Signal::SIGKILL)?.code.is_none());
        until("the program is gone", || Ok(has_nothing_left(&pair).ok()))?;
        until("all settings are as before", || {
            Ok((settings()? == before).then_some(()))
        })?;
        traffic(&pair).context(mode)?;
    }
    Ok(())
}
