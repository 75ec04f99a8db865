// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer doctor`: obstacles are printed, and the exit status tells of them.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::helpers::mounts::{bind, hide};
use crate::helpers::process::{RXSTEER, Rxsteer};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use rxlab::bench::setup::mode::Active;
use rxlab::lab::link::{End, Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::resident::Resident;
use rxlab::testing::not_run;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, mask};
use rxlab::{in_lab, test_name};
use rxsteer::daemon::options::{Mode, Options};
use rxsteer::host::ethtool::{TX_CHECKSUM, TX_SEGMENTATION, TX_VLAN};
use rxsteer::host::kthread;
use rxsteer::host::topology::Topology;
use rxsteer::host::{netdev, polling};
use serde_json::Value;

fn link(gro: bool) -> Result<Link> {
    let config = LinkConfig {
        gro,
        ..LinkConfig::default()
    };
    Link::new(&Netns::new("tester")?, &Netns::new("dut")?, &config)
}

/// Its output and exit status.
fn doctor(end: &End, args: &[&str]) -> Result<(String, Option<i32>)> {
    let mut command = end.netns.command(RXSTEER)?;
    let output = command.arg("doctor").args(args).output()?;
    let text = String::from_utf8([output.stdout, output.stderr].concat())?;
    Ok((text, output.status.code()))
}

#[test]
fn obstacles_are_reported() -> Result<()> {
    in_lab!();
    let link = link(true)?;
    let (dut, name) = (&link.dut, link.dut.name.as_str());
    for args in [&[][..], &[name]] {
        let (text, code) = doctor(dut, args)?;
        ensure!(code == Some(0), "{text}");
        for part in [
            "has all that steering needs",
            "this kernel has busy polling",
            &format!("{name} (veth, 1 receive queue) can be steered, in softirq mode\n"),
            "  against native mode: what the other end of",
        ] {
            ensure!(text.contains(part), "not {part:?}: {text}");
        }
    }
    // The other end can be reached: rxsteer can change it.
    let container = Resident::start(&link.tester.netns)?;
    link.tester.ethtool.set_features(TX_VLAN, true)?;
    let (text, _) = doctor(dut, &[name])?;
    ensure!(text.contains("; `--prepare` turns that off"), "{text}");
    link.tester.ethtool.set_features(TX_VLAN, false)?;
    let (text, _) = doctor(dut, &[name])?;
    ensure!(text.contains("`--mode native` is possible"), "{text}");
    ensure!(!text.contains("against native mode"), "{text}");
    drop(container);
    // Its own program is no obstacle.
    let native = Options {
        mode: Mode::Native,
        ..Options::new([name])
    };
    let active = Active::steer(dut, native)?;
    let (text, code) = doctor(dut, &[name])?;
    ensure!(
        code == Some(0) && text.contains(") is steered by "),
        "{text}"
    );
    active.stop()?;
    // Softirq mode has no XDP program; the control is the line before the start.
    ensure!(!doctor(dut, &[name])?.0.contains("is steered by"));
    let softirq = Rxsteer::steering(&dut.netns, &[name, "--mode=softirq"])?;
    let (text, code) = doctor(dut, &[name])?;
    let words = format!(
        ") is steered by rxsteer (pid {}) in softirq mode\n",
        softirq.child.id()
    );
    ensure!(code == Some(0) && text.contains(&words), "{text}");
    ensure!(softirq.stop(Signal::SIGTERM)?.code == Some(0));

    let rps = format!("/sys/class/net/{name}/queues/rx-0/rps_cpus");
    dut.netns.run(|| Ok(fs::write(&rps, "1")?))?;
    let (text, code) = doctor(dut, &[name])?;
    ensure!(code == Some(1), "{text}");
    for part in ["can't be steered as it is", "  kernel RPS is on"] {
        ensure!(text.contains(part), "not {part:?}: {text}");
    }
    // Without device names, obstacles don't change the exit status.
    let (json, code) = doctor(dut, &["--json"])?;
    ensure!(code == Some(0), "{json}");
    let answer: Value = serde_json::from_str(&json)?;
    ensure!(answer["in_the_way"] == false, "{json}");
    ensure!(answer["devices"][0]["mode"].is_null(), "{json}");
    ensure!(answer["devices"][0]["native"][0]["fatal"] == true, "{json}");

    let (text, code) = doctor(dut, &["eth-none"])?;
    ensure!(
        code == Some(1) && text.contains("there are: lo, "),
        "{text}"
    );
    Ok(())
}

#[test]
fn what_napi_settings_amount_to_is_said() -> Result<()> {
    in_lab!(napi);
    let link = link(true)?;
    let (dut, name) = (&link.dut, link.dut.name.as_str());
    let says = |words: &str| {
        let (text, _) = doctor(dut, &[name])?;
        ensure!(text.contains(words), "not {words:?}: {text}");
        anyhow::Ok(())
    };
    let set = |file: &str, value: &str| {
        let path = format!("/sys/class/net/{name}/{file}");
        dut.netns
            .run(|| fs::write(&path, value).context(path.clone()))
    };
    says("NAPI: interrupts are not deferred, which is the default.")?;
    set("napi_defer_hard_irqs", "2")?;
    says("no timer polls: it has no effect; `rxsteer napi")?;
    set("gro_flush_timeout", "200000")?;
    says("polls every 200 us")?;
    set("threaded", "1")?;
    says("NAPI: a kernel thread polls")?;

    let without = self::link(false)?;
    let (text, _) = doctor(&without.dut, &[])?;
    ensure!(text.contains("no NAPI instances; `ethtool -K"), "{text}");
    Ok(())
}

#[test]
fn queues_spread_over_all_cpus_need_no_steering() -> Result<()> {
    in_lab!();
    if Topology::host().housekeeping()? != mask(&[POLLING_CPU, OTHER_CPU]) {
        let more = "this host has more CPUs than a link has queues";
        not_run(test_name!(), more);
        return Ok(());
    }
    let mut bed = Testbed::new(&LinkConfig {
        queues: 2,
        ..LinkConfig::default()
    })?;
    let says = |bed: &Testbed| {
        let (text, _) = doctor(&bed.link.dut, &[])?;
        anyhow::Ok(text.contains("nothing is to be won by steering"))
    };
    // Control: both queues are polled on one CPU.
    assert!(!says(&bed)?);
    bed.nic.move_to(1, OTHER_CPU)?;
    assert!(says(&bed)?);
    Ok(())
}

/// Subjects and commands of what it recommends for the device.
fn recommended(end: &End) -> Result<Vec<(String, String)>> {
    let (json, _) = doctor(end, &[&end.name, "--json"])?;
    let answer: Value = serde_json::from_str(&json).with_context(|| json.clone())?;
    let all = answer["recommendations"].as_array().context("a list")?;
    let of_device = all.iter().filter(|one| one["device"] == *end.name);
    let text = |value: &Value| value.as_str().map(str::to_owned).context("text");
    let pairs = of_device.map(|one| Ok((text(&one["subject"])?, text(&one["command"])?)));
    pairs.collect()
}

/// It recommends one change, the expected one, and nothing after the command has run.
fn helps(end: &End, subject: &str, command: &str) -> Result<()> {
    let expected = vec![(subject.to_owned(), command.to_owned())];
    ensure!(recommended(end)? == expected, "{:?}", recommended(end)?);
    let (text, _) = doctor(end, &[&end.name])?;
    for part in ["what would help, in the order of gain\n  1. ", command] {
        ensure!(text.contains(part), "not {part:?}: {text}");
    }
    run(end, command)?;
    ensure!(recommended(end)?.is_empty(), "{:?}", recommended(end)?);
    let (text, _) = doctor(end, &[&end.name])?;
    ensure!(!text.contains(command), "{text}");
    Ok(())
}

/// Runs a shell command in the device's namespace.
fn run(end: &End, command: &str) -> Result<()> {
    let output = end.netns.command("sh")?.args(["-c", command]).output()?;
    ensure!(output.status.success(), "{command}: {output:?}");
    Ok(())
}

/// Whether the host has a program; reports the test as not run if not.
fn has(program: &str, test: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        not_run(test, &format!("there is no {program}"));
    }
    found
}

#[test]
fn unused_queues_and_gro_come_by_the_commands() -> Result<()> {
    in_lab!();
    if !has("ethtool", test_name!()) {
        return Ok(());
    }
    let link = Link::new(
        &Netns::new("tester")?,
        &Netns::new("dut")?,
        &LinkConfig {
            queues: 2,
            ..LinkConfig::default()
        },
    )?;
    let (dut, name) = (&link.dut, &link.dut.name);
    // The control: nothing is recommended without the fault.
    ensure!(recommended(dut)?.is_empty(), "{:?}", recommended(dut)?);
    run(dut, &format!("ethtool -L {name} rx 1"))?;
    let command = format!("ethtool -L {name} rx 2");
    let told = recommended(dut)?;
    match &told[..] {
        // Linux 6.8 and later.
        [_] => helps(dut, "channels", &command)?,
        _ => {
            ensure!(
                netdev::napis(1)?.is_none() && told.is_empty(),
                "the instances are known: {told:?}"
            );
            not_run(
                test_name!(),
                "before Linux 6.8 a veth does not show its NAPI instances",
            );
        }
    }
    let without = self::link(false)?;
    let _container = Resident::start(&without.tester.netns)?;
    let command = format!("ethtool -K {} gro on", without.dut.name);
    helps(&without.dut, "gro", &command)
}

#[test]
fn kernel_rps_goes_by_the_command() -> Result<()> {
    in_lab!();
    let link = link(true)?;
    let (dut, name) = (&link.dut, &link.dut.name);
    let file = format!("/sys/class/net/{name}/queues/rx-0/rps_cpus");
    ensure!(recommended(dut)?.is_empty(), "{:?}", recommended(dut)?);
    run(dut, &format!("echo 1 > {file}"))?;
    let command = format!("for f in {file}; do echo 0 > \"$f\"; done");
    helps(dut, "kernel-rps", &command)
}

#[test]
fn napi_threads_on_one_cpu_are_moved_by_the_command() -> Result<()> {
    in_lab!();
    if !has("taskset", test_name!()) {
        return Ok(());
    }
    let mut bed = Testbed::new(&LinkConfig {
        queues: 2,
        ..LinkConfig::default()
    })?;
    let dut = &bed.link.dut;
    let threads = kthread::numbered(Path::new("/proc"), &format!("napi/{}-", dut.name));
    let [_, (_, second)] = threads[..] else {
        bail!("not two threads: {threads:?}");
    };
    let to = Topology::host().housekeeping()?;
    let to = to
        .without(&mask(&[POLLING_CPU]))
        .first()
        .context("another CPU")?;
    helps(dut, "interrupts", &format!("taskset -cp {to} {second}"))?;
    // The control: with each thread on a CPU of its own nothing is recommended.
    bed.nic.move_to(0, OTHER_CPU)?;
    bed.nic.move_to(1, POLLING_CPU)?;
    ensure!(recommended(&bed.link.dut)?.is_empty());
    Ok(())
}

#[test]
fn a_namespace_that_has_ended_meanwhile_is_not_there() -> Result<()> {
    in_lab!();
    let link = link(true)?;
    let (dut, folder) = (&link.dut, tempfile::tempdir()?);
    let [path, plain] = ["netns", "plain"].map(|name| folder.path().join(name));
    fs::write(&path, "")?;
    fs::write(&plain, "")?;
    // What `ip netns del` leaves for a moment: a path of the list of mounts leads to a plain file.
    let other = Netns::new("other")?;
    let netns = format!("/proc/{}/fd/{}", std::process::id(), other.fd().as_raw_fd());
    bind(&dut.netns, Path::new(&netns), &path)?;
    bind(&dut.netns, &plain, &path)?;
    let mounts = dut
        .netns
        .run(|| Ok(fs::read_to_string("/proc/thread-self/mountinfo")?))?;
    let listed =
        |line: &&str| line.contains(" net:[") && line.contains(path.to_str().unwrap_or("?"));
    ensure!(mounts.lines().any(|line| listed(&line)), "{mounts}");
    let _container = Resident::start(&link.tester.netns)?;
    // The one that is there is found all the same.
    let (text, code) = doctor(dut, &[&dut.name])?;
    ensure!(
        code == Some(0) && text.contains("`--mode native` is possible"),
        "{text}"
    );
    Ok(())
}

/// Gives the other end of a link a name.
fn name_peer(link: &Link, name: &OsStr) -> Result<()> {
    let old = OsString::from(&link.tester.name);
    for args in [
        &[&old, OsStr::new("down")][..],
        &[&old, OsStr::new("name"), name],
        &[name, OsStr::new("up")],
    ] {
        let mut ip = link.tester.netns.command("ip")?;
        let done = ip.args(["link", "set", "dev"]).args(args).output()?;
        ensure!(done.status.success(), "{name:?}: {done:?}");
    }
    Ok(())
}

#[test]
fn names_that_a_container_chooses_do_no_harm() -> Result<()> {
    in_lab!();
    if !has("ip", test_name!()) || !has("ethtool", test_name!()) {
        return Ok(());
    }
    let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
    let good = Link::new(&tester, &dut, &LinkConfig::default())?;
    let _container = Resident::start(&tester)?;
    for (id, name) in (1..).zip([&b"\xff\xfe"[..], b";>harm;#", b"$(>harm)", b"\x1b[2J'"]) {
        let name = OsStr::from_bytes(name);
        let config = LinkConfig {
            id,
            ..LinkConfig::default()
        };
        let link = Link::new(&tester, &dut, &config)?;
        link.tester.ethtool.set_features(TX_CHECKSUM, true)?;
        name_peer(&link, name)?;
        let (text, code) = doctor(&link.dut, &[])?;
        ensure!(code == Some(0), "{name:?}: {text}");
        ensure!(
            !text.contains(|c: char| c.is_control() && c != '\n'),
            "{text:?}"
        );
        for (end, native) in [
            (&good.dut, "`--mode native` is"),
            (&link.dut, "against native"),
        ] {
            let words = format!(
                "{} (veth, 1 receive queue) can be steered, in softirq mode\n  {native}",
                end.name
            );
            ensure!(text.contains(&words), "{name:?}: {text}");
        }
        // The printed command does what it says, and nothing else.
        let command = text
            .split('`')
            .find(|words| words.starts_with("nsenter --net="));
        let command = command.with_context(|| text.clone())?;
        let folder = tempfile::tempdir()?;
        let mut bash = dut.command("bash")?;
        let script = format!("cd {} && {command}", folder.path().display());
        let output = bash.args(["-c", &script]).output()?;
        ensure!(output.status.success(), "{command}: {output:?}");
        ensure!(fs::read_dir(folder.path())?.count() == 0, "{command}");
        let (text, _) = doctor(&link.dut, &[&link.dut.name])?;
        ensure!(
            text.contains("`--mode native` is possible"),
            "{name:?}: {text}"
        );
        for (devices, steered) in [
            (&[&good.dut.name[..], &link.dut.name][..], 2),
            (&["nic*"], usize::from(id) + 1),
        ] {
            let steering = Rxsteer::steering(&dut, &[devices, &["--mode=auto"]].concat())?;
            let status = steering.status()?;
            ensure!(status.devices.len() == steered, "{status:?}");
            ensure!(steering.stop(Signal::SIGTERM)?.code == Some(0));
        }
    }
    Ok(())
}

#[test]
fn a_device_that_can_not_be_read_is_left_out() -> Result<()> {
    in_lab!();
    let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
    let [good, bad] = [0, 1].map(|id| {
        let config = LinkConfig {
            id,
            ..LinkConfig::default()
        };
        Link::new(&tester, &dut, &config)
    });
    let (good, bad) = (good?.dut, bad?.dut);
    hide(&dut, &format!("/sys/devices/virtual/net/{}", bad.name))?;
    let (text, code) = doctor(&good, &[])?;
    ensure!(code == Some(0), "{text}");
    for words in [
        format!("ERROR {} is left out: ", bad.name),
        format!("{} (veth, 1 receive queue) can be steered", good.name),
    ] {
        ensure!(text.contains(&words), "not {words:?}: {text}");
    }
    // The control: one that is asked for is an error.
    let (text, code) = doctor(&good, &[&bad.name])?;
    ensure!(code == Some(1) && !text.contains("this host"), "{text}");
    Ok(())
}

#[test]
fn an_altname_is_as_good_as_the_name() -> Result<()> {
    in_lab!();
    if !has("ip", test_name!()) {
        return Ok(());
    }
    let link = link(true)?;
    let (dut, name) = (&link.dut, &link.dut.name);
    let rxsteer = |args: &[&str]| {
        let output = dut.netns.command(RXSTEER)?.args(args).output()?;
        let text = String::from_utf8([output.stdout, output.stderr].concat())?;
        anyhow::Ok((text, output.status.success()))
    };
    // A short one, and one that is longer than a name may be.
    for alt in ["uplink0", "uplink-to-the-switch-of-the-rack"] {
        let (text, found) = rxsteer(&["doctor", alt])?;
        // The control: before, it is the name of no device.
        ensure!(!found && text.contains("no network device"), "{text}");
        run(
            dut,
            &format!("ip link property add dev {name} altname {alt}"),
        )?;
        let (text, found) = rxsteer(&["doctor", alt])?;
        ensure!(
            found && text.contains(&format!("\n{name} (veth,")),
            "{text}"
        );
        let (text, found) = rxsteer(&["advise", alt, "--no-attach", "--seconds=0.1"])?;
        ensure!(
            found && text.contains(&format!("`rxsteer advise {name}`")),
            "{text}"
        );
        let queue = format!("--queue={alt}:0=0");
        let steering = Rxsteer::steering(&dut.netns, &[alt, "--mode=auto", &queue])?;
        let status = steering.status()?;
        ensure!(status.devices[0].device == *name, "{status:?}");
        let queue = &status.devices[0].queues[0];
        ensure!(queue.rps_cpus == "0", "{queue:?}");
        for args in [
            &["flows", "--device", alt][..],
            &["set", alt, "--rps-cpus=0"],
        ] {
            let (text, done) = rxsteer(args)?;
            ensure!(done, "{args:?}: {text}");
        }
        ensure!(steering.stop(Signal::SIGTERM)?.code == Some(0));
    }
    Ok(())
}

/// The id of the NAPI instance by which a datagram from the other end comes.
fn napi_of_a_datagram(link: &Link) -> Result<Option<u32>> {
    let socket = link
        .dut
        .netns
        .run(|| Ok(UdpSocket::bind((link.dut.ipv4, 0))?))?;
    socket.set_read_timeout(Some(Duration::from_secs(20)))?;
    let to = socket.local_addr()?;
    (link.tester.netns).run(|| Ok(UdpSocket::bind("0.0.0.0:0")?.send_to(b"datagram", to)?))?;
    socket.recv(&mut [0; 16])?;
    Ok(polling::napi_id(&socket)?)
}

#[test]
fn gro_gives_a_veth_napi_instances_only_if_the_other_end_segments() -> Result<()> {
    in_lab!();
    if !has("ethtool", test_name!()) {
        return Ok(());
    }
    let link = link(true)?;
    let (dut, name) = (&link.dut, &link.dut.name);
    let bypass = format!("NAPI: packets bypass the NAPI instances of {name} ");
    let (text, _) = doctor(dut, &[name])?;
    ensure!(
        text.contains(&format!("{bypass}unless its other end")),
        "{text}"
    );
    let _container = Resident::start(&link.tester.netns)?;
    link.tester.ethtool.set_features(TX_CHECKSUM, true)?;
    link.tester.ethtool.set_features(TX_SEGMENTATION, true)?;
    ensure!(napi_of_a_datagram(&link)?.is_none());
    let (text, _) = doctor(dut, &[name])?;
    ensure!(
        text.contains(&format!("{bypass}while its other end")),
        "{text}"
    );
    // Without GRO there is no gain in it either.
    run(dut, &format!("ethtool -K {name} gro off"))?;
    ensure!(recommended(dut)?.is_empty(), "{:?}", recommended(dut)?);
    run(dut, &format!("ethtool -K {name} gro on"))?;
    // The control: the command ends that.
    let mut commands = text.split('`');
    let command = commands.find(|command| command.ends_with(" tso off"));
    run(dut, command.with_context(|| text.clone())?)?;
    ensure!(napi_of_a_datagram(&link)?.is_some());
    let (text, _) = doctor(dut, &[name])?;
    ensure!(!text.contains(&bypass), "{text}");
    Ok(())
}
