// SPDX-License-Identifier: MIT OR Apache-2.0
//! Start, end and crash of the program under traffic.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::helpers::process::*;
use crate::helpers::threads::{cpumaps, kthreads};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{End, Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::xdp::Xdp;
use rxlab::testing::short_or_long;
use rxlab::testing::testbed::*;

#[test]
fn a_stop_signal_returns_every_flow_inline() -> Result<()> {
    in_lab!();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let bed = Testbed::new(&LinkConfig::default())?;
        let dut = &bed.link.dut;
        let flows = UdpFlows::to(dut, 500);
        let sink = bed.receiver_in_order(&flows)?;
        let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(50_000);
        let wire = Generator::start(&bed.link, 0, &paced)?;
        let rxsteer = Rxsteer::steering(
            &dut.netns,
            &roomy(&dut.name, &["--rps-cpus=1", "--policy=rps"]),
        )?;
        assert_eq!(attached(&bed)?.context("attached")?.name, "rxsteer");
        redirects(&rxsteer)?;
        // A queue of packets that would be overtaken if the program were detached at once.
        let congestion = Congestion::of(&rxsteer)?;
        rxsteer.signal(signal)?;
        sends(&wire, 500)?;
        drop(congestion);
        let ended = rxsteer.ended()?;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert_eq!(attached(&bed)?, None);
        let sent = wire.stop()?;
        assert_eq!(sent.lost, 0);
        let account = account(&ended.log)?;
        assert_eq!(account.lost, 0, "{ended:?}");
        assert!(!ended.log.contains("overtake"), "{ended:?}");
        all_arrive_in_order(sink, sent.sent - account.dropped - account.shed)?;
    }
    Ok(())
}

#[test]
fn coming_and_going_many_times_loses_nothing() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(20_000);
    let wire = Generator::start(&bed.link, 0, &paced)?;
    let (mut seen, mut redirected, mut dropped) = (0, 0, 0);
    let times = u64::from(short_or_long(10, 100));
    for _ in 0..times {
        let rxsteer = Rxsteer::steering(&dut.netns, &roomy(&dut.name, &["--rps-cpus=1"]))?;
        until("packets are redirected", || {
            let queue = &rxsteer.status()?.devices[0].queues[0];
            Ok((queue.sums.redirected > 10).then_some(()))
        })
        .with_context(|| format!("{} sent; {:?}", wire.sent(), rxsteer.status()))?;
        let ended = rxsteer.stop(Signal::SIGTERM)?;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let account = account(&ended.log)?;
        assert_eq!(account.lost, 0, "{ended:?}");
        seen += account.received;
        redirected += account.redirected;
        dropped += account.dropped + account.shed;
    }
    assert_eq!(attached(&bed)?, None);
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    // It steered some of the traffic, but not all.
    assert!(
        redirected > 10 * times && seen < sent.sent,
        "{seen} {redirected}"
    );
    all_arrive_in_order(sink, sent.sent - dropped)
}

/// The backlog holds more frames than this test sends: no frame is dropped by a full backlog.
#[test]
fn a_kill_leaves_no_steering_and_loses_nothing() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let rxsteer = Rxsteer::steering(&dut.netns, &roomy(&dut.name, &["--rps-cpus=1"]))?;
    let redirected =
        || Ok::<_, anyhow::Error>(rxsteer.status()?.devices[0].queues[0].sums.redirected);
    let mut before = 0;
    until("a backlog", || {
        before += 10;
        bed.send(Frames::Udp(flows.clone()), 10)?;
        Ok((redirected()? > 0).then_some(()))
    })?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows.clone()), None).at(20_000);
    let wire = Generator::start(&bed.link, 0, &paced)?;
    until("packets are redirected", || {
        Ok((redirected()? > 2_000).then_some(()))
    })?;
    let cpumaps = cpumaps(rxsteer.child.id())?;
    assert!(!kthreads(&cpumaps)?.is_empty());
    let ended = rxsteer.stop(Signal::SIGKILL)?;
    assert_eq!(ended.code, None, "killed, not stopped: {ended:?}");
    until("the XDP program is gone", || {
        Ok(attached(&bed)?.is_none().then_some(()))
    })?;
    until("the kernel threads are gone", || {
        Ok(kthreads(&cpumaps)?.is_empty().then_some(()))
    })?;
    let at_the_end = wire.sent();
    until("more packets after that", || {
        Ok((wire.sent() > at_the_end + 1_000).then_some(()))
    })?;
    let report = wire.stop()?;
    assert_eq!(report.lost, 0);
    let sent = before + report.sent;
    // Order can't be kept across a kill.
    until("all datagrams received", || {
        Ok((sink.received() + sink.dropped()? >= sent).then_some(()))
    })
    .with_context(|| format!("{} of {sent}", sink.received()))?;
    let report = sink.stop()?;
    assert_eq!(report.received[0] + report.dropped, sent);
    Ok(())
}

#[test]
fn status_and_set_reach_the_running_one() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let name = dut.name.as_str();
    let args = roomy(name, &["--rps-cpus=0", "--tunnels=all"]);
    let steering = Rxsteer::steering(&dut.netns, &args)?;
    let count = 3_001;
    bed.send(Frames::Udp(UdpFlows::to(dut, 100)), count)?;
    until("all frames counted", || {
        Ok((steering.status()?.devices[0].queues[0].received == count).then_some(()))
    })?;

    let output = rxsteer(&dut.netns, &["status", "--json"])?;
    assert!(output.status.success(), "{output:?}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let mut expected = serde_json::to_value(steering.status()?)?;
    expected["busy_poll"] = serde_json::Value::Null;
    expected["pinned"] = serde_json::json!([]);
    expected["not_put_back"] = serde_json::json!([]);
    assert_eq!(json, expected);
    assert_eq!(json["pid"], steering.child.id());
    assert_eq!(json["policy"], "rfs");
    assert_eq!(json["backlog_limit"], 16368);
    assert_eq!(json["devices"][0]["device"], name);
    assert_eq!(json["devices"][0]["mode"], "native");
    let queue = &json["devices"][0]["queues"][0];
    assert_eq!(queue["received"], count);
    assert_eq!(queue["inline"], count);
    assert_eq!(queue["redirected"], 0);

    let output = rxsteer(&dut.netns, &["status"])?;
    let text = String::from_utf8(output.stdout)?;
    assert!(text.contains(name) && text.contains("3001"), "{text}");

    // A line per interval, until interrupted.
    let mut again = dut
        .netns
        .command(RXSTEER)?
        .args(["status", "--json", "--interval=0.01"])
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = BufReader::new(again.stdout.take().context("it was piped")?);
    let lines: Vec<String> = stdout.lines().take(3).collect::<std::io::Result<_>>()?;
    again.kill()?;
    again.wait()?;
    assert_eq!(lines.len(), 3);
    for line in lines {
        assert_eq!(serde_json::from_str::<serde_json::Value>(&line)?, json);
    }

    let set = |args: &[&str]| rxsteer(&dut.netns, &[&["set"], args].concat());
    let output = set(&[name, "--rps-cpus", "0x2"])?;
    assert!(output.status.success(), "{output:?}");
    let rps_cpus =
        || Ok::<_, anyhow::Error>(steering.status()?.devices[0].queues[0].rps_cpus.clone());
    assert_eq!(rps_cpus()?, "1");

    // Invalid changes fail with a message and change nothing.
    for (args, why) in [
        (&["eth99", "--rps-cpus", "1"][..], "eth99 is not steered"),
        (&["eth99", "--policy", "rps"], "eth99 is not steered"),
        (
            &[name, "--rps-cpus", "1", "--queue", "1"],
            "no receive queue 1",
        ),
        (&[name, "--rps-cpus", "8000-8001"], "is online: choose from"),
    ] {
        let output = set(args)?;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let stderr = String::from_utf8(output.stderr)?;
        assert!(stderr.contains(why), "{args:?}: {stderr}");
        assert_eq!(rps_cpus()?, "1");
    }
    assert_eq!(steering.stop(Signal::SIGTERM)?.code, Some(0));

    for command in [
        &["status"][..],
        &["set", name, "--rps-cpus", "1"],
        &["explain", "pid:1"],
    ] {
        let output = rxsteer(&dut.netns, command)?;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let stderr = String::from_utf8(output.stderr)?;
        assert!(stderr.contains("no rxsteer is running"), "{stderr}");
    }
    Ok(())
}

/// Exits with status 1 for these reasons, and attaches nothing.
fn refused(bed: &Testbed, args: &[&str], why: &[&str]) -> Result<()> {
    refused_with(1, bed, args, why)
}

/// The same with another exit status.
fn refused_with(code: i32, bed: &Testbed, args: &[&str], why: &[&str]) -> Result<()> {
    let before = attached(bed)?.map(|xdp| xdp.id);
    let Err(ended) = Rxsteer::start(&bed.link.dut.netns, args)? else {
        bail!("{args:?} was not refused");
    };
    ensure!(ended.code == Some(code), "{args:?}: {ended:?}");
    for why in why {
        ensure!(
            ended.log.contains(why),
            "{args:?}: not {why:?} but {ended:?}"
        );
    }
    assert_eq!(attached(bed)?.map(|xdp| xdp.id), before, "{args:?}");
    Ok(())
}

#[test]
fn what_is_in_the_way_is_named_and_left_alone() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let name = dut.name.as_str();
    let me = format!("pid {}", std::process::id());

    // Another rxsteer in the same namespace.
    let first = Rxsteer::steering(&dut.netns, &[name])?;
    let pid = format!("(process {})", first.child.id());
    refused(
        &bed,
        &[name],
        &["is running in this network namespace", &pid],
    )?;
    assert_eq!(first.stop(Signal::SIGTERM)?.code, Some(0));

    // Another XDP program, in either mode.
    for (pass, mode) in [
        (Xdp::pass as fn(&End) -> Result<Xdp>, "native"),
        (Xdp::pass_in_stack, "generic"),
    ] {
        let pass = pass(dut)?;
        refused(&bed, &[name], &["`pass`", mode, &me, "stop"])?;
        assert_eq!(attached(&bed)?.context("still there")?.name, "pass");
        drop(pass);
    }

    // Kernel RPS, and its flow table.
    for (file, on) in [("rps_cpus", "2"), ("rps_flow_cnt", "64")] {
        let path = format!("/sys/class/net/{name}/queues/rx-0/{file}");
        let write = |value: &str| dut.netns.run(|| Ok(fs::write(&path, value)?));
        write(on)?;
        refused(
            &bed,
            &[name],
            &["kernel RPS is on", &format!("rx-0/{file}")],
        )?;
        write("0")?;
    }

    // VLAN tags outside of the frame.
    let tags = ["rx-vlan-hw-parse"];
    dut.ethtool.set_features(&tags, true)?;
    refused(&bed, &[name, "--mode=native"], &["VLAN tags", "rxvlan off"])?;
    dut.ethtool.set_features(&tags, false)?;

    // Devices and queues that don't exist or occur twice.
    refused(&bed, &["eth99"], &["no network device `eth99`", name])?;
    refused_with(2, &bed, &[name, name], &["is named twice"])?;
    refused(&bed, &[name, "--queue=1=1"], &["has no receive queue 1"])?;
    refused(
        &bed,
        &[name, "--queue=eth99:0=1"],
        &["eth99 is not steered"],
    )?;
    refused(
        &bed,
        &[name, "--rps-cpus=8000-8001"],
        &["is online: choose from"],
    )?;
    let native = "--mode=native";
    let loopback = ["the loopback device", "--mode softirq"];
    refused(&bed, &["lo", native], &loopback)?;
    // The first device must not stay attached when the second is refused.
    refused(&bed, &[name, "lo", native], &loopback)?;
    // All obstacles are named.
    refused(
        &bed,
        &["eth99", "lo", native],
        &["no network device `eth99`", "the loopback device"],
    )?;

    // Control: no obstacle is left, and it steers.
    let last = Rxsteer::steering(&dut.netns, &[name, "--queue=0=0-1"])?;
    assert_eq!(last.stop(Signal::SIGTERM)?.code, Some(0));
    assert_eq!(attached(&bed)?, None);
    Ok(())
}

#[test]
fn a_missing_capability_is_named() -> Result<()> {
    in_lab!();
    use std::os::unix::process::CommandExt;
    const CAP_BPF: libc::c_ulong = 39;
    let bed = Testbed::new(&LinkConfig::default())?;
    let mut command = bed.link.dut.netns.command(RXSTEER)?;
    let names = [bed.link.dut.name.as_str(), "eth99"];
    command.arg("run").args(plain(&[])).args(names);
    // SAFETY: one system call. At exec root gets the capabilities of its bounding set only.
    unsafe {
        command.pre_exec(
            || match libc::prctl(libc::PR_CAPBSET_DROP, CAP_BPF, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            },
        );
    }
    let output = command.output()?;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = String::from_utf8(output.stderr)?;
    assert!(stderr.contains("CAP_BPF"), "{stderr}");
    assert!(!stderr.contains("CAP_NET_ADMIN"), "{stderr}");
    // The devices' obstacles follow.
    assert!(stderr.contains("no network device `eth99`"), "{stderr}");
    assert_eq!(attached(&bed)?, None);
    Ok(())
}

/// The soft limit of most hosts ends no start with many devices: the hard one counts, and of a device
/// descriptors of its program, of its link and of each queue's cpumap alone stay.
#[test]
fn many_devices_need_few_descriptors() -> Result<()> {
    in_lab!();
    let (tester, netns) = (Netns::new("tester")?, Netns::new("dut")?);
    let link = |id| {
        let config = LinkConfig {
            id,
            ..LinkConfig::default()
        };
        Link::new(&tester, &netns, &config)
    };
    let links = (0..8).map(link).collect::<Result<Vec<_>>>()?;
    let names: Vec<String> = links.iter().map(|link| link.dut.name.clone()).collect();
    let descriptors = |names: &[String]| {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let args = [&["--mode=native", "--rps-cpus=0-1"], &names[..]].concat();
        let plain = Rxsteer::command(&netns, &args)?;
        let mut command = netns.command("prlimit")?;
        // The program, its tables and its threads have some 100 with one device.
        command.arg("--nofile=64:512").arg(plain.get_program());
        command
            .args(plain.get_args())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let running = Rxsteer::spawn(&netns, command, true)?;
        let running = running.map_err(|ended| anyhow::anyhow!("{ended:?}"))?;
        let open = fs::read_dir(format!("/proc/{}/fd", running.child.id()))?.count();
        ensure!(running.stop(Signal::SIGTERM)?.code == Some(0));
        anyhow::Ok(open)
    };
    let (one, all) = (descriptors(&names[..1])?, descriptors(&names)?);
    // The control: one device alone has more than the soft limit.
    ensure!(
        one > 64 && all <= one + 4 * 7,
        "{one} with one device, {all} with eight"
    );
    Ok(())
}
