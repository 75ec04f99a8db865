// SPDX-License-Identifier: MIT OR Apache-2.0
//! rxsteer as a service: what it tells the service manager, and what its unit (dist/rxsteer.service)
//! allows.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::helpers::mounts::read_only;
use crate::helpers::process::*;
use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::*;
use rxsteer::api::client;
use rxsteer::host::privileges::NEEDED;

const UNIT: &str = include_str!("../../../../dist/rxsteer.service");
const MANUAL: &str = include_str!("../../../../docs/manual/security.md");

/// The value of a setting of the unit.
fn setting(name: &str) -> Result<&'static str> {
    let value = |line: &'static str| line.strip_prefix(name)?.strip_prefix('=');
    UNIT.lines()
        .find_map(value)
        .with_context(|| format!("the unit has no {name}="))
}

/// What a manager is told from start to stop, in order; with its watchdog, or without.
fn told(watchdog: bool) -> Result<Vec<String>> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path)?;
    manager.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut command = Rxsteer::command(&dut.netns, &[&dut.name])?;
    command.env("NOTIFY_SOCKET", &path);
    if watchdog {
        command.env("WATCHDOG_USEC", "30000000");
    }
    let next = || -> Result<String> {
        let mut message = [0; 256];
        let length = manager.recv(&mut message)?;
        Ok(String::from_utf8_lossy(&message[..length])
            .trim()
            .to_owned())
    };
    let rxsteer = Rxsteer::spawn(&dut.netns, command, true)?;
    let rxsteer = rxsteer.map_err(|ended| anyhow::anyhow!("{ended:?}"))?;
    let mut told = Vec::new();
    while told.last().is_none_or(|last| last != "READY=1") {
        told.push(next()?);
    }
    ensure!(attached(&bed)?.is_some(), "ready before it steers");
    if watchdog {
        let mut alive = 0;
        while alive < 2 {
            let message = next()?;
            alive += u32::from(message == "WATCHDOG=1");
            told.push(message);
        }
    } else {
        // It looks twice at what changes without an event.
        std::thread::sleep(Duration::from_millis(2500));
    }
    ensure!(rxsteer.stop(Signal::SIGTERM)?.code == Some(0));
    while told.last().is_none_or(|last| last != "STOPPING=1") {
        told.push(next()?);
    }
    Ok(told)
}

#[test]
fn a_manager_is_told() -> Result<()> {
    in_lab!();
    let with = told(true)?;
    let alive = with.iter().filter(|message| *message == "WATCHDOG=1");
    ensure!(alive.count() >= 2, "{with:?}");
    // Also while a start takes long: when the device is examined, twice, loaded and attached.
    let start = with.iter().take_while(|message| *message != "READY=1");
    ensure!(start.count() >= 4, "{with:?}");
    // The control: no watchdog, no sign of life.
    let without = told(false)?;
    ensure!(without == ["READY=1", "STOPPING=1"], "{without:?}");
    Ok(())
}

#[test]
fn a_mistake_in_the_configuration_is_not_tried_again() -> Result<()> {
    let run = |device: &str, option: &str| -> Result<Option<i32>> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(&file, format!("devices = [{device:?}]\n{option} = true"))?;
        let mut command = Command::new(RXSTEER);
        command.args(["run", "--config"]).arg(file.path());
        Ok(command.stderr(Stdio::null()).status()?.code())
    };
    ensure!(setting("Restart")? == "on-failure");
    let prevented: i32 = setting("RestartPreventExitStatus")?.parse()?;
    ensure!(run("no-such-device", "polcy")? == Some(prevented));
    // The control: a device that is absent is waited for by new starts.
    let absent = run("no-such-device", "dry-run")?;
    ensure!(absent != Some(prevented) && absent != Some(0), "{absent:?}");
    Ok(())
}

/// rxsteer with these capabilities alone, as names in setpriv(1).
fn with_capabilities(bed: &Testbed, names: &[String]) -> Result<Result<Rxsteer, Ended>> {
    let dut = &bed.link.dut;
    let only: Vec<_> = names.iter().map(|name| format!("+{name}")).collect();
    // Without drops on a busy machine.
    let plain = Rxsteer::command(&dut.netns, &roomy(&dut.name, &["--rps-cpus=0-1"]))?;
    let mut command = dut.netns.command("setpriv")?;
    command
        .arg("--no-new-privs")
        .arg(format!("--bounding-set=-all,{}", only.join(",")))
        .arg(plain.get_program())
        .args(plain.get_args())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    Rxsteer::spawn(&dut.netns, command, true)
}

/// Those of the unit.
fn capabilities() -> Result<Vec<String>> {
    let names = setting("CapabilityBoundingSet")?.split_whitespace();
    let name = |name: &str| Some(name.strip_prefix("CAP_")?.to_lowercase());
    names
        .map(|full| name(full).with_context(|| full.to_owned()))
        .collect()
}

/// The capabilities of each thread of a process, in all their sets, and whether it can get no new ones.
fn privileges(pid: u32) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(task?.path().join("status"))?;
        let about = |line: &&str| line.starts_with("Cap") || line.starts_with("NoNewPrivs");
        let lines = status.lines().filter(about).map(str::to_owned);
        found.insert(lines.collect::<Vec<_>>().join(" "));
    }
    Ok(found)
}

#[test]
fn what_steering_does_not_need_is_given_back() -> Result<()> {
    in_lab!();
    let mut needed: Vec<_> = NEEDED.map(|c| c.to_string().to_lowercase()).to_vec();
    needed.sort();
    let mut unit: Vec<_> = capabilities()?
        .iter()
        .map(|name| format!("cap_{name}"))
        .collect();
    unit.sort();
    assert_eq!(needed, unit);
    let bits = NEEDED.iter().fold(0, |bits, c| bits | c.bitmask());
    let only = format!(
        "CapInh:\t{:016x} CapPrm:\t{bits:016x} CapEff:\t{bits:016x} CapBnd:\t{bits:016x} CapAmb:\t{:016x} \
         NoNewPrivs:\t1",
        0, 0
    );
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let rxsteer = Rxsteer::steering(
        &dut.netns,
        &[&dut.name, "--metrics", "--backlog-sched=fifo"],
    )?;
    assert_eq!(
        privileges(rxsteer.child.id())?,
        BTreeSet::from([only.clone()])
    );
    // The control: this process has more.
    ensure!(!privileges(std::process::id())?.contains(&only));
    Ok(())
}

#[test]
fn the_units_capabilities_suffice() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let names = capabilities()?;
    let rxsteer = with_capabilities(&bed, &names)?.map_err(|e| anyhow::anyhow!("{e:?}"))?;
    let flows = UdpFlows::to(&bed.link.dut, 64);
    let sink = bed.receiver_in_order(&flows)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(20_000);
    let wire = Generator::start(&bed.link, 0, &paced)?;
    redirects(&rxsteer)?;
    all_arrive_in_order(sink, wire.stop()?.sent)?;
    let sums = rxsteer.at_rest()?;
    ensure!(sums.redirected > 0 && sums.lost == 0, "{sums:?}");
    let ended = rxsteer.stop(Signal::SIGTERM)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    // The control: without the first one, rxsteer says which it lacks.
    let Err(ended) = with_capabilities(&bed, &names[1..])? else {
        anyhow::bail!("it steers without CAP_NET_ADMIN");
    };
    ensure!(ended.code == Some(1), "{ended:?}");
    ensure!(ended.log.contains("CAP_NET_ADMIN"), "{ended:?}");
    Ok(())
}

/// The system calls that these names stand for: calls, and sets of them with those in these.
fn expanded<'a>(names: impl Iterator<Item = &'a str>) -> Result<BTreeSet<String>> {
    let mut calls = BTreeSet::new();
    for name in names {
        if !name.starts_with('@') {
            calls.insert(name.to_owned());
            continue;
        }
        let filter = ["syscall-filter", "--no-pager", name];
        let output = Command::new("systemd-analyze").args(filter).output()?;
        let text = String::from_utf8(output.stdout)?;
        calls.extend(expanded(text.lines().skip(1).map(str::trim))?);
    }
    Ok(calls)
}

/// System calls of rxsteer in this mode, from start to stop; `None` without strace.
fn calls(mode: &str) -> Result<Option<BTreeSet<String>>> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let folder = tempfile::tempdir()?;
    let trace = folder.path().join("trace");
    let args = [&dut.name[..], "--rps-cpus=0-1", "--follow-nat", mode];
    let plain = Rxsteer::command(&dut.netns, &args)?;
    let mut command = dut.netns.command("strace")?;
    command.args(["-f", "-qq", "-o"]).arg(&trace);
    command.arg(plain.get_program()).args(plain.get_args());
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = match command.spawn() {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        child => child?,
    };
    let status = until("it steers", || Ok(dut.netns.run(client::status).ok()))?;
    let pid = Pid::from_raw(status.pid.try_into()?);
    bed.send(Frames::Udp(UdpFlows::to(dut, 64)), 10_000)?;
    nix::sys::signal::kill(pid, Signal::SIGTERM)?;
    ensure!(child.wait()?.success(), "rxsteer fails under strace");
    let text = std::fs::read_to_string(&trace)?;
    let name = |line: &str| {
        let (_, call) = line.split_once(' ')?;
        let (name, _) = call.trim_start().split_once('(')?;
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        name.chars().all(plain).then(|| name.to_owned())
    };
    Ok(Some(text.lines().filter_map(name).collect()))
}

#[test]
fn the_units_system_calls_suffice() -> Result<()> {
    in_lab!();
    let missing = || {
        let why = "strace or systemd-analyze is missing (install strace and systemd)";
        rxlab::testing::not_run("the_units_system_calls_suffice", why);
        Ok(())
    };
    if Command::new("systemd-analyze").output().is_err() {
        return missing();
    }
    let allowed = expanded(setting("SystemCallFilter")?.split_whitespace())?;
    let set = expanded(["@system-service"].into_iter())?;
    for mode in ["--mode=native", "--mode=softirq"] {
        let Some(calls) = calls(mode)? else {
            return missing();
        };
        let refused = |name: &&String| !allowed.contains(*name);
        let refused: Vec<_> = calls.iter().filter(refused).collect();
        ensure!(refused.is_empty(), "{mode}: {refused:?}");
        // The control: the unit names what the set lacks.
        for name in ["bpf", "fsopen"] {
            ensure!(calls.contains(name) && !set.contains(name), "{calls:?}");
        }
    }
    Ok(())
}

/// The exposure that `systemd-analyze security` finds, from 0 to 100; `None` without that program.
fn exposure(unit: &Path) -> Result<Option<f64>> {
    let mut command = Command::new("systemd-analyze");
    command.args(["security", "--offline=true", "--no-pager"]);
    let Ok(output) = command.arg(unit).output() else {
        return Ok(None);
    };
    let text = String::from_utf8(output.stdout)?;
    let overall = text.lines().find(|line| line.contains("Overall exposure"));
    let overall = overall.with_context(|| text.clone())?;
    let (_, level) = overall.split_once("service: ").context("no figure")?;
    let level = level.split_whitespace().next().context("no figure")?;
    Ok(Some(level.parse::<f64>()? * 10.0))
}

/// The exposure in the manual, from 0 to 100, if it is that of this version of systemd.
fn documented(version: &str) -> Result<Option<f64>> {
    let (_, text) = MANUAL.split_once("an exposure of ").context("no figure")?;
    let (figure, text) = text.split_once(" of 10 (systemd ").context("no version")?;
    let (of, _) = text.split_once(')').context("no version")?;
    Ok((of == version).then_some(figure.parse::<f64>()? * 10.0))
}

#[test]
fn the_unit_is_tight() -> Result<()> {
    const LIMIT: f64 = 40.0;
    let folder = tempfile::tempdir()?;
    let unit = folder.path().join("rxsteer.service");
    std::fs::write(&unit, UNIT)?;
    let Some(tight) = exposure(&unit)? else {
        let why = "systemd-analyze is missing (install systemd)";
        rxlab::testing::not_run("the_unit_is_tight", why);
        return Ok(());
    };
    println!("exposure {tight} of 100");
    ensure!(tight <= LIMIT, "exposure {tight}");
    let version = Command::new("systemd-analyze").arg("--version").output()?;
    let version = String::from_utf8(version.stdout)?;
    let version = version.split_whitespace().nth(1).context("no version")?;
    match documented(version)? {
        Some(figure) => ensure!(figure == tight, "security.md has {figure}, not {tight}"),
        None => println!("security.md has the figure of another version than {version}"),
    }
    // The control: the same unit without its limits.
    let (head, _) = UNIT.split_once("CapabilityBoundingSet").context("limits")?;
    std::fs::write(&unit, head)?;
    let loose = exposure(&unit)?.context("the program was there")?;
    ensure!(loose > LIMIT, "exposure {loose} without limits");
    Ok(())
}

/// rxsteer to which a filter refuses a system call, as one of systemd does.
fn without(call: libc::c_long, bed: &Testbed, args: &[&str]) -> Result<Result<Rxsteer, Ended>> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, k, jf| libc::sock_filter { code, jt: 0, jf, k };
    // The number of the call is first in struct seccomp_data.
    let mut steps = [
        step(LOAD, 0, 0),
        step(JUMP, u32::try_from(call)?, 1),
        step(RETURN, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0),
        step(RETURN, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let dut = &bed.link.dut;
    let mut command = Rxsteer::command(&dut.netns, &[&[&dut.name[..]], args].concat())?;
    let refuse = move || {
        let filter = libc::sock_fprog {
            len: steps.len() as u16,
            filter: steps.as_mut_ptr(),
        };
        // SAFETY: the kernel copies the filter, which lives until then.
        let ret = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) };
        Errno::result(ret).map(drop).map_err(Into::into)
    };
    // SAFETY: between fork and exec it makes a system call alone.
    unsafe { command.pre_exec(refuse) };
    Rxsteer::spawn(&dut.netns, command, true)
}

#[test]
fn a_filter_of_system_calls_is_named_as_the_reason() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let log = |call| {
        let started = without(call, &bed, &[])?;
        let rxsteer = started.map_err(|ended| anyhow::anyhow!("{ended:?}"))?;
        anyhow::Ok(rxsteer.stop(Signal::SIGTERM)?.log)
    };
    for call in [libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount] {
        let log = log(call)?;
        for part in [
            "unconnected UDP sockets are not followed",
            "EPERM",
            "SystemCallFilter=, as in rxsteer.service",
            "--ignore-unconnected",
        ] {
            ensure!(log.contains(part), "no {part}: {log}");
        }
    }
    // The control: a call that rxsteer does not make.
    let log = log(libc::SYS_swapon)?;
    ensure!(!log.contains("are not followed"), "{log}");
    Ok(())
}

#[test]
fn softirq_mode_needs_no_writable_tunables() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    for folder in ["/sys", "/proc/sys"] {
        read_only(&dut.netns, folder)?;
    }
    let read = |path: String| dut.netns.run(|| Ok(std::fs::read_to_string(path)?));
    let rxsteer = Rxsteer::steering(&dut.netns, &[&dut.name, "--mode=softirq"])?;
    let slots = || {
        read(format!(
            "/sys/class/net/{}/queues/rx-0/rps_flow_cnt",
            dut.name
        ))
    };
    ensure!(slots()?.trim() != "0");
    ensure!(rxsteer.stop(Signal::SIGTERM)?.code == Some(0));
    ensure!(slots()?.trim() == "0");
    // The control: refused mounts of its own.
    let Err(ended) = without(libc::SYS_fsopen, &bed, &["--mode=softirq"])? else {
        anyhow::bail!("it writes to a read-only /sys");
    };
    for part in [
        "this needs a writable /proc/sys",
        "EPERM",
        "SystemCallFilter=, as in rxsteer.service",
    ] {
        ensure!(ended.log.contains(part), "no {part}: {ended:?}");
    }
    Ok(())
}
