// SPDX-License-Identifier: MIT OR Apache-2.0
//! The configuration is read again while packets arrive: all of it is applied, or nothing.

use std::fs;
use std::path::PathBuf;

use crate::helpers::pinned::{folder, mount_bpffs};
use crate::helpers::process::*;
use crate::helpers::user::Locked;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{End, LinkConfig};
use rxlab::testing::testbed::*;
use tempfile::TempDir;

/// rxsteer with a configuration file.
struct Configured {
    rxsteer: Rxsteer,
    file: PathBuf,
    _folder: TempDir,
}

/// A configuration for this device under which no backlog overflows.
fn roomy_text(dut: &End, more: &str) -> String {
    format!(
        "devices = [\"{}\"]\nmode = \"native\"\nbacklog = 16368\nflow-limit = 0\n{more}",
        dut.name
    )
}

impl Configured {
    fn start(dut: &End, text: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("rxsteer.toml");
        fs::write(&file, text)?;
        let mut command = dut.netns.command(RXSTEER)?;
        command.args(["run", "--config"]).arg(&file);
        let started = Rxsteer::spawn(&dut.netns, command, true)?;
        Ok(Self {
            rxsteer: started.map_err(|ended| anyhow::anyhow!("{ended:?}"))?,
            file,
            _folder: folder,
        })
    }

    fn write(&self, text: &str) -> Result<()> {
        Ok(fs::write(&self.file, text)?)
    }

    /// What `rxsteer reload` prints.
    fn reload(&self) -> Result<String> {
        let output = rxsteer(&self.rxsteer.netns, &["reload"])?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// The error of `rxsteer reload`.
    fn refuses(&self) -> Result<String> {
        let output = rxsteer(&self.rxsteer.netns, &["reload"])?;
        ensure!(output.status.code() == Some(1), "{output:?}");
        Ok(String::from_utf8(output.stderr)?)
    }

    /// Policy, limit of backlogs, and the first queue's CPUs.
    fn settings(&self) -> Result<(String, u32, String)> {
        let status = self.rxsteer.status()?;
        let queue = &status.devices[0].queues[0];
        let cpus = queue.rps_cpus.to_string();
        Ok((status.policy.to_string(), status.backlog_limit, cpus))
    }
}

#[test]
fn live_changes_lose_and_reorder_nothing() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let text = |more: &str| roomy_text(dut, more);
    let running = Configured::start(dut, &text("policy = \"rps\"\nrps-cpus = \"1\""))?;
    let flows = UdpFlows::to(dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(20_000);
    let wire = Generator::start(&bed.link, 0, &paced)?;
    redirects(&running.rxsteer)?;
    for round in 0..10 {
        running.write(&text("policy = \"rfs\"\nrps-cpus = \"0-1\""))?;
        let said = running.reload()?;
        ensure!(said.contains("CPUs 0-1 (before: 1)"), "{said}");
        ensure!(said.contains("policy rfs (before: rps)"), "{said}");
        let now = ("rfs".to_owned(), 16368, "0-1".to_owned());
        assert_eq!(running.settings()?, now);
        sends(&wire, 500)?;
        running.write(&text(
            "policy = \"rps\"\nrps-cpus = \"1\"\nrps-flow-cnt = 8192",
        ))?;
        running.rxsteer.signal(Signal::SIGHUP)?;
        let before = ("rps".to_owned(), 16368, "1".to_owned());
        until("the signal is followed", || {
            Ok((running.settings()? == before).then_some(()))
        })?;
        sends(&wire, 500).with_context(|| format!("round {round}"))?;
    }
    // The control: what did not change is not reported.
    let said = running.reload()?;
    assert_eq!(said, "all settings are as before\n");
    let sent = wire.stop()?;
    let account = running.rxsteer.at_rest()?;
    ensure!(account.redirected > 5_000, "{account:?}");
    assert_eq!((sent.lost, account.lost), (0, 0));
    let ended = running.rxsteer.stop(Signal::SIGTERM)?;
    ensure!(!ended.log.contains("overtake"), "{ended:?}");
    all_arrive_in_order(sink, sent.sent - account.dropped - account.shed)
}

#[test]
fn a_start_anew_loses_and_reorders_nothing() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let text = |backlog: u32| {
        roomy_text(dut, "policy = \"rps\"\nrps-cpus = \"1\"").replace("16368", &backlog.to_string())
    };
    let running = Configured::start(dut, &text(16000))?;
    let flows = UdpFlows::to(dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(20_000);
    let wire = Generator::start(&bed.link, 0, &paced)?;
    let mut dropped = 0;
    for round in 0..10 {
        redirects(&running.rxsteer).with_context(|| format!("round {round}: {}", wire.sent()))?;
        running.write(&text(16001 + round))?;
        let said = running.reload()?;
        ensure!(said.contains("started anew"), "{said}");
        assert_eq!(running.settings()?.1, 16001 + round);
    }
    redirects(&running.rxsteer)?;
    let sent = wire.stop()?;
    running.rxsteer.at_rest()?;
    let ended = running.rxsteer.stop(Signal::SIGTERM)?;
    for account in accounts(&ended.log)? {
        ensure!(account.redirected > 0 && account.lost == 0, "{ended:?}");
        dropped += account.dropped + account.shed;
    }
    assert_eq!(accounts(&ended.log)?.len(), 11);
    assert_eq!(sent.lost, 0);
    all_arrive_in_order(sink, sent.sent - dropped)
}

#[test]
fn a_configuration_that_is_not_possible_changes_nothing() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let text = roomy_text(dut, "policy = \"rps\"\nrps-cpus = \"1\"");
    let running = Configured::start(dut, &text)?;
    let before = running.settings()?;
    for (mistake, why) in [
        (text.replace("\"rps\"", "\"rsp\""), "rxsteer.toml:5: "),
        (
            text.replace("\"rps\"", "\"rfs\"\nqueue = [\"7=1\"]"),
            "no receive queue 7",
        ),
        (
            text.replace("rps-cpus = \"1\"", "rps-cpus = \"63\""),
            "online",
        ),
        (text.replace(&dut.name, "nosuch0"), "nosuch0"),
        (
            text.replace("16368", "16000\nmetrics = \"192.0.2.1:1\""),
            "192.0.2.1:1",
        ),
    ] {
        running.write(&mistake)?;
        let said = running.refuses()?;
        ensure!(said.contains(why), "{said}");
        assert_eq!(running.settings()?, before, "{mistake}");
        // Steering goes on.
        let redirected = running.rxsteer.sums()?.redirected;
        until("packets are redirected", || {
            bed.send(Frames::Udp(UdpFlows::to(dut, 100)), 200)?;
            Ok((running.rxsteer.sums()?.redirected > redirected).then_some(()))
        })
        .with_context(|| mistake.clone())?;
    }
    // The control: the same file without the mistake.
    running.write(&text.replace("16368", "16000"))?;
    ensure!(running.reload()?.contains("started anew"));
    assert_eq!(running.settings()?.1, 16000);
    let ended = running.rxsteer.stop(Signal::SIGTERM)?;
    assert_eq!(
        ended.log.matches("the options stay as before").count(),
        5,
        "{ended:?}"
    );
    // The missing device and the address are found when steering has ended.
    assert_eq!(
        ended.log.matches("counts from zero").count(),
        2,
        "{ended:?}"
    );
    assert_eq!(attached(&bed)?, None);
    Ok(())
}

#[test]
fn metrics_come_and_go() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let text = |more: &str| roomy_text(dut, more);
    let running = Configured::start(dut, &text(""))?;
    let listens = |port: u16| {
        let connects = || Ok(std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        dut.netns.run(connects)
    };
    for port in [14_801, 14_802] {
        ensure!(!listens(port)?);
        running.write(&text(&format!("metrics = \"127.0.0.1:{port}\"")))?;
        running.reload()?;
        ensure!(listens(port)?);
    }
    ensure!(!listens(14_801)?);
    running.write(&text(""))?;
    running.reload()?;
    ensure!(!listens(14_802)?);
    Ok(())
}

/// Files of devices can be opened, and thus locked, by every user.
#[test]
fn a_user_holds_up_neither_start_nor_reload() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let files = ["flags", "ifindex", "gro_flush_timeout"];
    let files = files.map(|file| format!("/sys/class/net/{}/{file}", dut.name));
    let _locked = Locked::by_nobody(&dut.netns, &files)?;
    let running = Configured::start(dut, &roomy_text(dut, ""))?;
    running.write(&roomy_text(dut, "prepare = true"))?;
    let said = running.reload()?;
    ensure!(said.contains("started anew"), "{said}");
    let ended = running.rxsteer.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    Ok(())
}

#[test]
fn pins_come_and_go() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let [plain, pinned] = ["", "pin = true\n"].map(|more| roomy_text(dut, more));
    mount_bpffs(&dut.netns)?;
    let folder = folder(&dut.netns)?;
    let there = || dut.netns.run(|| Ok(folder.exists()));
    let running = Configured::start(dut, &plain)?;
    for (text, is_pinned) in [(&pinned, true), (&plain, false), (&pinned, true)] {
        running.write(text)?;
        let said = running.reload()?;
        ensure!(said.contains("started anew"), "{said}");
        assert_eq!(there()?, is_pinned);
    }
    running.write(&pinned.replace("16368", "16000"))?;
    running.reload()?;
    assert_eq!(running.settings()?.1, 16000);
    let ended = running.rxsteer.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    // It goes on, until it is ended.
    ensure!(attached(&bed)?.is_some() && there()?);
    let detached = rxsteer(&dut.netns, &["detach"])?;
    ensure!(detached.status.success(), "{detached:?}");
    ensure!(attached(&bed)?.is_none() && !there()?);
    Ok(())
}

#[test]
fn without_a_file_there_is_nothing_to_read() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let nobody = rxsteer(&dut.netns, &["reload"])?;
    assert_eq!(nobody.status.code(), Some(1));
    ensure!(String::from_utf8(nobody.stderr)?.contains("no rxsteer is running"));
    let running = Rxsteer::steering(&dut.netns, &[&dut.name])?;
    let refused = rxsteer(&dut.netns, &["reload"])?;
    assert_eq!(refused.status.code(), Some(1));
    let why = String::from_utf8(refused.stderr)?;
    ensure!(why.contains("--config"), "{why}");
    // SIGHUP is a stop signal then.
    let ended = running.stop(Signal::SIGHUP)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    Ok(())
}
