// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scenarios with programs of others, and with tunnels; the programs end with the bench.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::Result;
use rxlab::bench::programs::Service;
use rxlab::bench::scenario::Scenario;
use rxlab::testing::is_short;
use rxlab::testing::testbed::until;
use rxlab::{in_lab, test_name};

use crate::bench::{only, run_only};

/// Whether this machine has the servers and their clients.
fn has_servers(test: &str) -> bool {
    let services = [Service::DnsUdp, Service::Http].map(Service::find);
    let missing = services.into_iter().find_map(Result::err);
    missing
        .iter()
        .for_each(|why| rxlab::testing::not_run(test, &why.to_string()));
    missing.is_none()
}

/// Modes of the scenarios with servers, for fewer than four CPUs, and for others.
const STEERED: [&str; 5] = [
    "none",
    "kernel-rps (all)",
    "kernel-rps (others)",
    "rxsteer",
    "rxsteer-softirq",
];

#[test]
fn servers() -> Result<()> {
    in_lab!();
    if !has_servers(test_name!()) {
        return Ok(());
    }
    let cases = ["nsd over UDP", "nsd over TCP", "connection for each"];
    let modes = if is_short() { &STEERED[..4] } else { &STEERED };
    let headlines = ["answers_per_s", "latency_us_p99", "demand_us"];
    run_only(Scenario::Servers, only(&cases, modes), &headlines)
}

#[test]
fn neighbour() -> Result<()> {
    in_lab!();
    if !has_servers(test_name!()) {
        return Ok(());
    }
    let cases = ["TCP_RR, 1 connection; nice 0", "nsd over UDP"];
    let modes = if is_short() { &STEERED[3..4] } else { &STEERED };
    let headlines = ["answers_per_s", "latency_us_p99"];
    run_only(Scenario::Neighbour, only(&cases, modes), &headlines)
}

#[test]
fn headroom() -> Result<()> {
    in_lab!();
    if !has_servers(test_name!()) {
        return Ok(());
    }
    let cases = ["TCP_RR", "nginx"];
    let modes = if is_short() { &STEERED[3..4] } else { &STEERED };
    let headlines = ["latency_us_p50", "latency_us_p999", "demand_us"];
    run_only(Scenario::Headroom, only(&cases, modes), &headlines)
}

#[test]
fn tunnel() -> Result<()> {
    in_lab!();
    let cases = ["TCP to the host", "UDP to a container"];
    let modes = if is_short() { &STEERED[2..4] } else { &STEERED };
    run_only(Scenario::Tunnel, only(&cases, modes), &["mbit_per_s"])
}

/// All processes that a process has started, and those that they have.
fn descendants(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let lists = tasks.map(|task| fs::read_to_string(task.path().join("children")));
    let children: Vec<u32> = lists
        .flatten()
        .flat_map(|list| list.split_whitespace().map(str::parse).collect::<Vec<_>>())
        .flatten()
        .collect();
    let below = children.iter().flat_map(|&child| descendants(child));
    below.chain(children.iter().copied()).collect()
}

#[test]
fn servers_end_when_it_is_killed() -> Result<()> {
    in_lab!();
    if !has_servers(test_name!()) {
        return Ok(());
    }
    let lives = |pid: &u32| fs::metadata(format!("/proc/{pid}/exe")).is_ok();
    for (case, processes) in [("nsd over UDP", 4), ("nginx", 3)] {
        let mut rxlab = Command::new(env!("CARGO_BIN_EXE_rxlab"))
            .args(["bench", "servers", "--seconds=100", "--case", case])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        // The server, its workers and the client.
        let started = until("a server and its client run", || {
            let started = descendants(rxlab.id());
            Ok((started.len() >= processes).then_some(started))
        });
        rxlab.kill()?;
        rxlab.wait()?;
        let started = started?;
        until("all have ended", || {
            Ok((!started.iter().any(lives)).then_some(()))
        })?;
    }
    Ok(())
}
