// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets that are not steered as they should be, because others change the device, are reported.

mod common;

use std::fs;

use anyhow::Result;
use common::process::*;
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::link::{End, LinkConfig};
use rxlab::testing::testbed::*;

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
