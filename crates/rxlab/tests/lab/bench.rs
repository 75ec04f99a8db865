// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scenarios with traffic measure what they claim, and refuse other measurements.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use clap::ValueEnum;
use rxlab::bench::experiment::{CasePlan, Condition, DeviceKind, Effort, Gro, Napi, Only, Unfit};
use rxlab::bench::measurement::Measurement;
use rxlab::bench::report::document as report;
use rxlab::bench::report::document::Refusal;
use rxlab::bench::scenario::Scenario;
use rxlab::bench::setup::mode::{Cpus, Mode, Way};
use rxlab::bench::setup::router::{NR_BLOCKED, Passed, Router, Ruleset, blocked};
use rxlab::bench::setup::testbed::{INTERRUPT_CPU, Masks, Testbed};
use rxlab::bench::setup::traffic::{Traffic, check};
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::receiver::{Receiver, ReceiverConfig};
use rxlab::testing::testbed::until;
use rxlab::testing::{is_short, spoilt};
use rxlab::{in_lab, test_name};
use rxsteer::host::kthread;

const CONDITION: Condition = Condition {
    napi: Napi::Thread,
    gro: Gro::On,
    device: DeviceKind::Nic,
};

/// Rate and duration of the tests' own traffic: frames per second that any machine carries.
const RATE: u64 = 20_000;
const SECONDS: f64 = 0.2;

/// Refusals that indicate a bug. Other refusals may come from load on the host: counters are shared
/// by all namespaces, CPUs with other work.
const MISTAKES: [&str; 4] = [
    "not in effect",
    "refused connections",
    "account does not close",
    "rxsteer received",
];

/// Pairs of metrics: delivered, and offered.
const RATES: [(&str, &str); 3] = [
    ("delivered_pps", "accepted_pps"),
    ("delivered_at_2x_pps", "offered_at_2x_pps"),
    ("delivered_at_most_pps", "offered_at_most_pps"),
];

fn has_nft() -> bool {
    Command::new("nft").arg("--version").output().is_ok()
}

/// One round of short measurements in the lab.
fn short(only: Only) -> Effort {
    Effort {
        rounds: 1,
        seconds: 0.05,
        napi: Vec::new(),
        gro: Vec::new(),
        device: DeviceKind::Nic,
        on: None,
        only,
    }
}

/// In `make test`, the modes of a scenario, where a test does not name others: one of each kind. Kernel RFS
/// has a table of the whole host, which one measurement has at a time: [`flood`] measures it.
const KINDS: &str = "none; kernel-rps (others); cpumap (others); rxsteer; rxsteer-softirq; \
                     rxsteer-rps+limit (others); rxsteer-adaptive+nat; rxsteer-softirq-rfs+nat";

/// Runs one round: every mode of every case must have all headlines, or be refused.
fn run(scenario: Scenario, headlines: &[&str]) -> Result<()> {
    run_and(scenario, &[], headlines)
}

/// Like [`run`]; in `make test` also in these modes.
fn run_and(scenario: Scenario, others: &[&str], headlines: &[&str]) -> Result<()> {
    let kinds = KINDS.split("; ").chain(others.iter().copied());
    let modes: Vec<_> = kinds.filter(|_| is_short()).collect();
    run_only(scenario, only(&[], &modes), headlines)
}

/// Like [`run`], for a part of the scenario.
pub(crate) fn run_only(scenario: Scenario, only: Only, headlines: &[&str]) -> Result<()> {
    run_on(DeviceKind::Nic, scenario, only, headlines)
}

fn run_on(device: DeviceKind, scenario: Scenario, only: Only, headlines: &[&str]) -> Result<()> {
    let effort = Effort {
        device,
        ..short(only.clone())
    };
    let mut measurement = Measurement::new(scenario.prepare(&effort)?, &effort);
    measurement.round(&effort, None, &|_| {})?;
    let plan = measurement.plan();
    let report = measurement.report(&effort).context("a round is complete")?;
    assert!(!plan.cases.is_empty(), "{:?}", plan.notes);
    println!("{}", report.render());
    let asked = |case: &&CasePlan| {
        only.cases.is_empty() || only.cases.iter().any(|part| case.case.contains(part))
    };
    for case in plan.cases.iter().filter(asked) {
        let modes = report.cases.iter().find(|found| found.case == case.case);
        for mode in case
            .modes
            .iter()
            .filter(|m| only.modes.is_empty() || only.modes.contains(m))
        {
            let refused = |r: &&Refusal| r.case == case.case && r.mode == *mode;
            let refusal = report.refused.iter().find(refused);
            let values = modes.and_then(|found| found.modes.get(mode));
            let values = values.filter(|values| !values.is_empty());
            assert_eq!(refusal.is_some(), values.is_none(), "{}, {mode}", case.case);
            let Some(values) = values else { continue };
            for (metric, value) in values {
                assert!(plan.metrics.contains_key(metric), "{metric}");
                assert!(value.median.is_finite() && value.median >= 0.0, "{metric}");
            }
            for (delivered, offered) in RATES {
                let of = |metric: &str| values.get(metric).map(|value| value.median);
                assert!(of(delivered) <= of(offered), "{mode}: {values:?}");
            }
            for headline in headlines {
                assert!(values.contains_key(*headline), "{mode}: {headline}");
            }
        }
    }
    for refusal in &report.refused {
        let mistake = MISTAKES.iter().any(|mistake| refusal.why.contains(mistake));
        assert!(!mistake, "{refusal:?}");
    }
    let measured = |case: &report::Case| case.modes.values().any(|values| !values.is_empty());
    if !report.cases.iter().any(measured) {
        let why = &report.refused[0].why;
        spoilt(plan.scenario, &format!("all was refused: {why}"));
    }
    Ok(())
}

const SEARCHED: [&str; 6] = [
    "lossfree_pps",
    "delivered_at_2x_pps",
    "delivered_at_most_pps",
    "offered_at_2x_pps",
    "offered_at_most_pps",
    "generator_bound",
];

#[test]
fn flood() -> Result<()> {
    in_lab!();
    let headlines = ["delivered_pps", "accepted_pps"];
    run_and(Scenario::Flood, &["kernel-rfs (others)"], &headlines)
}

/// Case with many connections; there are fewer if the client has CPUs of its own.
const MANY: [&str; 2] = ["TCP_RR, 500", "TCP_RR, 200"];

pub(crate) fn only(cases: &[&str], modes: &[&str]) -> Only {
    Only {
        cases: cases.iter().map(|&case| case.to_owned()).collect(),
        modes: modes.iter().map(|&mode| mode.to_owned()).collect(),
    }
}

/// Needs CPUs for generators: a flood with its limit, and a client.
#[test]
fn generators_apart() -> Result<()> {
    in_lab!();
    if !Masks::host()?.apart() {
        rxlab::testing::not_run("generators_apart", "this machine has fewer than 4 CPUs");
        return Ok(());
    }
    let modes = ["none", "kernel-rps (others)", "rxsteer-rfs"];
    let delivered = ["delivered_pps", "accepted_pps"];
    run_only(Scenario::Flood, only(&["connected"], &modes), &delivered)?;
    run_only(
        Scenario::Flood,
        only(&["for each CPU"], &["none"]),
        &delivered,
    )?;
    run_only(Scenario::Rr, only(&MANY, &modes[..2]), &["tps"])?;
    run_only(
        Scenario::Lossfree,
        only(&["connected"], &["none"]),
        &SEARCHED,
    )
}

#[test]
fn rr() -> Result<()> {
    in_lab!();
    // Under many threads the test itself gets little time: ten seconds for each mode.
    let modes = ["none", "rxsteer", "kernel-rps (all)"];
    let modes = if is_short() { &modes[..2] } else { &modes };
    let headlines = ["tps", "latency_us_p99", "demand_us"];
    run_only(Scenario::Rr, only(&MANY, modes), &headlines)
}

#[test]
fn ramp() -> Result<()> {
    in_lab!();
    let headlines = ["ramp_ms", "final_pps", "first_100ms_pps"];
    run(Scenario::Ramp, &headlines)
}

#[test]
fn wakeup() -> Result<()> {
    in_lab!();
    let headlines = ["polling_ns_per_packet", "cpu_ns_per_packet"];
    run(Scenario::Wakeup, &headlines)
}

#[test]
fn fairness() -> Result<()> {
    in_lab!();
    run(Scenario::Fairness, &["modest_percent", "flood_pps"])
}

#[test]
fn mixed() -> Result<()> {
    in_lab!();
    run(Scenario::Mixed, &["mbit_per_s", "datagrams_pps"])
}

#[test]
fn lossfree() -> Result<()> {
    in_lab!();
    run(Scenario::Lossfree, &SEARCHED)
}

#[test]
fn forward() -> Result<()> {
    in_lab!();
    if !has_nft() {
        rxlab::testing::not_run("forward", "nft is missing");
        return Ok(());
    }
    run(Scenario::Forward, &SEARCHED)
}

#[test]
fn firewall() -> Result<()> {
    in_lab!();
    if !has_nft() {
        rxlab::testing::not_run("firewall", "nft is missing");
        return Ok(());
    }
    run(Scenario::Firewall, &SEARCHED)
}

#[test]
fn crr() -> Result<()> {
    in_lab!();
    run(
        Scenario::Crr,
        &["tps", "latency_us_p99", "demand_us", "latency_us_p50"],
    )
}

#[test]
fn nat() -> Result<()> {
    in_lab!();
    if !has_nft() {
        rxlab::testing::not_run("nat", "nft is missing");
        return Ok(());
    }
    // In `make test` one case with each transport: a minute for all four.
    let (cases, modes): (&[&str], Vec<_>) = match is_short() {
        true => (&["TCP_RR, 1 ", "UDP_RR, 100"], KINDS.split("; ").collect()),
        false => (&[], Vec::new()),
    };
    let headlines = ["tps", "latency_us_p99", "demand_us", "latency_us_p50"];
    run_only(Scenario::Nat, only(cases, &modes), &headlines)
}

#[test]
fn without_nft_there_is_a_note_and_no_figure() -> Result<()> {
    in_lab!();
    let output = Command::new(env!("CARGO_BIN_EXE_rxlab"))
        .args(["bench", "forward", "--rounds=1", "--seconds=0.1", "--json"])
        .env("PATH", "/nonexistent")
        .output()?;
    assert!(output.status.success(), "{output:?}");
    let document: report::Document = serde_json::from_slice(&output.stdout)?;
    let [report] = &document.scenarios[..] else {
        panic!("{document:?}");
    };
    assert_eq!(
        (report.scenario.as_str(), report.cases.len()),
        ("forward", 0)
    );
    assert!(report.notes[0].contains("nft is missing"), "{report:?}");
    Ok(())
}

/// Runs the demo with this PATH; None if the load of the host made its measurements invalid.
fn demo(test: &str, path: &OsStr) -> Result<Option<String>> {
    let mut rxlab = Command::new(env!("CARGO_BIN_EXE_rxlab"));
    let output = rxlab.args(["demo", "--seconds=0.1"]).env("PATH", path);
    let output = output.output()?;
    let why = String::from_utf8_lossy(&output.stderr);
    let invalid = why.contains("measurements was valid");
    if invalid && MISTAKES.iter().all(|mistake| !why.contains(mistake)) {
        spoilt(test, why.trim());
        return Ok(None);
    }
    assert!(output.status.success(), "{output:?}");
    Ok(Some(String::from_utf8(output.stdout)?))
}

#[test]
fn without_nft_the_demo_has_no_firewall() -> Result<()> {
    in_lab!();
    // A shell puts settings back.
    let path = tempfile::tempdir()?;
    symlink("/bin/sh", path.path().join("sh"))?;
    if let Some(text) = demo(test_name!(), path.path().as_os_str())? {
        let why = "\nFirewall: not measured. nft is missing; on Debian and Ubuntu, apt-get install";
        assert!(text.contains(why), "{text}");
    }
    Ok(())
}

#[test]
fn the_demo_ends_with_the_firewall() -> Result<()> {
    in_lab!();
    if !has_nft() {
        rxlab::testing::not_run(test_name!(), "nft is missing");
        return Ok(());
    }
    if let Some(text) = demo(test_name!(), &env::var_os("PATH").context("PATH")?)? {
        let (_, end) = text
            .split_once("\nFirewall: a router")
            .context(text.clone())?;
        // Beside other programs nothing is concluded.
        let ends = ["through the firewall rxsteer", "\nOther programs took "];
        assert!(ends.iter().any(|words| end.contains(words)), "{text}");
    }
    Ok(())
}

/// Steered in softirq mode, or by the kernel.
#[test]
fn devices_without_xdp() -> Result<()> {
    in_lab!();
    let modes = ["none", "kernel-rps (all)", "rxsteer-softirq-rfs", "rxsteer"];
    let only = |case: &str| Only {
        cases: vec![case.to_owned()],
        modes: modes.map(str::to_owned).to_vec(),
    };
    for device in DeviceKind::value_variants() {
        if *device == DeviceKind::Nic {
            continue;
        }
        let run = |scenario, case, headlines: &[&str]| {
            run_on(*device, scenario, only(case), headlines)
                .with_context(|| format!("{scenario:?} on {device:?}"))
        };
        run(Scenario::Rr, "UDP_RR, 1 ", &["tps"])?;
        run(Scenario::Stream, "a consumer that sleeps", &["mbit_per_s"])?;
        if device.takes_frames() {
            run(Scenario::Flood, "connected", &["delivered_pps"])?;
            run(Scenario::Firewall, "router", &["lossfree_pps"])?;
        }
    }
    let refused = |device, scenario: Scenario| {
        let effort = Effort {
            device,
            ..short(Only::default())
        };
        let error = scenario
            .prepare(&effort)
            .err()
            .context("it can be measured")?;
        anyhow::Ok(format!("{error:#}"))
    };
    for (device, scenario) in [
        (DeviceKind::Lo, Scenario::Flood),
        (DeviceKind::Vxlan, Scenario::Decide),
    ] {
        let why = refused(device, scenario)?;
        assert!(why.contains("--device"), "{why}");
    }
    Ok(())
}

#[test]
fn a_paced_stream_keeps_its_pace() -> Result<()> {
    in_lab!();
    let effort = Effort {
        seconds: 0.2,
        ..short(Only {
            cases: vec!["polls".to_owned(), "Gbit/s".to_owned()],
            modes: vec!["none".to_owned()],
        })
    };
    let mut measurement = Measurement::new(Scenario::Stream.prepare(&effort)?, &effort);
    measurement.round(&effort, None, &|_| {})?;
    let report = measurement.report(&effort).context("a round is complete")?;
    let [at_most, paced] = &report.cases[..] else {
        panic!("{report:?}");
    };
    let of = |case: &report::Case, metric| Some(case.modes["none"].get(metric)?.median);
    let rates = [at_most, paced].map(|case| of(case, "mbit_per_s"));
    // Control: without pacing, more arrives.
    let [Some(2200.0..), Some(rate)] = rates else {
        let why = format!("{rates:?} Mbit/s; refused: {:?}", report.refused);
        spoilt(test_name!(), &why);
        return Ok(());
    };
    assert!(rate < 2200.0, "{}: {rate} Mbit/s", paced.case);
    assert!(of(paced, "work_per_s") > Some(0.0), "{report:?}");
    Ok(())
}

/// Sends with kernel RPS on, after a change of the device; returns the counts and the result of the
/// check.
fn under_rps(done: impl FnOnce(&Testbed) -> Result<()>) -> Result<(Traffic, Result<()>)> {
    let testbed = Testbed::new(CONDITION)?;
    let dut = &testbed.link.dut;
    let flows = UdpFlows::to(dut, 512);
    let way = Way {
        mode: Mode::KernelRps,
        cpus: Cpus::Others,
    };
    let active = testbed.start(way)?;
    done(&testbed)?;
    let receiver = ReceiverConfig::new(SocketAddr::new(flows.daddr, flows.dport));
    let receiver = Receiver::start(&dut.netns, &receiver)?;
    let watch = testbed.watch()?;
    let traffic = Traffic::send(
        &testbed,
        &receiver,
        &Frames::Udp(flows),
        Some(RATE),
        SECONDS,
    )?;
    let seen = watch.end()?;
    let checked = check(&testbed, &active, way, &traffic, &seen);
    Ok((traffic, checked))
}

/// Reason of a refusal.
fn refusal(checked: Result<()>) -> Option<String> {
    checked.err().map(|error| {
        assert!(error.is::<Unfit>(), "{error:#}");
        error.to_string()
    })
}

#[test]
fn a_mode_that_was_not_in_effect_is_refused() -> Result<()> {
    in_lab!();
    let (_, checked) = under_rps(|testbed| {
        let dut = &testbed.link.dut;
        let path = format!("/sys/class/net/{}/queues/rx-0/rps_cpus", dut.name);
        dut.netns.run(|| Ok(fs::write(&path, "0")?))
    })?;
    let why = refusal(checked).expect("nothing was steered");
    assert!(why.contains("kernel-rps was not in effect"), "{why}");
    // Control: unchanged, the mode is in effect.
    let (traffic, checked) = under_rps(|_| Ok(()))?;
    if let Some(why) = refusal(checked) {
        assert!(!why.contains("not in effect"), "{why}");
    }
    let (all, settled, meanwhile) = (traffic.all, traffic.settled, traffic.meanwhile);
    assert!(
        all.accepted >= all.delivered + traffic.dropped,
        "{traffic:?}"
    );
    assert!(
        meanwhile.accepted >= meanwhile.delivered && meanwhile.delivered > 0,
        "{traffic:?}"
    );
    // Packets sent while settling count only in the total.
    assert!(
        all.accepted > settled.accepted && settled.accepted >= meanwhile.accepted,
        "{traffic:?}"
    );
    Ok(())
}

/// Threads on the host that poll a device.
fn napi_threads(device: &str) -> usize {
    kthread::numbered(Path::new("/proc"), &format!("napi/{device}-")).len()
}

/// Sends to the host behind a router; returns the counts of the traffic and of the firewall.
fn forwarded(testbed: &Testbed, router: &Router, flows: &UdpFlows) -> Result<(Traffic, Passed)> {
    let before = router.passed()?;
    let frames = Frames::Udp(flows.clone());
    let traffic = Traffic::send(testbed, router, &frames, Some(RATE), SECONDS)?;
    let after = router.passed()?;
    let passed = Passed {
        expected: after.expected - before.expected,
        others: after.others - before.others,
    };
    Ok((traffic, passed))
}

#[test]
fn a_router_knows_its_connections_and_leaves_nothing() -> Result<()> {
    in_lab!();
    if !has_nft() {
        rxlab::testing::not_run(
            "a_router_knows_its_connections_and_leaves_nothing",
            "nft is missing",
        );
        return Ok(());
    }
    let testbed = Testbed::new(CONDITION)?;
    let dut = &testbed.link.dut;
    let router = Router::new(dut, Ruleset::Stateful)?;
    let flows = router.flows(dut, 512);
    let plain = testbed.start(Way::by_default(Mode::None))?;
    let send = |flows: &UdpFlows| {
        let (traffic, passed) = forwarded(&testbed, &router, flows)?;
        anyhow::Ok((traffic, passed.expected, passed.others))
    };
    // Control: without replies, every packet counts as a connection's first.
    let (traffic, established, fresh) = send(&flows)?;
    assert!(traffic.all.delivered > 0, "{traffic:?}");
    assert_eq!(
        (established, fresh),
        (0, traffic.all.delivered + traffic.dropped)
    );

    let frames = testbed.frames(&flows);
    router.establish(&testbed.link, INTERRUPT_CPU, &flows, frames)?;
    let (traffic, established, fresh) = send(&flows)?;
    assert!(traffic.all.delivered > 0, "{traffic:?}");
    assert_eq!(
        (established, fresh),
        (traffic.all.delivered + traffic.dropped, 0)
    );

    // Packets that the firewall does not allow are dropped.
    let (traffic, established, fresh) = send(&UdpFlows { dport: 10, ..flows })?;
    assert!(traffic.all.accepted > 0, "{traffic:?}");
    assert_eq!((traffic.all.delivered, established, fresh), (0, 0, 0));

    plain.stop()?;
    let device = dut.name.clone();
    assert_eq!(napi_threads(&device), 1);
    drop((testbed, router));
    until("the router's device is gone", || {
        Ok((napi_threads(&device) == 0).then_some(()))
    })
}

/// Packets that match the last rule pass all rules before it, and stop there.
#[test]
fn a_router_compares_each_packet_with_the_whole_list() -> Result<()> {
    in_lab!();
    if !has_nft() {
        rxlab::testing::not_run(test_name!(), "nft is missing");
        return Ok(());
    }
    let testbed = Testbed::new(CONDITION)?;
    let router = Router::new(&testbed.link.dut, Ruleset::Blocklist)?;
    let flows = router.flows(&testbed.link.dut, 512);
    let plain = testbed.start(Way::by_default(Mode::None))?;
    let (traffic, passed) = forwarded(&testbed, &router, &flows)?;
    let delivered = traffic.all.delivered;
    assert!(delivered > 0, "{traffic:?}");
    assert_eq!(
        (passed.expected, passed.others),
        (delivered + traffic.dropped, 0)
    );

    // Control: the first and the last rule match only the intended packets.
    for rule in [1, NR_BLOCKED] {
        let (saddr, dport) = blocked(rule);
        let of = |dport| UdpFlows {
            saddr: saddr.into(),
            nr_saddrs: 1,
            nr_flows: 16,
            dport,
            ..flows.clone()
        };
        let (traffic, passed) = forwarded(&testbed, &router, &of(dport))?;
        assert_eq!((traffic.all.delivered, passed.expected), (0, 0));
        assert_eq!(passed.others, traffic.all.accepted, "{traffic:?}");
        let (traffic, passed) = forwarded(&testbed, &router, &of(flows.dport))?;
        assert!(traffic.all.delivered > 0, "{traffic:?}");
        assert_eq!(passed.others, 0, "{traffic:?}");
    }
    plain.stop()
}
