// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer advise`: the answer and its reason under different loads; nothing is left behind.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::ops::Deref;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::helpers::process::{RXSTEER, attached, rxsteer};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::lab::frame::{Frames, TcpFlows, UdpFlows, Vxlan};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::lab::netns::Thread;
use rxlab::lab::receiver::{Receiver, ReceiverConfig};
use rxlab::lab::resident::Resident;
use rxlab::testing::not_run;
use rxlab::testing::testbed::*;
use rxlab::{in_lab, test_name};
use rxsteer::host::device::Device;
use rxsteer::host::ethtool::TX_VLAN;
use rxsteer::host::setting::Setting;
use serde_json::Value;

/// Time between packets that leave time on any machine.
const LIGHT: Duration = Duration::from_micros(500);

/// Whether the answer is `yes`, `no` or `no answer` depends on the time that other work leaves on
/// CPU 0: attempts until that work has paused.
const TRIES: usize = 5;

/// A link that is steered in native mode: its other end can be reached.
struct Bed {
    bed: Testbed,
    _far: Resident,
}

impl Deref for Bed {
    type Target = Testbed;

    fn deref(&self) -> &Testbed {
        &self.bed
    }
}

fn link() -> Result<Bed> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let far = Resident::start(&bed.link.tester.netns)?;
    bed.link.tester.ethtool.set_features(TX_VLAN, false)?;
    Ok(Bed { bed, _far: far })
}

/// Its output, and whether it succeeded.
fn advise(bed: &Testbed, args: &[&str]) -> Result<(String, bool)> {
    let output = rxsteer(&bed.link.dut.netns, &[&["advise"], args].concat())?;
    let text = String::from_utf8([output.stdout, output.stderr].concat())?;
    Ok((text, output.status.success()))
}

/// As [`advise`], as JSON; it must succeed.
fn answer(bed: &Testbed, args: &[&str]) -> Result<Value> {
    let (text, success) = advise(bed, &[args, &["--json"]].concat())?;
    ensure!(success, "{text}");
    serde_json::from_str(&text).with_context(|| text)
}

/// Traffic of some flows at the generator's maximum.
fn flood(bed: &Testbed, nr_flows: u32) -> Result<(Generator, Receiver)> {
    let flows = UdpFlows::to(&bed.link.dut, nr_flows);
    let to = SocketAddr::new(flows.daddr, flows.dport);
    let receiver = ReceiverConfig {
        threads: vec![Some(OTHER_CPU)],
        ..ReceiverConfig::new(to)
    };
    let receiver = Receiver::start(&bed.link.dut.netns, &receiver)?;
    let config = GeneratorConfig::flood(Frames::Udp(flows));
    let generator = Generator::start(&bed.link, POLLING_CPU, &config)?;
    until("traffic", || Ok((receiver.received() > 100).then_some(())))?;
    Ok((generator, receiver))
}

/// A packet of one of 64 flows now and then, from a thread that sleeps and is not on the polling CPU.
struct Light {
    ended: Ended,
    sender: Thread<Result<()>>,
    receiver: Receiver,
}

impl Light {
    fn start(bed: &Testbed) -> Result<Self> {
        let to = SocketAddr::new(bed.link.dut.ipv4.into(), 9);
        let receiver = ReceiverConfig {
            threads: vec![Some(OTHER_CPU)],
            ..ReceiverConfig::new(to)
        };
        let receiver = Receiver::start(&bed.link.dut.netns, &receiver)?;
        let ended = Ended::default();
        let over = Arc::clone(&ended.0);
        let sends = move || {
            let bind = |_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0));
            let sockets: Vec<_> = (0..64).map(bind).collect::<std::io::Result<_>>()?;
            for socket in sockets.iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                socket.send_to(&[0; 32], to)?;
                thread::sleep(LIGHT);
            }
            anyhow::Ok(())
        };
        let sender = bed
            .link
            .tester
            .netns
            .spawn(Some(OTHER_CPU), "light", sends)?;
        until("traffic", || Ok((receiver.received() > 100).then_some(())))?;
        Ok(Self {
            ended,
            sender,
            receiver,
        })
    }

    fn end(self) -> Result<()> {
        drop(self.ended);
        self.sender.join()?;
        self.receiver.stop().map(drop)
    }
}

/// Set on drop.
#[derive(Default)]
struct Ended(Arc<AtomicBool>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Whether a program of native mode is attached, or the kernel asks about packets.
fn is_watched(bed: &Testbed) -> Result<bool> {
    let dut = &bed.link.dut;
    let device = dut.netns.run(|| Device::open(&dut.name))?;
    Ok(attached(bed)?.is_some() || !device.kernel_rps.is_empty())
}

/// Programs and kernel RPS are as before.
fn nothing_is_left(bed: &Testbed) -> Result<()> {
    until("the device is as before", || {
        Ok((!is_watched(bed)?).then_some(()))
    })
}

#[test]
fn light_traffic_needs_no_steering() -> Result<()> {
    in_lab!(alone: "it measures how busy the CPUs are");
    let bed = link()?;
    let light = Light::start(&bed)?;
    let name = bed.link.dut.name.clone();
    for no_attach in [false, true] {
        let mut args = vec![&name[..], "--seconds=0.5"];
        args.extend(no_attach.then_some("--no-attach"));
        let mut reasons = Vec::new();
        let mut room = None;
        while room.is_none() && reasons.len() < TRIES {
            let answer = answer(&bed, &args)?;
            let reason = answer["verdict"]["reason"].as_str().unwrap_or_default();
            reasons.push(reason.to_owned());
            ensure!(
                answer["command"].is_null() && answer["ratio"] == 1.0,
                "{answer}"
            );
            // Beside other work on CPU 0.
            ensure!(["room", "not-receiving"].contains(&reason), "{answer}");
            let watched = &answer["devices"][0];
            ensure!(watched["dry_run"].is_null() == no_attach, "{answer}");
            ensure!(answer["flows"].is_null() == no_attach, "{answer}");
            if !no_attach {
                // Flows that share a slot count once, and some may not have had a packet.
                let number = answer["flows"]["number"].as_u64();
                ensure!((Some(1)..=Some(64)).contains(&number), "{answer}");
                ensure!(answer["pollers"][0]["cpu"] == POLLING_CPU, "{answer}");
            }
            if reason == "room" {
                room = Some(answer);
            }
        }
        let Some(answer) = room else {
            let busy = format!("CPU 0 had no time left beside light traffic: {reasons:?}");
            not_run(test_name!(), &busy);
            continue;
        };
        let sentence = answer["sentence"].as_str().unwrap_or_default();
        ensure!(
            sentence.starts_with("no: CPU 0, which receives, has ")
                && sentence.ends_with("steering would add a hop and gain nothing"),
            "{sentence}"
        );
    }
    light.end()?;
    nothing_is_left(&bed)
}

#[test]
fn a_flood_of_many_flows_is_worth_it() -> Result<()> {
    in_lab!(alone: "it measures how busy the CPUs are");
    let bed = link()?;
    let (generator, receiver) = flood(&bed, 512)?;
    let name = &bed.link.dut.name;
    let mut answers = Vec::new();
    let mut yes = None;
    for _ in 0..TRIES {
        let answer = answer(&bed, &[name, "--seconds=1", "--mode=native"])?;
        if answer["verdict"]["reason"] == "gain" {
            yes = Some(answer);
            break;
        }
        answers.push(answer["sentence"].to_string());
    }
    generator.stop()?;
    receiver.stop()?;
    nothing_is_left(&bed)?;
    let Some(answer) = yes else {
        let why = format!("a flood did not saturate CPU 0 alone: {answers:?}");
        not_run(test_name!(), &why);
        return Ok(());
    };
    let sentence = answer["sentence"].as_str().unwrap_or_default();
    ensure!(
        sentence.starts_with("yes: with steering about "),
        "{answer}"
    );
    ensure!(answer["ratio"].as_f64() >= Some(1.1), "{answer}");
    let command = answer["command"].as_str().unwrap_or_default();
    ensure!(
        command == format!("rxsteer run {name} --mode native"),
        "{answer}"
    );
    ensure!(answer["pollers"][0]["cpu"] == POLLING_CPU, "{answer}");
    Ok(())
}

/// The device is steered in each second turn, in which packets move.
#[test]
fn a_trial_steers_in_turns() -> Result<()> {
    in_lab!(alone: "it measures what is delivered");
    let bed = link()?;
    let name = &bed.link.dut.name;
    let (text, success) = advise(&bed, &[name, "--trial=0.5"])?;
    ensure!(!success && text.contains("nothing was received"), "{text}");
    let wire = paced(&bed, Frames::Udp(UdpFlows::to(&bed.link.dut, 64)))?;
    let mut trial = bed.link.dut.netns.command(RXSTEER)?;
    trial.args(["advise", name, "--trial=2", "--json"]);
    let mut trial = trial.stdout(Stdio::piped()).spawn()?;
    let mut states = Vec::new();
    while trial.try_wait()?.is_none() {
        states.push(is_watched(&bed)?);
        thread::sleep(Duration::from_millis(20));
    }
    states.dedup();
    wire.stop()?;
    let output = trial.wait_with_output()?;
    ensure!(output.status.success(), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(
        states.iter().filter(|&&steered| steered).count() == 4,
        "{states:?}"
    );
    ensure!(
        answer["ratios"].as_array().map(Vec::len) == Some(4),
        "{answer}"
    );
    for turns in ["steered", "unsteered"] {
        ensure!(answer[turns]["packets"].as_f64() > Some(1000.0), "{answer}");
        ensure!(answer[turns]["bytes"].as_f64() > Some(0.0), "{answer}");
    }
    nothing_is_left(&bed)
}

#[test]
fn devices_without_traffic_or_existence_are_named() -> Result<()> {
    in_lab!(alone: "it measures how busy the CPUs are");
    let bed = link()?;
    let name = &bed.link.dut.name;
    let (text, success) = advise(&bed, &["--seconds=0.3"])?;
    ensure!(success, "{text}");
    let none = [
        format!(" came to {name} in 0."),
        format!("Run this again under the load that matters: `rxsteer advise {name}`"),
        format!("{name}: 1 receive queue"),
        "kernel RPS is off".to_owned(),
    ];
    ensure!(text.contains("\nno answer: "), "{text}");
    for part in &none {
        ensure!(text.contains(part), "not {part:?}: {text}");
    }
    let (text, success) = advise(&bed, &["eth-none"])?;
    ensure!(!success && text.contains("there are: lo, "), "{text}");
    nothing_is_left(&bed)
}

#[test]
fn kernel_rps_is_left_alone() -> Result<()> {
    in_lab!(alone: "it measures how busy the CPUs are");
    let bed = link()?;
    let (dut, name) = (&bed.link.dut, &bed.link.dut.name);
    let light = Light::start(&bed)?;
    let files = vec![format!("/sys/class/net/{name}/queues/rx-0/rps_cpus")];
    let read = || dut.netns.run(|| Ok(fs::read_to_string(&files[0])?));
    let setting = dut.netns.run(|| Setting::keep_all(files.clone()))?;
    dut.netns.run(|| setting.set("3"))?;
    let with_rps = read()?;
    let answer = answer(&bed, &[name, "--seconds=0.3"])?;
    ensure!(read()? == with_rps);
    let watched = &answer["devices"][0];
    ensure!(watched["kernel_rps"][0] == "rx-0/rps_cpus", "{answer}");
    ensure!(watched["dry_run"].is_null(), "{answer}");
    let why = watched["not_counted"].as_str().unwrap_or_default();
    ensure!(why.contains("kernel RPS is on"), "{answer}");
    // With time left on all CPUs there is an answer, else none.
    let reason = answer["verdict"]["reason"].as_str().unwrap_or_default();
    ensure!(
        ["room", "kernel-rps", "not-receiving"].contains(&reason),
        "{answer}"
    );
    light.end()
}

/// Frames at a rate that is never lost, until it is dropped.
fn paced(bed: &Testbed, frames: Frames) -> Result<Generator> {
    let config = GeneratorConfig::lossless(frames, None).at(20_000);
    Generator::start(&bed.link, POLLING_CPU, &config)
}

/// Devices in softirq mode share their queues and one table, and each has its own count.
#[test]
fn two_devices_in_softirq_mode_are_both_counted() -> Result<()> {
    in_lab!(alone: "it measures how busy the CPUs are");
    let first = Testbed::new(&LinkConfig::default())?;
    let config = LinkConfig {
        id: 1,
        ..LinkConfig::default()
    };
    let second = Testbed::between(&first.link.tester.netns, &first.link.dut.netns, &config)?;
    let names = [&first.link.dut.name[..], &second.link.dut.name[..]];
    let flows = |bed: &Testbed, number| Frames::Udp(UdpFlows::to(&bed.link.dut, number));
    let rate = |answer: &Value, device: usize| {
        let rate = answer["devices"][device]["packets_per_second"].as_f64();
        rate.unwrap_or_default()
    };
    let ask = || {
        let answer = answer(
            &first,
            &[names[0], names[1], "--mode=softirq", "--seconds=0.5"],
        )?;
        ensure!(answer["mode"] == "softirq", "{answer}");
        for (index, name) in names.iter().enumerate() {
            let watched = &answer["devices"][index];
            ensure!(watched["device"] == *name, "{answer}");
            ensure!(watched["dry_run"] == "softirq", "{answer}");
            ensure!(watched["not_counted"].is_null(), "{answer}");
        }
        anyhow::Ok(answer)
    };
    let both = [
        paced(&first, flows(&first, 64))?,
        paced(&second, flows(&second, 64))?,
    ];
    // Flows that share a slot count once.
    let answer = until("the flows of both devices are counted", || {
        let answer = ask()?;
        let number = answer["flows"]["number"].as_u64() > Some(64);
        let rates = rate(&answer, 0) > 0.0 && rate(&answer, 1) > 0.0;
        Ok((number && rates).then_some(answer))
    })?;
    let sentence = answer["sentence"].as_str().unwrap_or_default();
    ensure!(!sentence.starts_with("no answer: no packet"), "{answer}");
    // The control: one device alone has no more than its flows, and some frames of the hosts' own.
    let [on_first, on_second] = both;
    on_second.stop()?;
    let answer = until("the second device is quiet", || {
        let answer = ask()?;
        Ok((rate(&answer, 1) < 10.0 && rate(&answer, 0) > 0.0).then_some(answer))
    })?;
    ensure!(
        answer["flows"]["number"].as_u64() <= Some(64 + 8),
        "{answer}"
    );
    on_first.stop()?;
    for bed in [&first, &second] {
        nothing_is_left(bed)?;
    }
    Ok(())
}

/// A tunnel is one flow. Many flows in it are found by a second look, and steered by `--tunnels`.
#[test]
fn the_flows_in_a_tunnel_are_found() -> Result<()> {
    in_lab!(alone: "it measures how busy the CPUs are");
    let bed = link()?;
    let name = &bed.link.dut.name;
    let tunnelled = |number| {
        let tunnel = Vxlan::to(&bed.link.dut, 7);
        Frames::Vxlan(tunnel, UdpFlows::to(&bed.link.dut, number))
    };
    let ask = |frames| {
        let wire = paced(&bed, frames)?;
        let answer = until("the tunnel has most packets", || {
            let answer = answer(&bed, &[name, "--seconds=0.5", "--mode=native"])?;
            let tunnel = answer["flows"]["busiest_tunnel"] == "vxlan";
            let most = answer["flows"]["busiest_share"].as_f64() > Some(0.9);
            Ok((tunnel && most).then_some(answer))
        })?;
        wire.stop()?;
        anyhow::Ok(answer)
    };
    let answer = ask(tunnelled(64))?;
    ensure!(
        answer["flows"]["tunnels"]["vxlan"].as_f64() > Some(0.9),
        "{answer}"
    );
    let inside = &answer["inside"];
    ensure!(inside["number"].as_u64() > Some(16), "{answer}");
    ensure!(inside["busiest_share"].as_f64() < Some(0.5), "{answer}");
    ensure!(inside["busiest_tunnel"].is_null(), "{answer}");
    if let Some(command) = answer["command"].as_str() {
        ensure!(command.contains("--tunnels vxlan"), "{answer}");
    }
    // The controls: one flow inside is not found by looking there, and flows outside need no look.
    ensure!(ask(tunnelled(1))?["inside"].is_null());
    let wire = paced(&bed, Frames::Udp(UdpFlows::to(&bed.link.dut, 64)))?;
    let plain = self::answer(&bed, &[name, "--seconds=0.5", "--mode=native"])?;
    ensure!(plain["inside"].is_null(), "{plain}");
    wire.stop()?;
    nothing_is_left(&bed)
}

/// The default policy leaves flows that GRO merges where they are in native mode: the dry run counts
/// them so. Softirq mode, the default, moves them. Native mode becomes part of the command where it
/// promises more.
#[test]
fn flows_that_gro_merges_stay() -> Result<()> {
    in_lab!(alone: "it measures how busy the CPUs are");
    let bed = link()?;
    let name = &bed.link.dut.name;
    let flows = UdpFlows {
        payload_len: 1000,
        run: 16,
        ..UdpFlows::to(&bed.link.dut, 4)
    };
    let bulk = TcpFlows {
        flows: flows.clone(),
        first_seq: 1,
        ack: 1,
        push: false,
    };
    let ask = |frames, mode: &str| {
        let config = GeneratorConfig::flood(frames);
        let generator = Generator::start(&bed.link, POLLING_CPU, &config)?;
        let answer = answer(&bed, &[name, "--seconds=0.5", mode])?;
        generator.stop()?;
        let merged = answer["flows"]["merged_share"].as_f64();
        anyhow::Ok((merged.unwrap_or(-1.0), answer))
    };
    let (merged, answer) = ask(Frames::Tcp(bulk.clone()), "--mode=native")?;
    ensure!(merged > 0.9, "{answer}");
    ensure!(answer["ratio"].as_f64() < Some(1.1), "{answer}");
    let (merged, answer) = ask(Frames::Tcp(bulk), "--mode=auto")?;
    ensure!(answer["devices"][0]["dry_run"] == "softirq", "{answer}");
    ensure!(merged == 0.0, "{answer}");
    if let Some(command) = answer["command"].as_str() {
        ensure!(!command.contains("--mode"), "{answer}");
    }
    // The controls: datagrams are not merged.
    let (merged, answer) = ask(Frames::Udp(flows), "--mode=auto")?;
    ensure!(merged == 0.0, "{answer}");
    let natively = answer["devices"][0]["dry_run"] == "native";
    if let Some(command) = answer["command"].as_str() {
        ensure!(command.contains("--mode native") == natively, "{answer}");
    }
    nothing_is_left(&bed)
}

#[test]
fn a_stop_leaves_nothing_behind() -> Result<()> {
    in_lab!(alone: "it measures how busy the CPUs are");
    let bed = link()?;
    let name = &bed.link.dut.name;
    for (signal, mode) in [
        (Signal::SIGINT, "--mode=native"),
        (Signal::SIGTERM, "--mode=auto"),
        (Signal::SIGKILL, "--mode=native"),
        (Signal::SIGKILL, "--mode=auto"),
    ] {
        let mut command = bed.link.dut.netns.command(RXSTEER)?;
        command.args(["advise", name, mode, "--seconds=600"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child.spawn()?;
        // The control: there is something to leave behind.
        until("the device is watched", || {
            ensure!(child.try_wait()?.is_none(), "it has ended");
            Ok(is_watched(&bed)?.then_some(()))
        })?;
        kill(Pid::from_raw(child.id() as i32), signal)?;
        let output = child.wait_with_output()?;
        let said = String::from_utf8(output.stderr)?;
        ensure!(output.stdout.is_empty() && !output.status.success());
        if signal != Signal::SIGKILL {
            ensure!(said.contains("stopped before the time was over"), "{said}");
        }
        nothing_is_left(&bed)?;
    }
    Ok(())
}
