// SPDX-License-Identifier: MIT OR Apache-2.0
//! What commands say and do about steering that is pinned, and about what can't be pinned.

mod common;

use std::fs;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use common::container::Container;
use common::pinned::mount_bpffs;
use common::process::*;
use nix::mount::{MsFlags, mount};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::*;
use rxsteer::host::ethtool::TX_VLAN;
use serde_json::Value;

const OWN: &str = "/sys/fs/bpf/own";

fn testbed() -> Result<Testbed> {
    let bed = Testbed::new(&LinkConfig::default())?;
    mount_bpffs(&bed.link.dut.netns)?;
    Ok(bed)
}

/// Pins steering in a folder, and ends without it.
fn pinned_by_one_that_ended(bed: &Testbed, pin: &str) -> Result<()> {
    let dut = &bed.link.dut;
    let rxsteer = Rxsteer::steering(&dut.netns, &roomy(&dut.name, &[pin]))?;
    ensure!(rxsteer.stop(Signal::SIGTERM)?.code == Some(0));
    ensure!(attached(bed)?.is_some(), "steering goes on");
    Ok(())
}

/// A command's output and its errors; whether it succeeded.
fn says(bed: &Testbed, args: &[&str]) -> Result<(String, String, bool)> {
    let output = rxsteer(&bed.link.dut.netns, args)?;
    let [said, errors] = [output.stdout, output.stderr].map(String::from_utf8);
    Ok((said?, errors?, output.status.success()))
}

fn status_as_json(bed: &Testbed) -> Result<Value> {
    let (said, errors, succeeded) = says(bed, &["status", "--json"])?;
    ensure!(succeeded, "{errors}");
    let schema = include_str!("../../../docs/manual/status.schema.json");
    let schema = jsonschema::draft202012::new(&serde_json::from_str(schema)?)?;
    let status = serde_json::from_str(&said)?;
    ensure!(schema.is_valid(&status), "{status}");
    Ok(status)
}

/// A configuration that this namespace alone sees.
fn configure(bed: &Testbed, text: &str) -> Result<()> {
    bed.link.dut.netns.run(|| {
        let none = None::<&str>;
        mount(Some("etc"), "/etc", Some("tmpfs"), MsFlags::empty(), none)?;
        fs::create_dir("/etc/rxsteer")?;
        Ok(fs::write("/etc/rxsteer/rxsteer.toml", text)?)
    })
}

#[test]
fn status_shows_what_is_pinned() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let dut = &bed.link.dut;
    let none = || -> Result<()> {
        let (_, errors, succeeded) = says(&bed, &["status"])?;
        ensure!(
            !succeeded && errors.contains("no rxsteer is running"),
            "{errors}"
        );
        Ok(())
    };
    none()?;
    // Whole seconds are told.
    let before = SystemTime::now() - Duration::from_secs(1);
    let running = Rxsteer::steering(&dut.netns, &roomy(&dut.name, &["--pin"]))?;
    let status = status_as_json(&bed)?;
    ensure!(status["pinned"] == Value::Array(Vec::new()), "{status}");
    ensure!(status["pid"] == running.child.id(), "{status}");
    running.stop(Signal::SIGKILL)?;
    let after = SystemTime::now();

    let status = status_as_json(&bed)?;
    ensure!(status["pid"].is_null(), "{status}");
    let pinned = &status["pinned"][0];
    ensure!(pinned["version"] == env!("CARGO_PKG_VERSION"), "{status}");
    ensure!(pinned["devices"][0]["device"] == *dut.name, "{status}");
    let since = pinned["devices"][0]["since"].as_str().context("a time")?;
    let time = humantime::parse_rfc3339(since)?;
    ensure!(before <= time && time <= after, "{since}");
    let (said, _, succeeded) = says(&bed, &["status"])?;
    let folder = pinned["folder"].as_str().context("a folder")?;
    let ways = [
        "`rxsteer run --pin` takes it over",
        "`rxsteer detach` ends it",
    ];
    let facts = ["steering goes on", folder, &dut.name, since];
    for part in facts.iter().chain(&ways) {
        ensure!(succeeded && said.contains(part), "no {part:?}: {said}");
    }
    // A start that goes on with it does not change the time.
    pinned_by_one_that_ended(&bed, "--pin")?;
    let status = status_as_json(&bed)?;
    ensure!(status["pinned"][0] == *pinned, "{status} {pinned}");
    ensure!(says(&bed, &["detach"])?.2);
    none()
}

#[test]
fn commands_that_ask_a_running_one_say_that_steering_is_pinned() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let asked: [(&[&str], &str); 7] = [
        (&["flows"], "lists its flows"),
        (&["explain", "0x1"], "explains its flows"),
        (&["explain", "9"], "explains its flows"),
        (&["explain", "pid:1"], "explains its flows"),
        (&["top", "--once"], "shows its rates"),
        (&["set", "--policy=rps"], "nothing has changed"),
        (&["reload"], "its options stay as they are"),
    ];
    // The control: nothing is pinned.
    let all_fail = |pinned: bool, folder: &str| -> Result<()> {
        for (args, so) in asked {
            let (_, errors, succeeded) = says(&bed, args)?;
            ensure!(!succeeded, "{args:?}");
            let parts = [
                "and steering goes on: it is pinned at ",
                so,
                folder,
                "`rxsteer detach` ends it",
            ];
            for part in parts {
                ensure!(
                    errors.contains(part) == pinned,
                    "{args:?}, {part:?}: {errors}"
                );
            }
            ensure!(
                errors.contains("no rxsteer is running in this network namespace"),
                "{errors}"
            );
            ensure!(errors.contains("start it with") != pinned, "{errors}");
        }
        Ok(())
    };
    all_fail(false, "`rxsteer run --pin")?;
    pinned_by_one_that_ended(&bed, "--pin")?;
    all_fail(true, "`rxsteer run --pin` takes it over")?;
    ensure!(says(&bed, &["detach"])?.2);
    pinned_by_one_that_ended(&bed, &format!("--pin={OWN}"))?;
    configure(&bed, &format!("pin = {OWN:?}"))?;
    all_fail(true, &format!("`rxsteer run --pin={OWN}` takes it over"))?;
    ensure!(says(&bed, &["detach"])?.2);
    all_fail(false, "`rxsteer run --pin")
}

#[test]
fn the_folder_of_the_configuration_is_found() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let pin = format!("--pin={OWN}");
    pinned_by_one_that_ended(&bed, &pin)?;
    // The control: nothing names the folder.
    let (said, _, succeeded) = says(&bed, &["detach"])?;
    ensure!(succeeded && said.contains("nothing is pinned"), "{said}");
    ensure!(attached(&bed)?.is_some());
    ensure!(!says(&bed, &["status"])?.2);

    configure(&bed, &format!("pin = {OWN:?}"))?;
    let (said, _, _) = says(&bed, &["status"])?;
    let way = format!("`rxsteer run {pin}` takes it over");
    ensure!(
        said.contains(&way) && said.contains("`rxsteer detach` ends it"),
        "{said}"
    );
    let (said, errors, succeeded) = says(&bed, &["detach"])?;
    ensure!(succeeded, "{errors}");
    ensure!(
        said.contains("1 device detached") && said.contains(OWN),
        "{said}"
    );
    ensure!(attached(&bed)?.is_none());
    Ok(())
}

#[test]
fn a_mistake_in_the_configuration_stops_no_detach() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    pinned_by_one_that_ended(&bed, "--pin")?;
    configure(&bed, "\npin = {}")?;
    let (said, errors, succeeded) = says(&bed, &["detach"])?;
    ensure!(
        succeeded && said.contains("1 device detached"),
        "{said} {errors}"
    );
    ensure!(errors.contains("rxsteer.toml:2: pin: "), "{errors}");
    ensure!(attached(&bed)?.is_none());
    Ok(())
}

/// The log of a start that must be refused.
fn refused(bed: &Testbed, args: &[&str]) -> Result<String> {
    let started = Rxsteer::start(&bed.link.dut.netns, args)?;
    Ok(started.err().context("it is refused")?.log)
}

#[test]
fn remedies_are_possible_with_pin() -> Result<()> {
    in_lab!();
    let bed = testbed()?;
    let (dut, tester) = (&bed.link.dut, &bed.link.tester);
    // By it the other end is found, whose tags native mode would lose.
    let _far = Container::start(&tester.netns)?;
    tester.ethtool.set_features(TX_VLAN, true)?;
    let name = &dut.name[..];
    let by_hand = format!("ethtool -K {} txvlan off", tester.name);
    for mode in ["--mode=auto", "--mode=native"] {
        let log = refused(&bed, &[name, "--pin", mode])?;
        ensure!(log.contains(&by_hand), "{log}");
        for impossible in ["--prepare", "--mode skb"] {
            ensure!(!log.contains(impossible), "{log}");
        }
    }
    // The control: without --pin that is a remedy.
    let log = refused(&bed, &[name, "--mode=native"])?;
    ensure!(log.contains("--prepare") && log.contains(&by_hand), "{log}");
    let log = refused(&bed, &["lo", "--pin"])?;
    ensure!(log.contains("which --pin excludes: leave --pin"), "{log}");
    // The remedy is one.
    tester.ethtool.set_features(TX_VLAN, false)?;
    pinned_by_one_that_ended(&bed, "--pin")?;
    ensure!(says(&bed, &["detach"])?.2);
    Ok(())
}
