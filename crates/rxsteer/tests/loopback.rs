// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loopback device in skb mode: its packets change their CPU, arrive in order, and the settings
//! that this needs are put back.

mod common;

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result};
use common::process::Rxsteer;
use common::transfer::{datagrams, transfer};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::netns::Netns;
use rxlab::testing::testbed::until;

/// Values of the settings.
fn settings(netns: &Netns) -> Result<Vec<String>> {
    netns.run(|| {
        let read = |setting: &&str| {
            let path = format!("/proc/sys/net/ipv4/conf/lo/{setting}");
            Ok(fs::read_to_string(path)?.trim().to_owned())
        };
        ["accept_local", "route_localnet"]
            .iter()
            .map(read)
            .collect()
    })
}

fn traffic(netns: &Netns) -> Result<()> {
    transfer(netns, netns, Ipv4Addr::LOCALHOST)?;
    datagrams(netns, netns, Ipv4Addr::LOCALHOST.into())?;
    datagrams(netns, netns, Ipv6Addr::LOCALHOST.into())
}

fn steer(netns: &Netns, args: &[&str]) -> Result<Rxsteer> {
    let args = [&["lo", "--mode=auto", "--rps-cpus=1"], args].concat();
    Rxsteer::steering(netns, &args)
}

#[test]
fn packets_of_lo_change_their_cpu() -> Result<()> {
    in_lab!();
    let netns = Netns::new("dut")?;
    let before = settings(&netns)?;
    // The control: these are changed.
    assert_eq!(before, ["0", "0"]);
    for policy in ["--policy=rps", "--policy=rfs"] {
        let running = steer(&netns, &["--prepare", policy])?;
        assert_eq!(running.status()?.devices[0].mode, "skb");
        assert_eq!(settings(&netns)?, ["1", "1"]);
        traffic(&netns)?;
        let sums = running.at_rest()?;
        assert!(sums.redirected > 1_000, "{policy}: {sums:?}");
        assert_eq!((sums.lost, sums.vanished), (0, 0), "{policy}: {sums:?}");
        let ended = running.stop(Signal::SIGTERM)?;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert_eq!(settings(&netns)?, before);
        traffic(&netns)?;
    }
    Ok(())
}

#[test]
fn its_settings_are_put_back_after_a_kill() -> Result<()> {
    in_lab!();
    let netns = Netns::new("dut")?;
    let running = steer(&netns, &["--prepare"])?;
    assert_eq!(settings(&netns)?, ["1", "1"]);
    running.stop(Signal::SIGKILL)?;
    until("the settings are put back", || {
        Ok((settings(&netns)? == ["0", "0"]).then_some(()))
    })?;
    traffic(&netns)
}

#[test]
fn without_these_settings_it_is_refused() -> Result<()> {
    in_lab!();
    let netns = Netns::new("dut")?;
    let ended = Rxsteer::start(&netns, &["lo", "--mode=auto"])?;
    let ended = ended.err().context("it starts")?;
    assert!(ended.log.contains("--prepare"), "{ended:?}");
    assert_eq!(settings(&netns)?, ["0", "0"]);
    Ok(())
}
