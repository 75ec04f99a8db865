// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets do not overtake others of their flow under any change; without the rule of order they
//! do.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use rxlab::bench::scenario::reorder::{Case, Progress, Sample, measure};
use rxlab::lab::frame::Frames;
use rxlab::lab::hog::Hog;
use rxlab::lab::link::End;
use rxlab::lab::migrator::{Migrators, Reads};
use rxlab::lab::netns::Netns;
use rxlab::lab::senders::{self, Senders};
use rxlab::lab::sockets;
use rxlab::lab::witness::Witness;
use rxlab::testing::has_to_wait;
use rxlab::testing::testbed::{OTHER_CPU, until};
use rxlab::{in_lab, test_name};
use rxsteer::daemon::options::Mode;
use rxsteer::host::setting::Setting;
use rxsteer::host::topology::Topology;

/// Limit on a run. The control of softirq mode, which overtakes within a second on an idle machine, took more
/// than 30 s beside a compiler.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Packets to deliver.
const PACKETS: u64 = 100_000;

/// Time for which a CPU is kept busy, and time until the next one is.
const HOG: Duration = Duration::from_millis(5);

/// Packets to forward.
const PACKETS_BEHIND: u64 = 10_000;

/// Runs a case with the rule and, as the control, without.
fn nothing_overtakes(case: Case) -> Result<()> {
    nothing_overtakes_in(Mode::Native, case)
}

fn nothing_overtakes_in(mode: Mode, case: Case) -> Result<()> {
    let test = &format!("reorder {case}");
    let why = match (mode, case) {
        (_, Case::Hotplug) => "it takes a CPU offline",
        (_, Case::BusyPoll) => "its application has to have its CPU when packets come",
        (Mode::Softirq, _) => "it lets the softnet backlogs of all namespaces hold more",
        // 4 s alone; beside three others some controls overtook nothing in 120 s.
        _ => "a thread that other tests keep from its CPU is not overtaken",
    };
    if has_to_wait(test, why) {
        return Ok(());
    }
    in_lab!(test);
    let run = |unguarded, enough: fn(&Progress) -> bool| {
        measure(case, mode, unguarded, &|now| {
            now.eventful && enough(now) || now.elapsed > TIMEOUT
        })
    };
    let guarded = run(false, |now| now.packets >= PACKETS)?;
    assert_eq!(guarded.overtaken_at_delivery, 0, "{guarded:?}");
    // The tunnel device has a queue per CPU, outside the rule's scope.
    if case != Case::Vxlan {
        assert_eq!(guarded.overtaken_at_socket, 0, "{guarded:?}");
    }
    let unguarded = run(true, |now| now.overtaken > 0)?;
    assert!(unguarded.overtaken_at_delivery > 0, "{unguarded:?}");
    Ok(())
}

#[test]
fn skbs() -> Result<()> {
    nothing_overtakes_in(Mode::Softirq, Case::Udp)
}

#[test]
fn skbs_of_an_unconnected_socket() -> Result<()> {
    nothing_overtakes_in(Mode::Softirq, Case::UdpServer)
}

#[test]
fn merged_skbs() -> Result<()> {
    nothing_overtakes_in(Mode::Softirq, Case::TcpPush)
}

#[test]
fn skbs_received_on_several_cpus() -> Result<()> {
    nothing_overtakes_in(Mode::Softirq, Case::Softirq)
}

#[test]
fn skbs_while_rxsteer_restarts() -> Result<()> {
    nothing_overtakes_in(Mode::Softirq, Case::Restart)
}

#[test]
fn skbs_while_a_cpu_goes_offline() -> Result<()> {
    nothing_overtakes_in(Mode::Softirq, Case::Hotplug)
}

#[test]
fn skbs_of_a_tun_device() -> Result<()> {
    nothing_overtakes_in(Mode::Softirq, Case::Tun)
}

#[test]
fn skbs_of_the_loopback_device() -> Result<()> {
    nothing_overtakes_in(Mode::Softirq, Case::Lo)
}

/// Without rxsteer none overtakes either: what overtakes is the steering's fault.
#[test]
fn datagrams_of_the_loopback_device_alone() -> Result<()> {
    in_lab!(alone: "the softnet backlogs of all namespaces have to have room");
    let netns = Netns::new("dut")?;
    let lo = netns.run(|| End::of_host("lo"))?;
    let flows = senders::flows(&lo, 16);
    let witness = Witness::new(&lo, &Frames::Udp(flows.clone()))?;
    let cpus: Vec<u32> = Topology::host().online()?.iter().collect();
    let each = sockets::connected(&netns, &flows, 1 << 20)?;
    let each = each.into_iter().map(|socket| vec![socket]).collect();
    let readers = Migrators::start(&netns, each, Reads::Datagrams, &cpus)?;
    // All together less than a softnet backlog takes (net.core.netdev_max_backlog, 1000).
    let senders = Senders::start(&netns, &flows, &readers.received(), 32, &cpus)?;
    let start = Instant::now();
    for &cpu in cpus.iter().cycle() {
        let busy = Hog::softirqs(cpu)?;
        sleep(HOG);
        drop(busy);
        sleep(HOG);
        if witness.seen() >= PACKETS && senders.moves() > 0 || start.elapsed() > TIMEOUT {
            break;
        }
    }
    let moves = senders.moves();
    let sent = senders.stop()?;
    until("all are read", || {
        Ok((readers.received().sum() == sent).then_some(()))
    })?;
    let read = readers.stop()?;
    assert!(
        sent > 0 && moves > 0 && read.migrations > 0,
        "{sent} {moves} {read:?}"
    );
    assert_eq!(witness.seen(), sent);
    let reordered = witness.reordered() + read.reordered;
    assert_eq!(reordered, 0, "reordered: {reordered}");
    Ok(())
}

#[test]
fn skbs_of_flows_that_share_slots() -> Result<()> {
    nothing_overtakes_in(Mode::Softirq, Case::SharedSlots)
}

#[test]
fn udp() -> Result<()> {
    nothing_overtakes(Case::Udp)
}

#[test]
fn udp_server() -> Result<()> {
    nothing_overtakes(Case::UdpServer)
}

#[test]
fn tcp() -> Result<()> {
    nothing_overtakes(Case::Tcp)
}

#[test]
fn tcp_with_push() -> Result<()> {
    nothing_overtakes(Case::TcpPush)
}

#[test]
fn vxlan() -> Result<()> {
    nothing_overtakes(Case::Vxlan)
}

#[test]
fn a_second_veth() -> Result<()> {
    nothing_overtakes(Case::SecondVeth)
}

#[test]
fn busy_poll() -> Result<()> {
    nothing_overtakes(Case::BusyPoll)
}

#[test]
fn policies() -> Result<()> {
    nothing_overtakes(Case::Policies)
}

#[test]
fn the_interrupt_moves() -> Result<()> {
    nothing_overtakes(Case::Irq)
}

#[test]
fn softirqs_move() -> Result<()> {
    nothing_overtakes(Case::Softirq)
}

#[test]
fn restarts() -> Result<()> {
    nothing_overtakes(Case::Restart)
}

#[test]
fn a_cpu_goes_offline() -> Result<()> {
    nothing_overtakes(Case::Hotplug)
}

/// Forwards packets over a second device until `enough`: none is overtaken up to the stack.
fn behind(case: Case, enough: fn(&Progress) -> bool) -> Result<Sample> {
    let sample = measure(case, Mode::Native, false, &|now| {
        enough(now) || now.elapsed > TIMEOUT
    })?;
    assert_eq!(sample.overtaken_at_delivery, 0, "{case}: {sample:?}");
    Ok(sample)
}

/// Beyond the stack the rule does not hold: a flow that moves changes its transmit queue. It holds
/// where the choice of a transmit queue does not depend on the location, and where no flow moves
/// (docs/order.md).
#[test]
fn transmit_queues() -> Result<()> {
    in_lab!(alone: "a thread that other tests keep from its CPU is not overtaken");
    let test = test_name!();
    if Command::new("tc").arg("-V").output().is_err() {
        rxlab::testing::not_run(test, "there is no tc (iproute2)");
        return Ok(());
    }
    let moved = behind(Case::TxQueues, |now| now.overtaken_behind > 0)?;
    assert!(moved.overtaken_behind > 0, "{moved:?}");
    let many = |now: &Progress| now.packets >= PACKETS_BEHIND;
    let hashed = behind(Case::TxQueuesByHash, many)?;
    assert_eq!(hashed.overtaken_behind, 0, "{hashed:?}");
    let steady = behind(Case::TxQueuesByRps, many)?;
    // Flows leave a CPU that stalls, on a loaded machine; then the case says nothing.
    assert_eq!(steady.moves, 0, "a flow moved");
    assert_eq!(steady.overtaken_behind, 0, "{steady:?}");
    Ok(())
}

/// Behind a bridge and in a queue of each CPU: the rule holds up to the stack; what happens behind is
/// measured.
#[test]
fn a_container() -> Result<()> {
    in_lab!(alone: "it changes how many packets the softnet backlogs of all namespaces take at once");
    let sample = measure(Case::Container, Mode::Native, false, &|now| {
        now.packets >= PACKETS_BEHIND || now.elapsed > TIMEOUT
    })?;
    println!("{sample:?}");
    assert_eq!(sample.overtaken_at_delivery, 0, "{sample:?}");
    Ok(())
}

/// Set in the process to be killed.
const VICTIM: &str = "RXSTEER_TEST_VICTIM";

/// The same test in a process of its own, killed by `a_cpu_comes_back_when_killed`.
fn victim(cpu: u32) -> Result<()> {
    let online = Setting::keep(&format!("/sys/devices/system/cpu/cpu{cpu}/online"))?;
    online.set("0")?;
    eprintln!("offline");
    std::thread::sleep(TIMEOUT);
    Ok(())
}

#[test]
fn a_cpu_comes_back_when_killed() -> Result<()> {
    let test = test_name!();
    let cpu = OTHER_CPU;
    if std::env::var_os(VICTIM).is_some() {
        return victim(cpu);
    }
    if has_to_wait(test, "it takes a CPU offline") {
        return Ok(());
    }
    in_lab!(test);
    let mut victim = Command::new(std::env::current_exe()?)
        .args(["--exact", test, "--nocapture"])
        .env(VICTIM, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    let mut stderr = BufReader::new(victim.stderr.take().expect("piped"));
    stderr.read_line(&mut line)?;
    let online = || anyhow::Ok(Topology::host().online()?.contains(cpu));
    let was_offline = !online()?;
    victim.kill()?;
    victim.wait()?;
    if line.trim() != "offline" {
        stderr.read_to_string(&mut line)?;
        rxlab::testing::not_run(test, &line);
        return Ok(());
    }
    assert!(was_offline);
    until("the CPU is back", || Ok(online()?.then_some(())))
}
