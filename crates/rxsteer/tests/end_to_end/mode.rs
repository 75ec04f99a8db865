// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configurations with a name (`rxsteer mode`).

use std::fs;
use std::net::UdpSocket;
use std::process::{Command, Output};

use crate::helpers::process::*;
use anyhow::{Result, anyhow, bail, ensure};
use clap::ValueEnum;
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::*;
use rxsteer::cli::mode::Name;
use rxsteer::host::polling::Polling;

fn text(output: Output) -> Result<String> {
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

fn run(args: &[&str]) -> Result<String> {
    text(Command::new(RXSTEER).args(args).output()?)
}

/// The modes' names.
fn names() -> Vec<String> {
    let values = Name::value_variants().iter();
    let values = values.filter_map(ValueEnum::to_possible_value);
    values.map(|value| value.get_name().to_owned()).collect()
}

#[test]
fn each_mode_is_shown_and_listed() -> Result<()> {
    let list = run(&["mode"])?;
    for name in names() {
        ensure!(list.contains(&name), "{list}");
        let shown = run(&["mode", &name, "--show"])?;
        ensure!((3..12).contains(&shown.lines().count()), "{shown}");
        let file = tempfile::NamedTempFile::with_suffix(".toml")?;
        fs::write(&file, shown)?;
        run(&["check", &file.path().to_string_lossy()])?;
    }
    Ok(())
}

#[test]
fn each_mode_steers() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let mut policies = Vec::new();
    for name in names() {
        let shown = run(&["mode", &name, "--show"])?;
        ensure!(!shown.contains("cgroup = \"/\""), "all processes: {shown}");
        let file = tempfile::NamedTempFile::with_suffix(".toml")?;
        fs::write(&file, shown)?;
        let mut command = dut.netns.command(RXSTEER)?;
        command
            .args(["run", &dut.name, "--config"])
            .arg(file.path());
        let started = Rxsteer::spawn(&dut.netns, command, true)?;
        let running = started.map_err(|ended| anyhow::anyhow!("{name}: {ended:?}"))?;
        policies.push(running.status()?.policy);
        let ended = running.stop(Signal::SIGTERM)?;
        ensure!(ended.code == Some(0), "{name}: {ended:?}");
    }
    // The control: the file decides.
    let has = |policy: &str| policies.iter().any(|has| has == policy);
    ensure!(has("rps+adapt") && has("adaptive"), "{policies:?}");
    Ok(())
}

/// The sockets of the processes that the mode's rule means are set once devices are steered, and not by a
/// start that fails.
#[test]
fn sockets_poll_after_the_start_alone() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let (socket, pid) = (UdpSocket::bind("127.0.0.1:0")?, std::process::id());
    let polls = format!("process {pid} ");
    let shown = run(&["mode", "latency", "--show"])?;
    let rule = shown.lines().map(|line| match line.starts_with("cgroup") {
        true => format!("pid = {pid}\n"),
        false => format!("{line}\n"),
    });
    let file = tempfile::NamedTempFile::with_suffix(".toml")?;
    fs::write(&file, rule.collect::<String>())?;
    let start = |args: &[&str]| {
        let mut command = dut.netns.command(RXSTEER)?;
        command
            .args(["run", "--config"])
            .arg(file.path())
            .args(args);
        Rxsteer::spawn(&dut.netns, command, true)
    };
    let port = "--metrics=192.0.2.1:14779";
    for args in [
        &["no-such-device"][..],
        &[&dut.name, "--queue=7=0"],
        &[&dut.name, port],
    ] {
        let Err(ended) = start(args)? else {
            bail!("it starts with {args:?}");
        };
        ensure!(!ended.log.contains(&polls), "{args:?}: {ended:?}");
    }
    // The control: with the right device they poll.
    let running = start(&[&dut.name])?.map_err(|ended| anyhow!("{ended:?}"))?;
    until("the socket polls", || {
        let polling = Polling::of_socket(&socket)?;
        Ok((polling.usecs == 50).then_some(()))
    })?;
    let ended = running.stop(Signal::SIGTERM)?;
    ensure!(ended.log.contains(&polls), "{ended:?}");
    assert_eq!(Polling::of_socket(&socket)?.usecs, 0);
    Ok(())
}

/// In a mount namespace with an empty /etc.
#[test]
fn a_mode_is_written_and_removed() -> Result<()> {
    in_lab!();
    let script = format!(
        "set -e; mount -t tmpfs none /etc
         {RXSTEER} mode router; {RXSTEER} mode; cat /etc/rxsteer/rxsteer.d/10-mode.toml
         for no in '' '--cgroup /'; do if {RXSTEER} mode latency $no; then exit 1; fi; done
         {RXSTEER} mode latency --cgroup /a.slice; {RXSTEER} mode; stat -c %a /etc/rxsteer/rxsteer.d/*
         cat /etc/rxsteer/rxsteer.d/10-mode.toml
         {RXSTEER} mode --remove; {RXSTEER} mode; ls -A /etc/rxsteer/rxsteer.d | wc -l"
    );
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script])
        .output()?;
    let said = text(output)?;
    for part in [
        "* router ",
        "policy = \"rps+adapt\"",
        "* latency ",
        "cgroup = \"/a.slice\"",
        "\n644\n",
        "  router ",
        "\n0\n",
    ] {
        ensure!(said.contains(part), "{part}: {said}");
    }
    Ok(())
}
