// SPDX-License-Identifier: MIT OR Apache-2.0
//! Idle backlogs are taken down, and there are never more than may exist.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use crate::helpers::threads::{cpumaps, kthreads, renice};
use anyhow::{Context, Result};
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::{
    OTHER_CPU, Testbed, queue_at_rest, received_in_order, status, until,
};
use rxsteer::daemon::options::Options;
use rxsteer::daemon::takedown::Bounds;

/// Shorter than a second, the time between two looks.
const SOON: Duration = Duration::from_millis(500);

/// Two queues, both polled on CPU 0, with flows of their own.
struct Lab {
    bed: Testbed,
    flows: UdpFlows,
}

impl Lab {
    fn new() -> Result<Self> {
        let bed = Testbed::new(&LinkConfig {
            queues: 2,
            ..LinkConfig::default()
        })?;
        let flows = UdpFlows::to(&bed.link.dut, 200);
        Ok(Self { bed, flows })
    }

    fn steer(&self, bounds: Bounds) -> Result<Active<'_>> {
        let options = Options {
            bounds,
            ..self.bed.options(&[OTHER_CPU])
        };
        Active::steer(&self.bed.link.dut, options)
    }

    /// At so many packets a second.
    fn traffic(&self, queue: u32, rate: u64) -> Result<Generator> {
        let frames = Frames::Udp(self.flows.clone());
        let paced = GeneratorConfig::lossless(frames, None).at(rate);
        Generator::start(&self.bed.link, queue, &paced)
    }
}

/// Bounds under which a backlog is idle soon.
fn idle_soon() -> Bounds {
    Bounds {
        idle: SOON,
        ..Bounds::default()
    }
}

/// The threads of all backlogs of this process.
fn threads() -> Result<Vec<u32>> {
    let mut threads = kthreads(&cpumaps(std::process::id())?)?;
    threads.sort_unstable();
    Ok(threads)
}

fn redirected(active: &Active<'_>, queue: usize) -> Result<u64> {
    Ok(status(active)?.devices[0].queues[queue].sums.redirected)
}

/// How often rxsteer's thread in this process wakes up in two seconds: the voluntary context switches,
/// each of which ends with one.
fn wake_ups() -> Result<u64> {
    let switches = || {
        for task in fs::read_dir("/proc/self/task")?.flatten() {
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            let field = |name| status.lines().find_map(|line| line.strip_prefix(name));
            if field("Name:\t") == Some("rxsteer") {
                let switches = field("voluntary_ctxt_switches:\t").context("no such field")?;
                return Ok::<u64, anyhow::Error>(switches.parse()?);
            }
        }
        anyhow::bail!("no thread of rxsteer")
    };
    let before = switches()?;
    std::thread::sleep(Duration::from_secs(2));
    Ok(switches()? - before)
}

/// Returns once more packets of the queue have been redirected.
fn more_redirected(active: &Active<'_>, queue: usize) -> Result<()> {
    let before = redirected(active, queue)?;
    until("packets are redirected", || {
        Ok((redirected(active, queue)? > before + 100).then_some(()))
    })
}

#[test]
fn an_idle_backlog_goes_and_comes_back_in_order() -> Result<()> {
    in_lab!();
    let lab = Lab::new()?;
    let active = lab.steer(idle_soon())?;
    let mut sent = 0;
    let mut old = Vec::new();
    for _ in 0..3 {
        // The numbers of packets begin again with each generator.
        let sink = lab.bed.receiver_in_order(&lab.flows)?;
        let wire = lab.traffic(0, 10_000)?;
        more_redirected(&active, 0)?;
        let new = threads()?;
        assert_eq!(new.len(), 1, "{new:?}");
        assert_ne!(new, old, "another thread");
        let report = wire.stop()?;
        assert_eq!(report.lost, 0);
        sent += report.sent;
        until("the idle backlog's thread is gone", || {
            Ok(threads()?.is_empty().then_some(()))
        })?;
        assert_eq!(status(&active)?.nr_backlogs, 0);
        old = new;
        received_in_order(sink, report.sent)?;
    }
    let queue = queue_at_rest(&active, 0, 0, sent)?;
    assert_eq!((queue.sums.lost, queue.dropped()), (0, 0), "{queue:?}");
    active.stop()
}

/// Backlogs that are not idle can be taken down in order, too, and those with frames are not taken
/// down: without the proof that they are drained, their flows would overtake these frames.
#[test]
fn under_traffic_nothing_is_overtaken() -> Result<()> {
    in_lab!();
    let lab = Lab::new()?;
    let sink = lab.bed.receiver_in_order(&lab.flows)?;
    let active = lab.steer(Bounds {
        idle: Duration::ZERO,
        ..Bounds::default()
    })?;
    let wire = lab.traffic(0, 50_000)?;
    let mut seen = BTreeSet::new();
    until("three backlogs, one after the other", || {
        seen.extend(threads()?);
        Ok((seen.len() >= 3).then_some(()))
    })?;
    // From now on its thread has too little time, and frames wait in the ring.
    let hog = Hog::new(OTHER_CPU)?;
    until("packets are queued", || {
        renice(&threads()?, 19)?;
        let queue = &status(&active)?.devices[0].queues[0];
        Ok((queue.sums.queued > 100).then_some(()))
    })?;
    let before = wire.sent();
    until("packets of three seconds", || {
        Ok((wire.sent() > before + 150_000).then_some(()))
    })?;
    renice(&threads()?, 0)?;
    drop(hog);
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    let queue = queue_at_rest(&active, 0, 0, sent.sent)?;
    assert_eq!(queue.sums.lost, 0, "{queue:?}");
    active.stop()?;
    let arrived = sent.sent - queue.dropped();
    received_in_order(sink, arrived)
}

/// The control: the backlog of a queue with traffic stays while another's is taken down.
#[test]
fn a_backlog_with_traffic_stays() -> Result<()> {
    in_lab!();
    let lab = Lab::new()?;
    let active = lab.steer(idle_soon())?;
    let steady = lab.traffic(0, 10_000)?;
    more_redirected(&active, 0)?;
    let stays = threads()?;
    let other = lab.traffic(1, 10_000)?;
    more_redirected(&active, 1)?;
    assert_eq!(threads()?.len(), 2);
    other.stop()?;
    until("one thread is gone", || {
        Ok((threads()?.len() < 2).then_some(()))
    })?;
    assert_eq!(threads()?, stays);
    more_redirected(&active, 0)?;
    steady.stop()?;
    active.stop()
}

#[test]
fn a_backlog_that_may_not_exist_is_made_when_there_is_room() -> Result<()> {
    in_lab!();
    let lab = Lab::new()?;
    let active = lab.steer(Bounds {
        backlogs: 1,
        idle_if_full: SOON,
        ..Bounds::default()
    })?;
    let first = lab.traffic(0, 10_000)?;
    more_redirected(&active, 0)?;
    let second = lab.traffic(1, 10_000)?;
    until("a backlog is refused", || {
        Ok((status(&active)?.refused_backlogs == 1).then_some(()))
    })?;
    let now = status(&active)?;
    assert_eq!((now.nr_backlogs, now.most_backlogs), (1, 1));
    assert_eq!(redirected(&active, 1)?, 0);
    assert_eq!(threads()?.len(), 1);
    first.stop()?;
    more_redirected(&active, 1)?;
    let now = status(&active)?;
    assert_eq!((now.nr_backlogs, now.refused_backlogs), (1, 0));
    second.stop()?;
    active.stop()
}

/// Backlogs are looked at ten times a second, the host once a second.
#[test]
fn without_backlogs_rxsteer_sleeps() -> Result<()> {
    in_lab!();
    let lab = Lab::new()?;
    let active = lab.steer(Bounds {
        idle: Duration::from_secs(5),
        ..Bounds::default()
    })?;
    let wire = lab.traffic(0, 10_000)?;
    more_redirected(&active, 0)?;
    wire.stop()?;
    // The control: the backlog exists.
    let with = wake_ups()?;
    assert_eq!(threads()?.len(), 1);
    until("the idle backlog's thread is gone", || {
        Ok(threads()?.is_empty().then_some(()))
    })?;
    let without = wake_ups()?;
    eprintln!("{with} with a backlog, {without} without");
    assert!(with >= 15, "{with} wake-ups");
    assert!(without <= 10, "{without} wake-ups");
    active.stop()
}
