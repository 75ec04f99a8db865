// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measurements on a device of the host, which is restored afterwards.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use rxlab::bench::experiment::{DeviceKind, Effort, On, Only, Unfit};
use rxlab::bench::peer::load::Transport;
use rxlab::bench::peer::server::Peer;
use rxlab::bench::scenario::Scenario;
use rxlab::bench::setup::mode::{Active, Mode};
use rxlab::bench::setup::pair::Pair;
use rxlab::lab::link::End;
use rxlab::lab::xdp::Xdp;
use rxlab::testing::testbed::{OTHER_CPU, mask, until};
use rxlab::{in_lab, test_name};
use rxsteer::host::device::Device;
use rxsteer::host::setting::Setting;

use super::hosts::*;

#[test]
fn devices_that_can_not_be_used() -> Result<()> {
    in_lab!();
    let hosts = Hosts::new()?;
    let (netns, name) = (&hosts.end.netns, hosts.end.name.as_str());
    assert_eq!(hosts.end.ipv4, hosts.link.dut.ipv4);
    assert_eq!(hosts.end.ipv6, hosts.link.dut.ipv6);
    assert_eq!(hosts.end.mac, hosts.link.dut.mac);
    assert_eq!(hosts.end.ifindex, hosts.link.dut.ifindex);
    assert_eq!(hosts.end.queues, 2);
    assert_eq!(hosts.end.netns.inode()?, netns.inode()?);

    let says = |name: &str, what: &str| {
        let error = netns
            .run(|| End::of_host(name))
            .err()
            .expect("it is no use");
        assert!(format!("{error:#}").contains(what), "{error:#}");
    };
    says("nothing0", "there is no network device `nothing0`");
    let ip = |args: &[&str]| -> Result<()> {
        let done = netns.command("ip")?.args(args).status()?;
        anyhow::ensure!(done.success(), "ip {args:?}");
        Ok(())
    };
    let on = On {
        device: name.to_owned(),
        peer: hosts.peer,
    };
    let no_pair = |what: &str| {
        let error = netns.run(|| Pair::meet(&on).map(drop)).expect_err("no use");
        assert!(format!("{error:#}").contains(what), "{error:#}");
    };
    netns.run(|| Pair::meet(&on).map(drop))?;
    {
        let _foreign = Xdp::drop(&hosts.link.dut)?;
        no_pair("XDP program");
    }
    ip(&["-6", "address", "flush", "dev", name])?;
    let only_v4 = netns.run(|| End::of_host(name))?;
    let to = SocketAddr::new(hosts.link.tester.ipv6.into(), hosts.peer.port());
    let error = Peer::connect(&only_v4, to).err().context("no IPv6")?;
    assert!(format!("{error:#}").contains("no address of the family"));
    ip(&["address", "flush", "dev", name])?;
    says(name, "has no address");
    ip(&["link", "set", "dev", name, "down"])?;
    says(name, "is down");
    no_pair("is down");
    Ok(())
}

/// Kernel RPS files of a device with two queues, and their contents.
fn kernel_rps(end: &End) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for queue in 0..2 {
        for file in ["rps_cpus", "rps_flow_cnt"] {
            let path = format!("/sys/class/net/{}/queues/rx-{queue}/{file}", end.name);
            let value = end.netns.run(|| Ok(fs::read_to_string(&path)?))?;
            files.push((path, value));
        }
    }
    Ok(files)
}

const ENTRIES: &str = "/proc/sys/net/core/rps_sock_flow_entries";

/// Writes different settings into each file.
fn set_up_kernel_rps(end: &End) -> Result<()> {
    let values = ["1", "256", "2", "512"];
    for ((path, _), value) in kernel_rps(end)?.into_iter().zip(values) {
        end.netns.run(|| Ok(fs::write(path, value)?))?;
    }
    Ok(())
}

#[test]
fn every_mode_works_on_a_device_and_leaves_it_as_it_was() -> Result<()> {
    in_lab!(alone: "it looks at the host's rps_sock_flow_entries");
    let hosts = Hosts::new()?;
    let end = &hosts.end;
    let xdp = || end.netns.run(|| Ok(Device::open(&end.name)?.xdp));
    set_up_kernel_rps(end)?;
    let (before, entries) = (kernel_rps(end)?, fs::read_to_string(ENTRIES)?);
    let peer = hosts.connect()?;
    let echo = Echo::start(&end.netns, Transport::Udp, Does::Answer)?;
    for mode in [
        Mode::None,
        Mode::KernelRps,
        Mode::KernelRfs,
        Mode::Cpumap,
        Mode::RxsteerRps,
        Mode::RxsteerRfs,
        Mode::RxsteerRfsIdle,
        Mode::Rxsteer,
    ] {
        let cpus = mask(&[OTHER_CPU]);
        let active = Active::start(end, mode, Some(&cpus)).with_context(|| mode.to_string())?;
        let program = xdp()?.map(|xdp| xdp.name);
        let expected = match mode {
            Mode::None | Mode::KernelRps | Mode::KernelRfs => None,
            Mode::Cpumap => Some("cpumap"),
            _ => Some("rxsteer"),
        };
        assert_eq!(program.as_deref(), expected, "{mode}");
        let now: Vec<String> = kernel_rps(end)?
            .iter()
            .map(|(_, value)| value.trim().trim_start_matches(['0', ',']).to_owned())
            .collect();
        let (cpus, slots) = match mode {
            Mode::KernelRps => ("2", ""),
            Mode::KernelRfs => ("2", "4096"),
            _ => ("", ""),
        };
        assert_eq!(now, [cpus, slots, cpus, slots], "{mode}");
        if mode == Mode::KernelRfs {
            assert_eq!(fs::read_to_string(ENTRIES)?.trim(), "32768");
        }
        let loaded = peer.load(&rr(Transport::Udp, 20))?;
        assert!(loaded.transactions > 0, "{mode}: {loaded:?}");
        active.stop()?;
        assert_eq!(kernel_rps(end)?, before, "{mode}");
        assert_eq!(fs::read_to_string(ENTRIES)?, entries, "{mode}");
        assert!(xdp()?.is_none(), "{mode}");
    }
    drop(echo);

    // A foreign program is detected and not replaced.
    let _foreign = Xdp::pass(end)?;
    for mode in [Mode::None, Mode::KernelRps, Mode::Cpumap, Mode::Rxsteer] {
        let cpus = mask(&[OTHER_CPU]);
        let error = Active::start(end, mode, Some(&cpus)).err();
        let error = error.with_context(|| format!("{mode} beside another program"))?;
        assert!(format!("{error:#}").contains("`pass`"), "{error:#}");
        assert_eq!(kernel_rps(end)?, before, "{mode}");
    }
    Ok(())
}

/// Set in the process to be killed: name of the device.
const VICTIM: &str = "RXSTEER_TEST_VICTIM";

#[test]
fn settings_come_back_when_killed() -> Result<()> {
    let test = test_name!();
    if let Ok(device) = std::env::var(VICTIM) {
        let end = End::of_host(&device)?;
        let _active = Active::start(&end, Mode::KernelRps, Some(&mask(&[OTHER_CPU])))?;
        // The parent checks the entries, which exist in the initial network namespace only.
        eprintln!("on");
        std::thread::sleep(Duration::from_secs(30));
        return Ok(());
    }
    in_lab!(test);
    let hosts = Hosts::new()?;
    let end = &hosts.end;
    set_up_kernel_rps(end)?;
    let before = kernel_rps(end)?;
    let mut victim = end
        .netns
        .command(std::env::current_exe()?)?
        .args(["--exact", test, "--nocapture"])
        .env(VICTIM, &end.name)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    let mut stderr = BufReader::new(victim.stderr.take().context("piped")?);
    stderr.read_line(&mut line)?;
    let changed = kernel_rps(end)?;
    victim.kill()?;
    victim.wait()?;
    stderr.read_to_string(&mut line)?;
    assert_eq!(line.lines().next(), Some("on"), "{line}");
    assert_ne!(changed, before);
    until("the settings are back", || {
        Ok((kernel_rps(end)? == before).then_some(()))
    })
}

#[test]
fn what_needs_the_lab_says_so() -> Result<()> {
    let effort = Effort {
        rounds: 1,
        seconds: 0.1,
        napi: Vec::new(),
        gro: Vec::new(),
        device: DeviceKind::Nic,
        only: Only::default(),
        on: Some(On {
            device: "eth0".to_owned(),
            peer: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1),
        }),
    };
    for scenario in [Scenario::Flood, Scenario::Reorder, Scenario::Decide] {
        let error = scenario.prepare(&effort).err().context("not on a device")?;
        let text = format!("{error:#}");
        let name = format!("{scenario:?}").to_lowercase();
        assert!(text.starts_with(&name), "{text}");
        assert!(text.contains("runs in the lab alone"), "{text}");
    }
    Ok(())
}

/// One guardian for several files restores each.
#[test]
fn settings_are_put_back_together() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let paths = vec![file("a file"), file("another")];
    fs::write(&paths[0], "0,1\n")?;
    fs::write(&paths[1], "*\n")?;
    let setting = Setting::keep_all(paths.clone())?;
    setting.set("7")?;
    assert_eq!(fs::read_to_string(&paths[0])?, "7");
    assert_eq!(fs::read_to_string(&paths[1])?, "7");
    drop(setting);
    assert_eq!(fs::read_to_string(&paths[0])?, "0,1\n");
    assert_eq!(fs::read_to_string(&paths[1])?, "*\n");
    Ok(())
}

/// Two keepers of one setting would each restore the other's value.
#[test]
fn a_setting_has_one_keeper() -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let path = file.path().to_string_lossy().into_owned();
    fs::write(&path, "0\n")?;
    let first = Setting::keep(&path)?;
    first.set("1")?;
    let second = std::thread::spawn(move || Setting::keep(&path)?.set("2"));
    // Time to read the setting, if it did not wait.
    std::thread::sleep(Duration::from_millis(200));
    drop(first);
    second.join().expect("no panic")?;
    assert_eq!(fs::read_to_string(file.path())?, "0\n");
    Ok(())
}

/// Scenarios that take a peer, as `rxlab bench --on` runs them.
#[test]
fn scenarios_on_a_device() -> Result<()> {
    in_lab!();
    let hosts = Hosts::new()?;
    let effort = Effort {
        rounds: 1,
        seconds: 0.1,
        napi: Vec::new(),
        gro: Vec::new(),
        device: DeviceKind::Nic,
        only: Only::default(),
        on: Some(On {
            device: hosts.end.name.clone(),
            peer: hosts.peer,
        }),
    };
    let able = Scenario::value_variants().iter().filter(|s| s.takes_peer());
    for scenario in able {
        hosts.end.netns.run(|| {
            let mut experiment = scenario.prepare(&effort)?;
            let plan = experiment.plan();
            for (c, case) in plan.cases.iter().enumerate() {
                let name = format!("{}: {}", plan.scenario, case.case);
                for mode in ["none", "kernel-rps (all)", "rxsteer"] {
                    let m = case.modes.iter().position(|m| m == mode);
                    let m = m.with_context(|| format!("{name}: no {mode}"))?;
                    match experiment.measure(c, m) {
                        // On a loaded host packets are lost, and the peer is busy.
                        Err(error) if error.is::<Unfit>() => eprintln!("{name}, {mode}: {error:#}"),
                        measured => {
                            let values = measured.with_context(|| format!("{name}, {mode}"))?;
                            assert!(values[0].1 > 0.0, "{name}, {mode}: {values:?}");
                        }
                    }
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}
