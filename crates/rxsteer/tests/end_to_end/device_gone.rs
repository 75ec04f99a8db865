// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device that is deleted while it is steered, and made again.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::UdpSocket;
use std::process::Stdio;

use crate::helpers::process::*;
use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::*;
use rxsteer::api::status;

/// Modes with a program in the driver and with one at tc ingress.
const MODES: [&str; 2] = ["--mode=native", "--mode=softirq"];

/// Frames per second: so few that none waits for long. The kernel does not hold the device for
/// frames in a cpumap.
const RATE: u64 = 10_000;

/// Two devices, steered to [`OTHER_CPU`]. Their settings are those of `config`, with different ids.
struct Devices {
    first: Testbed,
    second: Testbed,
    running: Rxsteer,
}

fn config(id: u8) -> LinkConfig {
    LinkConfig {
        id,
        ..LinkConfig::default()
    }
}

impl Devices {
    fn new(mode: &str) -> Result<Self> {
        let first = Testbed::new(&config(0))?;
        let [tester, dut] = [&first.link.tester, &first.link.dut].map(|end| &end.netns);
        let second = Testbed::between(tester, dut, &config(1))?;
        let names = [&first, &second].map(|bed| &bed.link.dut.name[..]);
        let args = [&names[..], &["--rps-cpus=1", "--policy=rps", mode]].concat();
        let running = Rxsteer::steering(dut, &args)?;
        Ok(Self {
            running,
            first,
            second,
        })
    }

    fn device(&self, bed: &Testbed) -> Result<status::Device> {
        device(&self.running, bed)
    }
}

fn device(running: &Rxsteer, bed: &Testbed) -> Result<status::Device> {
    let device = running.device(&bed.link.dut.name)?;
    Ok(device.expect("it is in the status"))
}

fn traffic(bed: &Testbed) -> Result<Generator> {
    let frames = Frames::Udp(UdpFlows::to(&bed.link.dut, 100));
    let paced = GeneratorConfig::lossless(frames, None).at(RATE);
    Generator::start(&bed.link, POLLING_CPU, &paced)
}

/// Packets of the device are redirected, more than now.
fn is_steered(running: &Rxsteer, bed: &Testbed) -> Result<()> {
    let mut before = None;
    until("packets are redirected", || {
        let now = sums(&device(running, bed)?.queues).redirected;
        Ok((now > *before.get_or_insert(now)).then_some(()))
    })
}

fn is_gone(running: &Rxsteer, bed: &Testbed) -> Result<()> {
    let why = until("it is said", || Ok(device(running, bed)?.unsteered.pop()))?;
    assert!(why.contains("is gone"), "{why}");
    let text = String::from_utf8(rxsteer(&running.netns, &["status"])?.stdout)?;
    assert!(text.contains(&format!("warning: {why}")), "{text}");
    Ok(())
}

fn nr_lines(ended: &Ended, words: &str) -> usize {
    ended.log.lines().filter(|l| l.contains(words)).count()
}

/// An orderly end, in which nothing was waited for in vain.
fn ends_in_order(running: Rxsteer) -> Result<Ended> {
    let ended = running.stop(Signal::SIGTERM)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.log.contains("overtake"), "{ended:?}");
    accounts(&ended.log)?;
    Ok(ended)
}

#[test]
fn a_device_that_is_made_again_is_steered_again() -> Result<()> {
    in_lab!();
    for mode in MODES {
        let mut devices = Devices::new(mode)?;
        let wires = [traffic(&devices.first)?, traffic(&devices.second)?];
        is_steered(&devices.running, &devices.first)?;
        is_steered(&devices.running, &devices.second)?;
        let before = devices.device(&devices.first)?;
        devices.first.link.delete()?;
        is_gone(&devices.running, &devices.first)?;
        // The control: the other one is steered all the time.
        is_steered(&devices.running, &devices.second)?;
        assert_eq!(devices.device(&devices.second)?.unsteered, [""; 0]);
        let [first, second] = wires;
        // It lost its device.
        let _ = first.stop();

        devices.first.make_again(&config(0))?;
        let flows = UdpFlows::to(&devices.first.link.dut, 100);
        let sink = devices.first.receiver_in_order(&flows)?;
        let wire = traffic(&devices.first)?;
        until("the new one is steered", || {
            let now = devices.device(&devices.first)?;
            let new = now.ifindex == devices.first.link.dut.ifindex && now.mode == before.mode;
            Ok((new && sums(&now.queues).redirected > 0).then_some(()))
        })?;
        is_steered(&devices.running, &devices.second)?;
        let sent = wire.stop()?;
        second.stop()?;
        received_in_order(sink, sent.sent - sent.lost)?;
        let ended = ends_in_order(devices.running)?;
        assert_eq!(nr_lines(&ended, "is gone"), 1, "{ended:?}");
        assert_eq!(nr_lines(&ended, "starting anew"), 1, "{ended:?}");
        // Two devices, twice.
        assert_eq!(accounts(&ended.log)?.len() % 4, 0, "{ended:?}");
    }
    Ok(())
}

/// The only device, deleted under load.
fn without_device(mode: &str) -> Result<(Testbed, Rxsteer)> {
    let bed = Testbed::new(&config(0))?;
    let dut = &bed.link.dut;
    let args = [&dut.name[..], "--rps-cpus=1", "--policy=rps", mode];
    let running = Rxsteer::steering(&dut.netns, &args)?;
    let wire = traffic(&bed)?;
    is_steered(&running, &bed)?;
    bed.link.delete()?;
    let _ = wire.stop();
    Ok((bed, running))
}

#[test]
fn a_stop_does_not_wait_for_a_device_that_is_gone() -> Result<()> {
    in_lab!();
    for mode in MODES {
        // Before and after rxsteer has noticed.
        let (_bed, running) = without_device(mode)?;
        ends_in_order(running)?;
        let (bed, running) = without_device(mode)?;
        is_gone(&running, &bed)?;
        ends_in_order(running)?;
    }
    Ok(())
}

#[test]
fn settings_can_be_changed_while_the_only_device_is_gone() -> Result<()> {
    in_lab!();
    for mode in MODES {
        let (mut bed, running) = without_device(mode)?;
        for size in ["1024", "4096"] {
            let sizes = ["set", "--rps-flow-cnt", size, "--policy=rfs"];
            let set = rxsteer(&running.netns, &sizes)?;
            assert!(set.status.success(), "{set:?}");
            is_gone(&running, &bed)?;
        }
        bed.make_again(&config(0))?;
        let wire = traffic(&bed)?;
        let socket = bed
            .link
            .dut
            .netns
            .run(|| Ok(UdpSocket::bind("0.0.0.0:0")?))?;
        is_steered(&running, &bed)?;
        let status = running.status()?;
        assert_eq!(status.policy, "rfs");
        wire.stop()?;
        drop(socket);
        ends_in_order(running)?;
    }
    Ok(())
}

/// Deletes a device while skbs wait for a CPU, which the kernel then drops. Returns what has become
/// of them.
fn deleted_meanwhile() -> Result<status::Terms> {
    let bed = Testbed::new(&config(0))?;
    let dut = &bed.link.dut;
    let args = [
        &dut.name[..],
        "--rps-cpus=1",
        "--policy=rps",
        "--mode=softirq",
    ];
    let running = Rxsteer::steering(&dut.netns, &args)?;
    let wire = traffic(&bed)?;
    is_steered(&running, &bed)?;
    let hog = Hog::softirqs(OTHER_CPU)?;
    until("skbs wait", || {
        Ok((running.sums()?.queued > 10).then_some(()))
    })?;
    bed.link.delete()?;
    drop(hog);
    let _ = wire.stop();
    let sums = running.at_rest()?;
    ends_in_order(running)?;
    Ok(sums)
}

/// What waits is delivered before the device is gone, or vanishes: the account closes.
#[test]
fn skbs_that_find_no_device_are_accounted_for() -> Result<()> {
    in_lab!();
    for _ in 0..3 {
        let sums = deleted_meanwhile()?;
        ensure!(
            sums.delivered + sums.lost + sums.vanished == sums.redirected,
            "{sums:?}"
        );
    }
    Ok(())
}

#[test]
fn a_device_that_is_refused_is_reported_once() -> Result<()> {
    in_lab!();
    for mode in MODES {
        let (mut bed, running) = without_device(mode)?;
        is_gone(&running, &bed)?;
        // It sees the new device with the obstacle.
        running.signal(Signal::SIGSTOP)?;
        bed.make_again(&config(0))?;
        let dut = &bed.link.dut;
        let path = format!("/sys/class/net/{}/queues/rx-0/rps_cpus", dut.name);
        let kernel_rps = |mask: &str| dut.netns.run(|| Ok(fs::write(&path, mask)?));
        kernel_rps("2")?;
        running.signal(Signal::SIGCONT)?;
        let why = until("it is refused", || {
            let why = device(&running, &bed)?.unsteered.pop();
            Ok(why.filter(|why| why.contains("can't be steered")))
        })?;
        assert!(why.contains("kernel RPS is on"), "{why}");
        // The control: without the obstacle it is steered.
        kernel_rps("0")?;
        let wire = traffic(&bed)?;
        is_steered(&running, &bed)?;
        assert_eq!(device(&running, &bed)?.unsteered, [""; 0]);
        wire.stop()?;
        let ended = ends_in_order(running)?;
        assert_eq!(nr_lines(&ended, "can't be steered"), 1, "{ended:?}");
    }
    Ok(())
}

/// A device that goes while rxsteer loads its program is gone, and not one that takes no program.
#[test]
fn a_device_that_goes_during_a_start_is_said_to_be_gone() -> Result<()> {
    in_lab!();
    for mode in MODES {
        let bed = Testbed::new(&config(0))?;
        let dut = &bed.link.dut;
        let args = [&dut.name, mode, "--policy=rps", "--rps-cpus=auto"];
        let mut command = Rxsteer::command(&dut.netns, &args)?;
        let mut child = command.stderr(Stdio::piped()).spawn()?;
        let mut log = BufReader::new(child.stderr.take().expect("it is piped"));
        let mut said = String::new();
        // The masks are chosen after the device is examined, and before its program is loaded.
        while !said.contains("queue 0: ") && log.read_line(&mut said)? > 0 {}
        let pid = Pid::from_raw(child.id() as i32);
        kill(pid, Signal::SIGSTOP)?;
        let deleted = dut
            .netns
            .command("ip")?
            .args(["link", "del", &dut.name])
            .status()?;
        kill(pid, Signal::SIGCONT)?;
        assert!(deleted.success());
        log.read_to_string(&mut said)?;
        assert_eq!(child.wait()?.code(), Some(1), "{said}");
        let gone = format!("{} is gone", dut.name);
        assert!(said.contains(&gone), "{mode}: {said}");
    }
    Ok(())
}
