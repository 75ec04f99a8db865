// SPDX-License-Identifier: MIT OR Apache-2.0
//! Faults between packets of many flows, in any order: accounts close after each, no packet is
//! overtaken, and nothing is left behind. `make faults MINUTES=60` runs random schedules.

mod fault;
mod leftovers;
mod life;
mod limit;
mod order;
mod world;

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::time::{Duration, Instant};

use crate::common::mutate::Random;
use anyhow::{Context, Result, ensure};
use fault::Fault;
use leftovers::Host;
use life::Start;
use limit::limited;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::xdp::Xdp;
use rxlab::testing::testbed::Testbed;
use rxlab::{in_lab, test_name};
use rxsteer::host::setting::Setting;
use world::{Outcome, World, spread};

/// Limit on one fault, with the traffic before and after it. Its parts have limits of 90 s each, so
/// that only what waits in the kernel takes longer.
const LIMIT: Duration = Duration::from_secs(100);

/// Time in which the kernel removes what has ended.
const PATIENCE: Duration = Duration::from_secs(20);

/// Schedules that are the same in each run.
const SEEDS: [u64; 1] = [1];

/// Length without `RXSTEER_FAULTS_MINUTES`, minutes.
const MINUTES: f64 = 1.0;

/// Faults, packets and overtaken packets.
type Totals = BTreeMap<Fault, (u64, Outcome)>;

/// All faults in a random order.
fn schedule(seed: u64) -> Vec<Fault> {
    let mut random = Random::new(spread(seed));
    let mut faults = Fault::ALL.to_vec();
    for last in (1..faults.len()).rev() {
        faults.swap(last, random.below(last + 1));
    }
    faults
}

/// Runs a schedule, until `enough`; adds to the totals.
fn run(
    test: &'static str,
    seed: u64,
    unguarded: bool,
    totals: &mut Totals,
    enough: fn(&Outcome) -> bool,
) -> Result<()> {
    let named = |step: &str| format!("{step}, RXSTEER_FAULTS_SEED={seed}");
    let start = || World::new(test, seed, unguarded);
    let mut world = limited(&named("start"), LIMIT, start)?;
    for (number, fault) in schedule(seed).into_iter().enumerate() {
        let step = named(&format!("fault {number}, {fault:?}"));
        println!("{step}");
        let outcome = limited(&step, LIMIT, || world.episode(fault)).context(step.clone())?;
        let total = totals.entry(fault).or_default();
        total.0 += 1;
        total.1.packets += outcome.packets;
        total.1.overtaken += outcome.overtaken;
        total.1.redirected = total.1.redirected.max(outcome.redirected);
        println!("  {outcome:?}");
        ensure!(unguarded || outcome.overtaken == 0, "{step}: {outcome:?}");
        if enough(&outcome) {
            break;
        }
    }
    let step = named("end");
    limited(&step, LIMIT, || {
        let ended = world.end();
        drop(world);
        ended
    })
    .context(step.clone())
}

#[test]
fn no_fault_reorders_or_leaves_anything_behind() -> Result<()> {
    Start::run_if_told()?;
    in_lab!(alone: "it takes a CPU offline, and looks for what is left on the whole host");
    let host = Host::now()?;
    let mut totals = Totals::new();
    for seed in SEEDS {
        run(test_name!(), seed, false, &mut totals, |_| false)?;
    }
    let left = host.leftovers(PATIENCE)?;
    ensure!(left.is_empty(), "left behind: {left:#?}");
    Ok(())
}

/// The control: such schedules reorder without the rule.
#[test]
fn without_the_rule_packets_are_overtaken() -> Result<()> {
    Start::run_if_told()?;
    in_lab!(alone: "it takes a CPU offline, and looks for what is left on the whole host");
    for seed in SEEDS.into_iter().chain(100..110) {
        let mut totals = Totals::new();
        run(test_name!(), seed, true, &mut totals, |now| {
            now.overtaken > 0
        })?;
        if totals.values().any(|(_, outcome)| outcome.overtaken > 0) {
            return Ok(());
        }
    }
    anyhow::bail!("no packet was overtaken")
}

/// The control: what is left behind on purpose is found, until it is gone.
#[test]
fn leftovers_are_found() -> Result<()> {
    in_lab!(alone: "it takes a CPU offline, and looks for what is left on the whole host");
    let host = Host::now()?;
    let now = || host.leftovers(Duration::ZERO);
    let bed = Testbed::new(&LinkConfig::default())?;
    let pass = Xdp::pass(&bed.link.dut)?;
    let private = DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create("/run/rxsteer");
    private?;
    let socket = tempfile::NamedTempFile::new_in("/run/rxsteer")?;
    let burst = Setting::keep("/proc/sys/net/core/message_burst")?;
    burst.set("11")?;
    let online = Setting::keep("/sys/devices/system/cpu/cpu1/online").ok();
    let mut kinds = vec!["namespace", "program", "map", "/run/rxsteer/", "/proc/sys/"];
    if let Some(online) = &online {
        online.set("0")?;
        kinds.push("CPU 1 offline");
    }
    let left = now()?;
    for kind in kinds {
        ensure!(left.iter().any(|what| what.starts_with(kind)), "{left:#?}");
    }
    drop((bed, pass, socket, burst, online));
    let left = host.leftovers(PATIENCE)?;
    ensure!(left.is_empty(), "{left:#?}");
    Ok(())
}

#[test]
#[ignore = "takes as long as it is told to: make faults MINUTES=60"]
fn random_schedules() -> Result<()> {
    Start::run_if_told()?;
    in_lab!(alone: "it takes a CPU offline, and looks for what is left on the whole host");
    let minutes = std::env::var("RXSTEER_FAULTS_MINUTES").map_or(Ok(MINUTES), |m| m.parse())?;
    let only: Option<u64> = match std::env::var("RXSTEER_FAULTS_SEED") {
        Ok(seed) => Some(seed.parse()?),
        Err(_) => None,
    };
    let length = Duration::from_secs_f64(minutes * 60.0);
    let host = Host::now()?;
    let (start, mut schedules, mut totals) = (Instant::now(), 0, Totals::new());
    let mut random = Random::new(Random::seed());
    while schedules == 0 || only.is_none() && start.elapsed() < length {
        let seed = only.unwrap_or_else(|| random.next());
        let ran = run(test_name!(), seed, false, &mut totals, |_| false);
        schedules += 1;
        if ran.is_err() {
            println!("{schedules} schedules: {totals:#?}");
        }
        ran?;
    }
    println!(
        "{schedules} schedules in {:?}: {totals:#?}",
        start.elapsed()
    );
    let left = host.leftovers(PATIENCE)?;
    ensure!(left.is_empty(), "left behind: {left:#?}");
    Ok(())
}
