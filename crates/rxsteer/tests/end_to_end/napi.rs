// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer napi`: the instances of a veth with queues, threads and sockets, and the restore of
//! settings when it ends or is killed.

use std::fs;
use std::io::Read;
use std::net::{IpAddr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::lab::link::{End, Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::nic::Nic;
use rxlab::testing::testbed::until;
use rxlab::{in_lab, test_name};
use rxsteer::host::device::Device;
use rxsteer::host::netdev::{self, Settings, Threaded};
use rxsteer::host::topology::Topology;
use rxsteer::napi::settings::Changed;
use rxsteer::napi::{self, Instance};
use serde_json::{Value, json};

const RXSTEER: &str = env!("CARGO_BIN_EXE_rxsteer");

fn link(queues: u32, gro: bool) -> Result<Link> {
    let config = LinkConfig {
        queues,
        gro,
        ..LinkConfig::default()
    };
    Link::new(&Netns::new("tester")?, &Netns::new("dut")?, &config)
}

/// Its output, errors and exit status, run at this end.
fn rxsteer(end: &End, args: &[&str]) -> Result<(String, String, Option<i32>)> {
    let output = end
        .netns
        .command(RXSTEER)?
        .arg("napi")
        .args(args)
        .output()?;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes);
    Ok((
        text(output.stdout)?,
        text(output.stderr)?,
        output.status.code(),
    ))
}

/// The devices that it prints.
fn shown(end: &End, args: &[&str]) -> Result<Vec<Value>> {
    let (out, err, code) = rxsteer(end, &[&["--json"], args].concat())?;
    ensure!(code == Some(0), "{err}");
    let mut answer: Value = serde_json::from_str(&out)?;
    Ok(serde_json::from_value(answer["devices"].take())?)
}

fn device(end: &End) -> Result<Device> {
    end.netns.run(|| Device::open(&end.name))
}

fn instances_of(end: &End, device: &Device) -> Result<Vec<Instance>> {
    end.netns.run(|| napi::instances(device, &Topology::host()))
}

/// The present settings of an end's instances.
fn settings(end: &End) -> Result<Vec<Settings>> {
    let instances = instances_of(end, &device(end)?)?;
    Ok(instances.iter().map(|instance| instance.settings).collect())
}

fn sysfs(end: &End, file: &str) -> String {
    format!("/sys/class/net/{}/{file}", end.name)
}

#[test]
fn instances_have_queues_and_threads() -> Result<()> {
    in_lab!(napi);
    let link = link(2, true)?;
    let _nic = Nic::new(&link.dut, &[1, 0])?;
    let devices = shown(&link.dut, &[])?;
    // The loopback device has no instances.
    ensure!(devices.len() == 1, "{devices:?}");
    ensure!(devices[0]["device"] == link.dut.name, "{devices:?}");
    ensure!(devices == shown(&link.dut, &[&link.dut.name])?);
    let instances = devices[0]["instances"].as_array().context("a list")?;
    ensure!(instances.len() == 2, "{devices:?}");
    for (instance, (queue, cpu)) in instances.iter().zip([(0, "1"), (1, "0")]) {
        ensure!(instance["rx_queues"] == json!([queue]), "{instance}");
        ensure!(instance["thread"]["cpus"] == cpu, "{instance}");
        ensure!(instance["threaded"] == "on", "{instance}");
        ensure!(instance["irq"].is_null(), "{instance}");
        let comm = fs::read_to_string(format!("/proc/{}/comm", instance["thread"]["pid"]))?;
        // The name has at most 15 characters (TASK_COMM_LEN).
        let name = format!("napi/{}-{}", link.dut.name, instance["id"]);
        ensure!(
            name.starts_with(comm.trim()) || comm.trim() == name,
            "{comm}"
        );
    }
    let (text, _, _) = rxsteer(&link.dut, &["lo", &link.dut.name])?;
    for part in ["lo has no NAPI instances", "irq-suspend-timeout", "on CPUs"] {
        ensure!(text.contains(part), "{text}");
    }
    Ok(())
}

#[test]
fn a_device_without_instances_is_reported() -> Result<()> {
    in_lab!(napi);
    let link = link(1, false)?;
    let name = &link.dut.name;
    let (text, err, code) = rxsteer(&link.dut, &[])?;
    ensure!(code == Some(0) && text.contains("no device"), "{text}{err}");
    let (text, err, code) = rxsteer(&link.dut, &[name])?;
    let remedy = format!("`ethtool -K {name} gro on`");
    ensure!(code == Some(0) && text.contains(&remedy), "{text}{err}");
    let (_, err, code) = rxsteer(&link.dut, &[name, "--threaded", "on"])?;
    ensure!(
        code == Some(1) && err.contains("no NAPI instances"),
        "{err}"
    );
    let (_, err, code) = rxsteer(&link.dut, &["eth-none"])?;
    let there = format!("there are: lo, {name}");
    ensure!(code == Some(1) && err.contains("`eth-none`"), "{err}");
    ensure!(err.contains(&there), "{err}");
    Ok(())
}

#[test]
fn sockets_are_on_the_instance_of_their_packets() -> Result<()> {
    in_lab!(napi);
    let link = link(1, true)?;
    let bind = |end: &End| {
        let socket = end.netns.run(|| Ok(UdpSocket::bind((end.ipv4, 0))?))?;
        socket.set_read_timeout(Some(Duration::from_secs(30)))?;
        anyhow::Ok(socket)
    };
    let (one, two, sender) = (bind(&link.dut)?, bind(&link.dut)?, bind(&link.tester)?);
    // A duplicate descriptor is not another socket.
    let _same = one.try_clone()?;
    let own = std::process::id();
    let sockets = || {
        let mut devices = shown(&link.dut, &[&link.dut.name])?;
        let applications = devices[0]["instances"][0]["applications"].take();
        let applications = applications.as_array().context("a list")?;
        let own = applications.iter().find(|a| a["pid"] == own);
        anyhow::Ok(own.map_or(0, |a| a["sockets"].as_u64().unwrap_or(99)))
    };
    ensure!(sockets()? == 0);
    for (socket, nr) in [(&one, 1), (&two, 2)] {
        sender.send_to(b"x", socket.local_addr()?)?;
        ensure!(socket.recv_from(&mut [0])?.1.ip() == IpAddr::from(link.tester.ipv4));
        ensure!(sockets()? == nr, "{nr}");
    }
    let (text, _, _) = rxsteer(&link.dut, &[])?;
    let comm = fs::read_to_string("/proc/self/comm")?;
    let row = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        words.get(2..) == Some(&[&own.to_string(), comm.trim(), "2"])
    };
    ensure!(text.lines().any(row), "{text}");
    Ok(())
}

/// `rxsteer napi` with settings, killed on drop.
struct Setter(Child);

impl Setter {
    fn start(end: &End, args: &[&str]) -> Result<Self> {
        let mut command: Command = end.netns.command(RXSTEER)?;
        command.arg("napi").arg(&end.name).args(args);
        Ok(Self(command.stderr(Stdio::piped()).spawn()?))
    }

    /// Waits until the instances are set; fails with the log if it ends before.
    fn until(&mut self, set: impl Fn() -> Result<bool>) -> Result<()> {
        until("all instances are set", || {
            if self.0.try_wait()?.is_some() {
                bail!("{}", self.log()?);
            }
            Ok(set()?.then_some(()))
        })
    }

    /// The whole log: its last writer is the child that restores the settings.
    fn log(&mut self) -> Result<String> {
        let mut log = String::new();
        let mut stderr = self.0.stderr.take().context("it is read once")?;
        stderr.read_to_string(&mut log)?;
        Ok(log)
    }

    fn ended(mut self, signal: Signal) -> Result<(Option<i32>, String)> {
        kill(Pid::from_raw(self.0.id() as i32), signal)?;
        let log = self.log()?;
        Ok((self.0.wait()?.code(), log))
    }
}

impl Drop for Setter {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn all_is_put_back(signal: Signal) -> Result<()> {
    let link = link(2, true)?;
    let dut = &link.dut;
    let first = device(dut)?.napis.and_then(|napis| napis.first().copied());
    let told = first.filter(|napi| napi.settings.irq_suspend_timeout.is_some());
    dut.netns.run(|| {
        fs::write(sysfs(dut, "napi_defer_hard_irqs"), "3")?;
        if let Some(first) = told {
            // Different settings on each instance.
            let other = Settings {
                defer_hard_irqs: Some(5),
                irq_suspend_timeout: Some(1 << 40),
                ..Settings::default()
            };
            netdev::set_napi(first.id, &other)?;
        }
        Ok(())
    })?;
    let before = settings(dut)?;
    ensure!(before.len() == 2 && before[1].defer_hard_irqs == Some(3));
    if told.is_some() {
        ensure!(before[0].defer_hard_irqs == Some(5), "{before:?}");
        ensure!(before[0].irq_suspend_timeout == Some(1 << 40), "{before:?}");
    }

    let mut args = vec!["--defer-hard-irqs", "7", "--gro-flush-timeout", "200000"];
    args.extend(["--threaded", "on"]);
    if told.is_some() {
        args.extend(["--irq-suspend-timeout", "5000000000"]);
    }
    let wanted = Settings {
        defer_hard_irqs: Some(7),
        gro_flush_timeout: Some(200_000),
        irq_suspend_timeout: told.map(|_| 5_000_000_000),
        threaded: Some(Threaded::On),
    };
    let mut setter = Setter::start(dut, &args)?;
    setter.until(|| Ok(settings(dut)? == [wanted; 2]))?;
    // A second one would record the settings of the first as the previous ones.
    let (_, err, code) = rxsteer(dut, &[&dut.name, "--defer-hard-irqs", "1"])?;
    ensure!(code == Some(1) && err.contains("stop it first"), "{err}");
    ensure!(settings(dut)? == [wanted; 2]);
    let mut before = before;
    if told.is_some() {
        // Settings that another process makes meanwhile stay.
        let other = Settings {
            gro_flush_timeout: Some(30_000),
            ..Settings::default()
        };
        let last = device(dut)?.napis.and_then(|napis| napis.last().copied());
        let last = last.context("there are two")?.id;
        dut.netns.run(|| Ok(netdev::set_napi(last, &other)?))?;
        before[1].gro_flush_timeout = other.gro_flush_timeout;
    }

    let (code, log) = setter.ended(signal)?;
    let expected = (signal != Signal::SIGKILL).then_some(0);
    ensure!(code == expected, "{code:?}: {log}");
    ensure!(settings(dut)? == before, "{:?}: {log}", settings(dut)?);
    if let Some(first) = told {
        let said = format!("NAPI instance {}: defer-hard-irqs 5 -> 7, ", first.id);
        ensure!(log.contains(&said), "{log}");
    }
    Ok(())
}

#[test]
fn settings_hold_until_it_is_stopped() -> Result<()> {
    in_lab!(napi);
    all_is_put_back(Signal::SIGTERM)
}

#[test]
fn settings_are_put_back_when_it_is_killed() -> Result<()> {
    in_lab!(napi);
    all_is_put_back(Signal::SIGKILL)
}

/// CPU time that a thread has used, in ticks (proc_pid_stat(5), utime and stime).
fn ticks(pid: u32) -> Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_comm = stat.rsplit_once(") ").context("no name")?.1;
    let times = after_comm.split(' ').skip(11).take(2);
    let sum: Result<u64, std::num::ParseIntError> = times.map(str::parse::<u64>).sum();
    Ok(sum?)
}

/// Once woken by a packet, a busy-polling thread keeps running; another one sleeps.
#[test]
fn threads_busy_poll() -> Result<()> {
    in_lab!(napi);
    let link = link(1, true)?;
    let dut = &link.dut;
    let receiver = dut.netns.run(|| Ok(UdpSocket::bind((dut.ipv4, 0))?))?;
    receiver.set_read_timeout(Some(Duration::from_secs(30)))?;
    let tester = &link.tester;
    let sender = tester
        .netns
        .run(|| Ok(UdpSocket::bind((tester.ipv4, 0))?))?;
    let receive = || {
        sender.send_to(b"x", receiver.local_addr()?)?;
        anyhow::Ok(receiver.recv_from(&mut [0])?)
    };
    let thread = || {
        let instances = instances_of(dut, &device(dut)?)?;
        anyhow::Ok(instances[0].thread.as_ref().context("threaded")?.pid)
    };
    let before = settings(dut)?;

    for threaded in [Threaded::On, Threaded::BusyPoll] {
        let mut setter = Setter::start(dut, &["--threaded", &threaded.to_string()])?;
        let set = setter.until(|| Ok(settings(dut)?[0].threaded == Some(threaded)));
        if let Err(e) = set {
            let lacks = threaded == Threaded::BusyPoll && e.to_string().contains("Linux 6.19");
            ensure!(lacks && settings(dut)? == before, "{e:#}");
            rxlab::testing::not_run(test_name!(), "before Linux 6.19 they don't; that is said");
            return Ok(());
        }
        receive()?;
        let pid = thread()?;
        let start = ticks(pid)?;
        if threaded == Threaded::BusyPoll {
            let polls = || Ok((ticks(pid)? >= start + 20).then_some(()));
            until("the thread polls without packets", polls)?;
        } else {
            std::thread::sleep(Duration::from_secs(1));
            let used = ticks(pid)? - start;
            ensure!(used < 20, "{used} ticks without packets");
        }
        receive()?;
        let (code, log) = setter.ended(Signal::SIGTERM)?;
        ensure!(code == Some(0), "{code:?}: {log}");
        ensure!(settings(dut)? == before, "{:?}: {log}", settings(dut)?);
    }
    Ok(())
}

#[test]
fn a_device_may_go_meanwhile() -> Result<()> {
    in_lab!(napi);
    let link = link(1, true)?;
    let mut setter = Setter::start(&link.dut, &["--gro-flush-timeout", "30000"])?;
    setter.until(|| Ok(settings(&link.dut)?[0].gro_flush_timeout == Some(30_000)))?;
    let mut ip = link.dut.netns.command("ip")?;
    ensure!(ip.args(["link", "del", &link.dut.name]).status()?.success());
    let (code, log) = setter.ended(Signal::SIGTERM)?;
    ensure!(code == Some(0), "{code:?}: {log}");
    Ok(())
}

/// Older kernels report less: the fields that they lack are removed from this kernel's answer.
#[test]
fn older_kernels_have_settings_of_devices() -> Result<()> {
    in_lab!();
    let link = link(2, true)?;
    let _nic = Nic::new(&link.dut, &[0, 1])?;
    let dut = &link.dut;
    let device = device(dut)?;
    // Before 6.8 there are no instances, before 6.13 no settings per instance.
    let without_instances = Device {
        napis: None,
        ..device.clone()
    };
    let mut without_settings = device;
    for napi in without_settings.napis.iter_mut().flatten() {
        napi.settings = Settings::default();
    }
    dut.netns
        .run(|| Ok(fs::write(sysfs(dut, "gro_flush_timeout"), "4000")?))?;
    for device in [without_instances, without_settings] {
        let instances = instances_of(dut, &device)?;
        ensure!(instances.len() == 2, "{instances:?}");
        for (instance, (queue, cpu)) in instances.iter().zip([(0, "0"), (1, "1")]) {
            ensure!(instance.id.is_some() == device.napis.is_some());
            ensure!(instance.rx_queues == [queue], "{instance:?}");
            let thread = instance.thread.as_ref().context("threaded")?;
            ensure!(thread.cpus.as_deref() == Some(cpu), "{instance:?}");
            ensure!(instance.settings.gro_flush_timeout == Some(4000));
            ensure!(instance.settings.threaded == Some(Threaded::On));
            ensure!(instance.settings.irq_suspend_timeout.is_none());
            let wide = ["defer-hard-irqs", "gro-flush-timeout", "threaded"];
            ensure!(instance.device_wide == wide, "{instance:?}");
        }

        let files = || {
            dut.netns.run(|| {
                let names = ["napi_defer_hard_irqs", "gro_flush_timeout", "threaded"];
                let values = names.map(|name| fs::read_to_string(sysfs(dut, name)));
                let values = values.into_iter().collect::<Result<Vec<_>, _>>()?;
                Ok(values.concat())
            })
        };
        ensure!(files()? == "0\n4000\n1\n", "{:?}", files()?);
        let wanted = Settings {
            defer_hard_irqs: Some(2),
            gro_flush_timeout: Some(50_000),
            ..Settings::default()
        };
        let changed = dut.netns.run(|| Changed::set(&device, &wanted))?;
        ensure!(files()? == "2\n50000\n1\n", "{:?}", files()?);
        changed.put_back()?;
        ensure!(files()? == "0\n4000\n1\n", "{:?}", files()?);

        let unknown = Settings {
            irq_suspend_timeout: Some(1),
            ..wanted
        };
        let Err(error) = dut.netns.run(|| Changed::set(&device, &unknown)) else {
            bail!("no kernel before 6.13 has it");
        };
        ensure!(error.to_string().contains("Linux 6.13"), "{error:#}");
        ensure!(files()? == "0\n4000\n1\n", "{:?}", files()?);
    }
    Ok(())
}
