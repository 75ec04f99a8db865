// SPDX-License-Identifier: MIT OR Apache-2.0
//! The devices of virtual machines, in a virtual machine: `rxsteer run DEVICE` works without options.

use crate::helpers::process::{RXSTEER, Rxsteer};
use crate::helpers::transfer::{datagrams, transfer};
use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use rxlab::lab::virtio::Pair;
use rxlab::testing::not_run;
use rxlab::{in_lab, test_name};
use rxsteer::api::status::Terms;

fn traffic(pair: &Pair) -> Result<()> {
    let (tester, dut) = (&pair.tester.netns, &pair.dut.netns);
    transfer(tester, dut, pair.dut.ipv4)?;
    datagrams(tester, dut, pair.dut.ipv4.into())
}

/// Starts rxsteer with these arguments alone.
fn start(pair: &Pair, args: &[&str]) -> Result<Rxsteer> {
    let mut command = pair.dut.netns.command(RXSTEER)?;
    command.arg("run").arg(&pair.dut.name).args(args);
    Rxsteer::spawn(&pair.dut.netns, command, true)?.map_err(|ended| anyhow::anyhow!("{ended:?}"))
}

fn ends_in_order(running: Rxsteer) -> Result<()> {
    let ended = running.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(!ended.log.contains("overtake"), "{ended:?}");
    Ok(())
}

/// Fails unless at least so many packets were redirected, all of which were delivered.
fn are_delivered(sums: &Terms, at_least: u64) -> Result<()> {
    ensure!(sums.redirected >= at_least, "{sums:?}");
    ensure!(sums.delivered == sums.redirected, "{sums:?}");
    Ok(())
}

#[test]
fn a_virtio_net_device_needs_no_options() -> Result<()> {
    in_lab!();
    let pair = match Pair::new() {
        Ok(pair) => pair,
        Err(error) => {
            not_run(test_name!(), &format!("{error:#}"));
            return Ok(());
        }
    };
    let running = start(&pair, &[])?;
    let mode = running.status()?.devices.remove(0).mode;
    ensure!(mode == "native", "{mode}");
    // The control: before the traffic there is nothing.
    ensure!(are_delivered(&running.sums()?, 1).is_err());
    traffic(&pair)?;
    let (sums, received) = (running.at_rest()?, running.received()?);
    ensure!(received > 20_000, "{received}, {sums:?}");
    are_delivered(&sums, 1)?;
    ends_in_order(running)?;
    for args in [
        ["--mode=native", "--policy=rps"],
        ["--mode=skb", "--policy=rfs"],
    ] {
        let running = start(&pair, &[&args[..], &["--rps-cpus=1"]].concat())?;
        traffic(&pair)?;
        let sums = running.at_rest()?;
        are_delivered(&sums, 1_000).map_err(|error| error.context(args.join(" ")))?;
        ends_in_order(running)?;
    }
    traffic(&pair)
}
