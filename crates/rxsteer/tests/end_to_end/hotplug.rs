// SPDX-License-Identifier: MIT OR Apache-2.0
//! A CPU goes offline under traffic, and comes back.

use std::fs;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::helpers::pinned::{goes_on, mount_bpffs};
use crate::helpers::process::Rxsteer;
use crate::helpers::threads::{cpumaps, kthreads};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::RcvBufForce;
use rxlab::bench::setup::mode::Active;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::slow::slow;
use rxlab::testing::testbed::{OTHER_CPU, Testbed, received_in_order, status, until};
use rxlab::{in_lab, test_name};
use rxsteer::api::status::{Queue, Status};
use rxsteer::daemon::options::{Options, Pin};
use rxsteer::daemon::pin::detach;
use rxsteer::host::setting::Setting;

/// The threads of this process's backlogs, which are CPU 1's.
fn threads() -> Result<Vec<u32>> {
    kthreads(&cpumaps(std::process::id())?)
}

/// Access to the online state of CPU 1; `None` where it can't be changed.
fn switch(test: &str) -> Option<Setting> {
    let path = format!("/sys/devices/system/cpu/cpu{OTHER_CPU}/online");
    let online = Setting::keep(&path).ok();
    if online.is_none() {
        rxlab::testing::not_run(test, "this machine's CPUs can't go offline");
    }
    online
}

fn cpus_allowed(pid: u32) -> Result<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
    Ok(line.context("a thread has CPUs")?.trim().to_owned())
}

#[test]
fn a_cpu_that_goes_is_left_and_found_again() -> Result<()> {
    in_lab!(alone: "it takes a CPU offline");
    let Some(online) = switch(test_name!()) else {
        return Ok(());
    };
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let active = Active::steer(dut, bed.options(&[OTHER_CPU]))?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(20_000);
    let wire = Generator::start(&bed.link, 0, &paced)?;
    let queue = || Ok::<Queue, anyhow::Error>(status(&active)?.devices[0].queues[0].clone());
    // All packets received from now on have the same location.
    let only = |what: &str, of: fn(&Queue) -> u64| {
        until(what, || {
            let before = queue()?;
            let after = until("more packets", || {
                let now = queue()?;
                Ok((now.received > before.received + 1000).then_some(now))
            })?;
            // Counters are read while they change: two packets may be in one of them only.
            let others = (after.received - before.received).abs_diff(of(&after) - of(&before));
            Ok((others < 3).then_some(()))
        })
    };
    only("all redirected", |q| q.sums.redirected)?;
    let old = threads()?;
    for _ in 0..3 {
        online.set("0")?;
        only("all inline", |q| q.inline)?;
        until("the offline CPU's threads are gone", || {
            Ok(threads()?.is_empty().then_some(()))
        })?;
        online.set("1")?;
        only("all redirected again", |q| q.sums.redirected)?;
        let new = threads()?;
        assert_eq!(new.len(), 1, "{new:?}");
        assert_ne!(new, old);
        assert_eq!(cpus_allowed(new[0])?, OTHER_CPU.to_string());
    }
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    let queue = rxlab::testing::testbed::at_rest(&active, 0, sent.sent)?;
    assert_eq!(
        (queue.sums.lost, queue.sums.dropped + queue.sums.shed),
        (0, 0),
        "{queue:?}"
    );
    assert!(queue.moves > 0, "{queue:?}");
    active.stop()?;
    received_in_order(sink, sent.sent)
}

/// A CPU that was offline at the start is used once it is online.
#[test]
fn a_cpu_that_comes_later_is_used() -> Result<()> {
    in_lab!(alone: "it takes a CPU offline");
    let Some(online) = switch(test_name!()) else {
        return Ok(());
    };
    let bed = Testbed::new(&LinkConfig::default())?;
    let flows = UdpFlows::to(&bed.link.dut, 100);
    let sink = bed.receiver_by_cpu(&flows)?;
    online.set("0")?;
    let active = Active::steer(&bed.link.dut, bed.options(&[0, OTHER_CPU]))?;
    assert_eq!(status(&active)?.devices[0].queues[0].rps_cpus, "0");
    bed.send(Frames::Udp(flows.clone()), 500)?;
    assert_eq!(
        rxlab::testing::testbed::at_rest(&active, 0, 500)?.inline,
        500
    );
    online.set("1")?;
    let mut sent = 500;
    until("packets are redirected", || {
        sent += 100;
        bed.send(Frames::Udp(flows.clone()), 100)?;
        let queue = rxlab::testing::testbed::at_rest(&active, 0, sent)?;
        Ok((queue.sums.redirected > 0).then_some(()))
    })?;
    assert_eq!(status(&active)?.devices[0].queues[0].rps_cpus, "0-1");
    active.stop()?;
    rxlab::testing::testbed::received(sink, sent)?;
    Ok(())
}

/// A start anew, for a device that was deleted, does not end because the mask has no CPU now.
#[test]
fn a_start_anew_waits_for_the_cpus_of_the_mask() -> Result<()> {
    in_lab!(alone: "it takes a CPU offline");
    let Some(online) = switch(test_name!()) else {
        return Ok(());
    };
    let config = LinkConfig::default();
    let mut bed = Testbed::new(&config)?;
    let name = bed.link.dut.name.clone();
    let cpus = format!("--rps-cpus={OTHER_CPU}");
    let running = Rxsteer::steering(&bed.link.dut.netns, &[&name, "--policy=rps", &cpus])?;
    bed.link.delete()?;
    online.set("0")?;
    bed.make_again(&config)?;
    let ifindex = bed.link.dut.ifindex;
    until("the new device is steered", || {
        let status = running.status();
        let new = |status: Status| status.devices[0].ifindex == ifindex;
        Ok(status.is_ok_and(new).then_some(()))
    })?;
    online.set("1")?;
    let flows = UdpFlows::to(&bed.link.dut, 100);
    until("its packets are redirected", || {
        bed.send(Frames::Udp(flows.clone()), 100)?;
        let queues = running.status()?.devices.remove(0).queues;
        Ok((queues[0].sums.redirected > 0).then_some(()))
    })?;
    // The control: such a mask is refused at the first start, and the message says why.
    online.set("0")?;
    running.stop(Signal::SIGTERM)?;
    let refused = Rxsteer::start(&bed.link.dut.netns, &[&name, "--policy=rps", &cpus])?;
    let refused = refused.err().context("it starts")?;
    assert!(refused.log.contains("is online"), "{refused:?}");
    Ok(())
}

/// The threads of its backlogs run elsewhere meanwhile. The next process creates them again.
#[test]
fn a_cpu_that_goes_while_no_process_runs_is_found_by_the_next() -> Result<()> {
    in_lab!(alone: "it takes a CPU offline");
    let Some(online) = switch(test_name!()) else {
        return Ok(());
    };
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    mount_bpffs(&dut.netns)?;
    let flows = UdpFlows::to(dut, 500);
    let sink = bed.receiver_in_order(&flows)?;
    let steer = || {
        let options = Options {
            pin: Some(Pin::Default),
            ..bed.options(&[OTHER_CPU])
        };
        Active::steer(dut, options)
    };
    let first = steer()?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(20_000);
    let wire = Generator::start(&bed.link, 0, &paced)?;
    goes_on(&bed)?;
    let cpumaps = cpumaps(std::process::id())?;
    let threads = || kthreads(&cpumaps);
    let old = threads()?;
    first.stop()?;
    online.set("0")?;
    goes_on(&bed)?;
    online.set("1")?;
    assert_eq!(threads()?, old);
    // A thread may end between the two looks.
    let is_bound = |&thread: &u32| cpus_allowed(thread).is_ok_and(|at| at == OTHER_CPU.to_string());
    assert!(!old.is_empty() && !old.iter().any(is_bound));
    let second = steer()?;
    until("a new thread, bound to its CPU", || {
        let new = threads()?;
        Ok((new != old && new.first().is_some_and(is_bound)).then_some(()))
    })?;
    goes_on(&bed)?;
    // The control: nothing is created again for a CPU that stayed.
    let new = threads()?;
    second.stop()?;
    steer()?.stop()?;
    assert_eq!(threads()?, new);
    let ended = dut
        .netns
        .run(|| detach(&Pin::Default, false, Duration::from_secs(2)))?;
    assert_eq!(ended.disorder, None);
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    received_in_order(sink, sent.sent)
}

/// Numbered datagrams of one flow, of which [`Self::AHEAD`] are under way at any time: a backlog
/// with all of them is neither empty nor full.
struct Standing {
    from: UdpSocket,
    to: UdpSocket,
}

impl Standing {
    /// A veth's ring has room for 256.
    const AHEAD: u64 = 200;

    /// Time that each takes in the stack.
    const COST: Duration = Duration::from_micros(200);

    fn new(Link { tester, dut, .. }: &Link) -> Result<Self> {
        let to = dut.netns.run(|| Ok(UdpSocket::bind((dut.ipv4, 0))?))?;
        let from = tester.netns.run(|| {
            let from = UdpSocket::bind((tester.ipv4, 0))?;
            from.connect(to.local_addr()?)?;
            Ok(from)
        })?;
        setsockopt(&to, RcvBufForce, &(16 << 20))?;
        to.set_read_timeout(Some(Duration::from_millis(10)))?;
        Ok(Self { from, to })
    }

    /// Sends until told to stop, and waits for the last ones. `shed` tells how many were shed.
    /// Returns how many came.
    fn run(&self, stop: &AtomicBool, shed: impl Fn() -> Result<u64>) -> Result<u64> {
        let (mut sent, mut came, mut gone, mut next) = (0, 0, 0, 0);
        let mut step = || {
            while !stop.load(Relaxed) && sent < came + gone + Self::AHEAD {
                self.from.send(&u64::to_ne_bytes(sent))?;
                sent += 1;
            }
            let mut number = [0; 8];
            match self.to.recv(&mut number) {
                Ok(_) => {
                    let number = u64::from_ne_bytes(number);
                    ensure!(number >= next, "{number} came after {next}");
                    (came, next) = (came + 1, number + 1);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => gone = shed()?,
                Err(e) => return Err(e.into()),
            }
            Ok((came + gone == sent).then_some(came))
        };
        while !stop.load(Relaxed) {
            step()?;
        }
        until("the last ones have come", step)
    }
}

/// One flow could keep the backlog from being empty for as long as it sends, and the CPU would not
/// be used again. After a second its frames are dropped until it has left.
#[test]
fn a_cpu_that_goes_is_left_by_a_flow_without_a_pause() -> Result<()> {
    in_lab!(alone: "it takes a CPU offline");
    let Some(online) = switch(test_name!()) else {
        return Ok(());
    };
    let bed = Testbed::new(&LinkConfig::default())?;
    slow(&bed.link.dut, Standing::COST)?;
    let active = Active::steer(&bed.link.dut, bed.options(&[OTHER_CPU]))?;
    let queue = || Ok::<Queue, anyhow::Error>(status(&active)?.devices[0].queues[0].clone());
    let grows = |what: &str, of: fn(&Queue) -> u64| {
        let before = of(&queue()?);
        until(what, || Ok((of(&queue()?) > before + 1000).then_some(())))
    };
    let flow = Standing::new(&bed.link)?;
    let stop = AtomicBool::new(false);
    let came = std::thread::scope(|scope| {
        let flow = scope.spawn(|| flow.run(&stop, || Ok(queue()?.sums.shed)));
        let threads = || kthreads(&cpumaps(std::process::id())?);
        let goes_and_comes = || {
            let old = threads()?;
            online.set("0")?;
            grows("it has left", |q| q.inline)?;
            online.set("1")?;
            grows("it is redirected again", |q| q.sums.redirected)?;
            let new = threads()?;
            ensure!(new.len() == 1 && new != old, "{old:?}, {new:?}");
            // The control: for a second it could not leave, and there was room. On a busy host it
            // may have a pause.
            let sums = queue()?.sums;
            ensure!(sums.dropped == 0, "{sums:?}");
            Ok((sums.shed > 0).then_some(()))
        };
        let changes = || {
            grows("it is redirected", |q| q.sums.redirected)?;
            until("it was shed", goes_and_comes)
        };
        let changed = changes();
        stop.store(true, Relaxed);
        let came = flow.join().expect("the sender does not panic");
        changed.and(came)
    })?;
    let queue = queue()?;
    assert_eq!(came, queue.received - queue.sums.shed, "{queue:?}");
    active.stop()
}
