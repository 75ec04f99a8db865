// SPDX-License-Identifier: MIT OR Apache-2.0
//! A bond, steered on its ports, also on one that is added later, and no longer on one that leaves.

use crate::helpers::process::*;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::bond::{add_port, bond, remove_port};
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::testing::not_run;
use rxlab::testing::testbed::*;

const BOND: &str = "bond7";

fn config(id: u8) -> LinkConfig {
    LinkConfig {
        id,
        ..LinkConfig::default()
    }
}

/// The names of the devices that are steered.
fn steered(running: &Rxsteer) -> Result<Vec<String>> {
    let devices = running.status()?.devices.into_iter();
    let steered = devices.filter(|device| device.unsteered.is_empty());
    let mut names: Vec<_> = steered.map(|device| device.device).collect();
    names.sort_unstable();
    Ok(names)
}

#[test]
fn ports_come_and_go() -> Result<()> {
    in_lab!();
    let first = Testbed::new(&config(0))?;
    let [tester, dut] = [&first.link.tester, &first.link.dut];
    let second = Testbed::between(&tester.netns, &dut.netns, &config(1))?;
    if let Err(error) = bond(&dut.netns, BOND) {
        not_run("ports_come_and_go", &format!("{error:#}"));
        return Ok(());
    }
    add_port(BOND, dut)?;
    let ended = Rxsteer::start(&dut.netns, &[BOND, &dut.name])?;
    let ended = ended.err().context("it starts")?;
    ensure!(ended.log.contains("is named twice"), "{ended:?}");
    let running = Rxsteer::steering(&dut.netns, &[BOND, "--rps-cpus=1", "--policy=rps"])?;
    // The control: a device that is no port.
    ensure!(steered(&running)? == [&dut.name[..]]);

    let added = &second.link.dut;
    add_port(BOND, added)?;
    until("both ports are steered", || {
        Ok((steered(&running)? == [&dut.name[..], &added.name]).then_some(()))
    })?;
    let frames = Frames::Udp(UdpFlows::to(added, 100));
    let paced = GeneratorConfig::lossless(frames, None).at(10_000);
    let wire = Generator::start(&second.link, POLLING_CPU, &paced)?;
    until("packets of the new port are redirected", || {
        let device = running.device(&added.name)?;
        Ok(device.filter(|d| sums(&d.queues).redirected > 0).map(drop))
    })?;
    wire.stop()?;

    remove_port(added)?;
    until("the first port alone is steered", || {
        let names: Vec<_> = running
            .status()?
            .devices
            .into_iter()
            .map(|d| d.device)
            .collect();
        Ok((names == [&dut.name[..]]).then_some(()))
    })?;
    let ended = running.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(!ended.log.contains("overtake"), "{ended:?}");
    Ok(())
}
