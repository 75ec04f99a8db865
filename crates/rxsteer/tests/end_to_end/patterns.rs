// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices that match a pattern: they come and go, get other names, and are many.

use std::time::{Duration, Instant};

use crate::helpers::process::{Rxsteer, accounts, rxsteer};
use crate::helpers::transfer::transfer;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::lab::netns::Netns;
use rxlab::lab::rtnl;
use rxlab::testing::short_or_long;
use rxlab::testing::testbed::{POLLING_CPU, Testbed, received_in_order, until};
use rxsteer::api::status::{Device, Status};

/// The lab's devices in the tested namespace.
const PATTERN: &str = "nic*";

struct World {
    tester: Netns,
    dut: Netns,
    running: Rxsteer,
}

impl World {
    fn new() -> Result<Self> {
        let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
        let args = [
            PATTERN,
            "--rps-cpus=1",
            "--policy=rps",
            "--mode=auto",
            // With 4096, two of 20 flows have one slot in one run of 20.
            "--rps-flow-cnt=524288",
        ];
        let running = Rxsteer::steering(&dut, &args)?;
        Ok(Self {
            tester,
            dut,
            running,
        })
    }

    fn link(&self, id: u8) -> Result<Testbed> {
        let config = LinkConfig {
            id,
            ..LinkConfig::default()
        };
        Testbed::between(&self.tester, &self.dut, &config)
    }

    fn status(&self) -> Result<Status> {
        self.running.status()
    }

    fn device(&self, name: &str) -> Result<Option<Device>> {
        let devices = self.status()?.devices;
        Ok(devices.into_iter().find(|d| d.device == name))
    }

    fn is_steered(&self, bed: &Testbed) -> Result<()> {
        let dut = &bed.link.dut;
        until("it is steered", || {
            let device = self.device(&dut.name)?;
            let new = device.is_some_and(|d| d.ifindex == dut.ifindex && d.mode == "softirq");
            Ok(new.then_some(()))
        })
    }

    fn more_redirected(&self, before: u64, more: u64) -> Result<()> {
        until("packets are redirected", || {
            Ok((self.running.sums()?.redirected > before + more).then_some(()))
        })
    }

    /// Packets of the device are redirected, and arrive in order.
    fn steers(&self, bed: &Testbed) -> Result<()> {
        let before = self.running.sums()?.redirected;
        let flows = UdpFlows::to(&bed.link.dut, 100);
        let sink = bed.receiver_in_order(&flows)?;
        let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(20_000);
        let wire = Generator::start(&bed.link, POLLING_CPU, &paced)?;
        self.more_redirected(before, 1_000)?;
        received_in_order(sink, wire.stop()?.sent)?;
        let status = self.status()?;
        for queue in status.devices.iter().flat_map(|d| &d.queues) {
            ensure!(queue.imbalance().is_none(), "{:?}", queue.imbalance());
        }
        Ok(())
    }
}

#[test]
fn devices_come_and_go() -> Result<()> {
    in_lab!();
    let world = World::new()?;
    assert!(world.status()?.devices.is_empty());
    let text = String::from_utf8(rxsteer(&world.dut, &["status"])?.stdout)?;
    let line = format!("devices that match {PATTERN} are steered when they come");
    assert!(text.contains(&line), "{text}");
    let mut beds = Vec::new();
    for id in 0..3 {
        let bed = world.link(id)?;
        world.is_steered(&bed)?;
        world.steers(&bed)?;
        beds.push(bed);
    }
    // The first one has the account of all.
    let [first, second] = [0, 1].map(|i| world.device(&beds[i].link.dut.name));
    let (first, second) = (first?.context("steered")?, second?.context("steered")?);
    assert_eq!(second.queues_of.as_ref(), Some(&first.device));
    assert!(second.queues.is_empty() && !first.queues.is_empty());
    let text = String::from_utf8(rxsteer(&world.dut, &["status"])?.stdout)?;
    let names: Vec<_> = beds[1..].iter().map(|bed| &bed.link.dut.name[..]).collect();
    let line = format!("with the packets of {}", names.join(", "));
    assert!(text.contains(&line), "{text}");

    beds[0].link.delete()?;
    until("it is gone", || {
        Ok(world.device(&first.device)?.is_none().then_some(()))
    })?;
    // Its account stays, with the next one.
    let second = world.device(&second.device)?.context("steered")?;
    assert!(second.queues.iter().map(|q| q.received).sum::<u64>() > 3_000);
    world.steers(&beds[1])?;
    let ended = world.running.stop(Signal::SIGTERM)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.log.contains("starting anew"), "{ended:?}");
    assert!(ended.log.contains("no device matches "), "{ended:?}");
    assert!(!accounts(&ended.log)?.is_empty(), "{ended:?}");
    Ok(())
}

#[test]
fn devices_are_renamed() -> Result<()> {
    in_lab!();
    let world = World::new()?;
    let bed = world.link(0)?;
    world.is_steered(&bed)?;
    let rename = |from: &str, to: &str| world.dut.run(|| rtnl::rename(from, to));
    let name = bed.link.dut.name.clone();
    rename(&name, "nic-other")?;
    until("it has its new name", || {
        let new = world.device("nic-other")?;
        Ok(new.filter(|d| d.ifindex == bed.link.dut.ifindex).map(drop))
    })?;
    assert!(world.device(&name)?.is_none());
    let before = world.running.sums()?.redirected;
    transfer(&world.tester, &world.dut, bed.link.dut.ipv4)?;
    world.more_redirected(before, 0)?;
    // The control: a name that does not match.
    rename("nic-other", "lan0")?;
    until("it is not steered", || {
        Ok(world.status()?.devices.is_empty().then_some(()))
    })?;
    rename("lan0", &name)?;
    world.is_steered(&bed)?;
    world.steers(&bed)
}

/// Flows of different devices with one hash: each device has its own slot for it.
#[test]
fn a_flow_through_two_devices_has_two_slots() -> Result<()> {
    in_lab!();
    let world = World::new()?;
    let beds = [world.link(0)?, world.link(1)?];
    for bed in &beds {
        world.is_steered(bed)?;
        // One address, so that both have the same flows.
        let flows = UdpFlows::to(&beds[0].link.dut, 10);
        let paced = GeneratorConfig::lossless(Frames::Udp(flows), Some(1_000)).at(20_000);
        Generator::start(&bed.link, POLLING_CPU, &paced)?.wait()?;
    }
    until("all were received", || {
        Ok((world.running.received()? >= 2_000).then_some(()))
    })?;
    let flows = rxsteer(&world.dut, &["flows", "--limit", "100"])?;
    let flows = String::from_utf8(flows.stdout)?;
    for bed in &beds {
        let name = &bed.link.dut.name;
        let lines = flows.lines().filter(|line| line.contains(name)).count();
        assert_eq!(lines, 10, "{name}: {flows}");
    }
    Ok(())
}

#[test]
fn many_devices_are_steered() -> Result<()> {
    in_lab!();
    let devices = short_or_long(50, 500);
    let world = World::new()?;
    let start = Instant::now();
    world.dut.run(|| rtnl::veths("nic", devices))?;
    let created = start.elapsed();
    until("all are steered", || {
        let steered = world.status()?.devices;
        let steered = steered.iter().filter(|d| d.mode == "softirq").count();
        Ok((steered == devices as usize).then_some(()))
    })?;
    println!(
        "{devices} devices: created in {created:?}, steered after {:?}",
        start.elapsed()
    );
    let bed = world.link(0)?;
    let start = Instant::now();
    world.is_steered(&bed)?;
    println!("one more: steered after {:?}", start.elapsed());
    world.steers(&bed)?;
    let start = Instant::now();
    let ended = world.running.stop(Signal::SIGTERM)?;
    println!("stopped after {:?}", start.elapsed());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ensure!(start.elapsed() < Duration::from_secs(60), "{ended:?}");
    Ok(())
}

#[test]
fn a_pattern_is_for_softirq_mode() -> Result<()> {
    in_lab!();
    let dut = Netns::new("dut")?;
    let ended = Rxsteer::start(&dut, &[PATTERN, "--mode=native"])?;
    let ended = ended.err().context("it starts")?;
    assert!(ended.log.contains("steered in softirq mode"), "{ended:?}");
    Ok(())
}
