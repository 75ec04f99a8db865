// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets that are not steered as they should be, because others change the device, are reported.

use std::fs;

use crate::helpers::process::*;
use anyhow::Result;
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{End, LinkConfig};
use rxlab::testing::testbed::*;
use rxsteer::datapath::hash::Hash;
use rxsteer::datapath::{Config, Datapath, DeviceConfig, InlinePorts, SoftirqKind, draw_secret};
use rxsteer::host::device::RxMode;
use rxsteer::host::sched::Class;

/// The sentences of the status about the only device, and the status as text.
fn said(running: &Rxsteer) -> Result<(Vec<String>, String)> {
    let unsteered = running.status()?.devices[0].unsteered.clone();
    let text = rxsteer(&running.netns, &["status"])?.stdout;
    Ok((unsteered, String::from_utf8(text)?))
}

/// Lines of the log with these words.
fn nr_lines(ended: &Ended, words: &str) -> usize {
    ended.log.lines().filter(|l| l.contains(words)).count()
}

/// Writes `rps_cpus` of queue 0.
fn kernel_rps(end: &End, mask: &str) -> Result<()> {
    let path = format!("/sys/class/net/{}/queues/rx-0/rps_cpus", end.name);
    end.netns.run(|| Ok(fs::write(&path, mask)?))
}

#[test]
fn kernel_rps_is_reported_while_it_is_on() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let running = Rxsteer::steering(&dut.netns, &[&dut.name])?;
    for _ in 0..2 {
        kernel_rps(dut, "2")?;
        let why = until("it is said", || Ok(said(&running)?.0.pop()))?;
        for part in ["kernel RPS is on", "rx-0/rps_cpus", "echo 0"] {
            assert!(why.contains(part), "{why}");
        }
        let text = said(&running)?.1;
        assert!(text.contains(&format!("warning: {why}")), "{text}");
        // The control.
        kernel_rps(dut, "0")?;
        until("it is said no longer", || {
            Ok(said(&running)?.0.is_empty().then_some(()))
        })?;
        let text = said(&running)?.1;
        assert!(!text.contains("warning"), "{text}");
    }
    let ended = running.stop(Signal::SIGTERM)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(nr_lines(&ended, "kernel RPS is on"), 2, "{ended:?}");
    assert_eq!(nr_lines(&ended, "kernel RPS is off"), 2, "{ended:?}");
    Ok(())
}

#[test]
fn kernel_rps_ends_steering_if_that_is_wanted() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let running = Rxsteer::steering(&dut.netns, &[&dut.name, "--on-kernel-rps=stop"])?;
    kernel_rps(dut, "2")?;
    let ended = running.ended()?;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let why = ended.log.lines().last().unwrap_or_default();
    assert!(why.contains("kernel RPS is on"), "{ended:?}");
    // An orderly stop: the account is in the log.
    account(&ended.log)?;
    assert_eq!(attached(&bed)?, None);
    Ok(())
}

/// A device that can have two queues, and has one.
fn one_of_two_queues() -> Result<Testbed> {
    let bed = Testbed::new(&LinkConfig {
        queues: 2,
        ..LinkConfig::default()
    })?;
    bed.link.tester.ethtool.set_channels(2, 1)?;
    bed.link.dut.ethtool.set_channels(1, 2)?;
    Ok(bed)
}

/// It gets its second queue, as by `ethtool -L`.
fn add_queue(bed: &Testbed) -> Result<()> {
    bed.link.dut.ethtool.set_channels(2, 2)?;
    bed.link.tester.ethtool.set_channels(2, 2)
}

/// Traffic into a queue.
fn traffic(bed: &Testbed, flows: &UdpFlows, queue: u32) -> Result<Generator> {
    let paced = GeneratorConfig::lossless(Frames::Udp(flows.clone()), None).at(20_000);
    Generator::start(&bed.link, queue, &paced)
}

fn nr_queues(running: &Rxsteer) -> Result<usize> {
    Ok(running.status()?.devices[0].queues.len())
}

#[test]
fn new_queues_are_steered() -> Result<()> {
    in_lab!();
    let bed = one_of_two_queues()?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 500);
    let args = roomy(&dut.name, &["--rps-cpus=0", "--policy=off"]);
    let running = Rxsteer::steering(&dut.netns, &args)?;
    // What was changed since the start is kept.
    let set = ["set", &dut.name, "--policy=rps", "--rps-cpus=1"];
    assert!(rxsteer(&dut.netns, &set)?.status.success());
    let sink = bed.receiver_in_order(&flows)?;
    let wire = traffic(&bed, &flows, 0)?;
    redirects(&running)?;
    assert_eq!(nr_queues(&running)?, 1);
    add_queue(&bed)?;
    until("there are two", || {
        Ok((nr_queues(&running)? == 2).then_some(()))
    })?;
    // The change drops what the device's ring holds. This generator waits for its reception, and may have given up.
    let _ = wire.stop();
    until("what the change left is received", || {
        let queued = running.status()?.devices[0].queues[0].sums.queued;
        Ok((queued == 0 && sink.received() > 0).then_some(()))
    })?;
    let report = sink.stop()?;
    assert_eq!((report.reordered, report.dropped), (0, 0), "{report:?}");

    let wire = traffic(&bed, &flows, 0)?;
    redirects(&running)?;
    wire.stop()?;
    let wire = traffic(&bed, &flows, 1)?;
    until("packets of the new queue are redirected", || {
        let device = &running.status()?.devices[0];
        assert_eq!(device.foreign, 0, "{device:?}");
        Ok((device.queues[1].sums.redirected > 0).then_some(()))
    })?;
    wire.stop()?;
    for queue in &running.status()?.devices[0].queues {
        assert!(queue.rps_cpus == "1" || queue.queue == 1, "{queue:?}");
    }
    let ended = running.stop(Signal::SIGTERM)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(nr_lines(&ended, "starting anew"), 1, "{ended:?}");
    Ok(())
}

/// Frames of a queue that is not known to the program of its device.
#[test]
fn foreign_frames_are_counted_by_device() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig {
        queues: 2,
        ..LinkConfig::default()
    })?;
    let dut = &bed.link.dut;
    let config = Config {
        backlog_limit: 100,
        backlog_sched: Class::Nice(0),
        most_backlogs: 1,
        rps_sock_flow_entries: 64,
        rps_flow_cnt: 64,
        unconnected: true,
        follow_nat: false,
        more_devices: false,
        dry_run: false,
        tunnels: 0,
        inline_ports: InlinePorts::default(),
        hash: Hash::Packet,
        flow_limit: 0,
        unguarded: false,
        secret: draw_secret()?,
    };
    let device = |ifindex, nr_rx_queues| DeviceConfig {
        ifindex,
        nr_rx_queues,
        mode: RxMode::Native,
        gro: true,
        kind: SoftirqKind::default(),
    };
    // The device with both queues is another one.
    let mut datapath = Datapath::load(&config, &[device(1, 2), device(dut.ifindex, 1)])?;
    dut.netns.run(|| datapath.attach(1))?;
    let frames = Frames::Udp(UdpFlows::to(dut, 100));
    let send = |queue, count| {
        let paced = GeneratorConfig::lossless(frames.clone(), Some(count)).at(20_000);
        Generator::start(&bed.link, queue, &paced)?.wait()
    };
    let counts = || {
        let received = datapath.rx_queue(2).nr_received;
        [received, datapath.foreign_frames(2)]
    };
    // The control: frames of the known queue are not foreign.
    send(0, 300)?;
    until("all are counted", || {
        Ok((counts() == [300, 0]).then_some(()))
    })?;
    send(1, 200)?;
    until("all are counted", || {
        Ok((counts() == [300, 200]).then_some(()))
    })?;
    assert_eq!(datapath.foreign_frames(0), 0);
    Ok(())
}

#[test]
fn new_queues_that_cannot_be_steered_are_reported() -> Result<()> {
    in_lab!();
    let bed = one_of_two_queues()?;
    let dut = &bed.link.dut;
    let running = Rxsteer::steering(&dut.netns, &roomy(&dut.name, &["--rps-cpus=1"]))?;
    // A new start would be refused.
    kernel_rps(dut, "2")?;
    let reports = |what: &'static str| {
        until(what, || {
            let said = said(&running)?.0;
            Ok(said.into_iter().find(|why| why.contains(what)))
        })
    };
    reports("kernel RPS is on")?;
    add_queue(&bed)?;
    let why = reports("2 receive queues, of which 1")?;
    assert!(why.contains("echo 0"), "{why}");
    assert_eq!(nr_queues(&running)?, 1);
    // The control: without the obstacle all is steered.
    kernel_rps(dut, "0")?;
    until("there are two", || {
        let two = nr_queues(&running)? == 2;
        Ok((two && said(&running)?.0.is_empty()).then_some(()))
    })?;
    let ended = running.stop(Signal::SIGTERM)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(nr_lines(&ended, "of which 1 are steered"), 1, "{ended:?}");
    Ok(())
}
