// SPDX-License-Identifier: MIT OR Apache-2.0
//! The mask of `--rps-cpus auto` follows the queue's interrupt, here a NAPI thread.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;

use anyhow::{Context, Result};
use rxlab::bench::setup::mode::Active;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::{
    OTHER_CPU, POLLING_CPU, Testbed, at_rest, received_in_order, status, until,
};
use rxlab::{in_lab, test_name};
use rxsteer::daemon::options::{Options, RpsCpus};
use rxsteer::host::topology::Topology;

fn auto(cpu: u32) -> Result<String> {
    Ok(Topology::host().auto_mask(Some(cpu))?.cpus.to_string())
}

#[test]
fn the_mask_follows_the_interrupt() -> Result<()> {
    in_lab!();
    let (before, after) = (auto(POLLING_CPU)?, auto(OTHER_CPU)?);
    if before == after {
        let few = "CPUs 0 and 1 have the same mask: this takes three CPUs";
        rxlab::testing::not_run(test_name!(), few);
        return Ok(());
    }
    let mut bed = Testbed::new(&LinkConfig {
        queues: 2,
        ..LinkConfig::default()
    })?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let options = Options {
        rps_cpus: RpsCpus::Auto,
        // Control: a mask by number stays, whatever the interrupt does.
        queues: vec![format!("1={before}").parse()?],
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    let mask = |queue: usize| {
        let queues = &status(&active)?.devices[0].queues;
        anyhow::Ok(queues[queue].rps_cpus.clone())
    };
    assert_eq!(mask(0)?, before);
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(20_000);
    let wire = Generator::start(&bed.link, 0, &paced)?;
    // Twice there and back.
    for cpu in [OTHER_CPU, POLLING_CPU].repeat(2) {
        bed.nic.move_to(1, cpu)?;
        bed.nic.move_to(0, cpu)?;
        let wanted = auto(cpu)?;
        until(
            "the mask follows",
            || Ok((mask(0)? == wanted).then_some(())),
        )?;
        assert_eq!(mask(1)?, before);
    }
    let sent = wire.stop()?;
    let queue = at_rest(&active, 0, sent.sent)?;
    assert_eq!((queue.sums.lost, queue.sums.shed), (0, 0), "{queue:?}");
    // Control: flows moved.
    assert!(queue.moves > 0, "{queue:?}");
    active.stop()?;
    received_in_order(sink, sent.sent)
}

/// Where both CPUs are in the mask anyway, the log shows that the interrupt is followed.
#[test]
fn a_moved_interrupt_is_logged() -> Result<()> {
    in_lab!();
    let mut bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let mut rxsteer = dut
        .netns
        .command(env!("CARGO_BIN_EXE_rxsteer"))?
        .args(["run", "--mode=native", &dut.name])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let (tell, lines) = mpsc::channel();
    let stderr = BufReader::new(rxsteer.stderr.take().context("it was piped")?);
    thread::spawn(move || {
        stderr
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| tell.send(line))
    });
    let lands_on = |cpu: u32| {
        let words = format!("with CPU {cpu}, where the interrupt lands");
        until(&words, || {
            let found = |line: String| line.contains(&words);
            Ok(lines.try_iter().any(found).then_some(()))
        })
    };
    let logged = (|| {
        lands_on(POLLING_CPU)?;
        for cpu in [OTHER_CPU, POLLING_CPU] {
            bed.nic.move_to(0, cpu)?;
            lands_on(cpu)?;
        }
        anyhow::Ok(())
    })();
    rxsteer.kill()?;
    rxsteer.wait()?;
    logged
}
