// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slots of the `rps_map` leave a CPU that can't keep up: in order, and only a few at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig, Window};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::witness::Witness;
use rxlab::testing::testbed::*;
use rxsteer::api::client;
use rxsteer::api::flows::{self, Flows, Location, Query};
use rxsteer::api::set::Change;
use rxsteer::api::status::Queue;
use rxsteer::daemon::options::Options;
use rxsteer::datapath::RPS_FLOW_CNT;
use rxsteer::datapath::backlogs::LIMIT_MAX;
use rxsteer::datapath::policy::Policy;

/// Few enough that each flow sends its next packet soon.
const NR_FLOWS: u32 = 400;

/// Frames per second: a fraction of what a CPU takes.
const RATE: f64 = 5_000.0;

/// Time for which the tests watch that nothing changes.
const WHILE: Duration = Duration::from_secs(1);

/// Pause between two status requests, so that they don't keep the polling CPU busy.
const PAUSE: Duration = Duration::from_millis(100);

/// Slots per second. The flows' slots take seconds to move.
const MOVES: u32 = 12;

const RPS_BALANCE: Policy = Policy {
    balance: true,
    ..Policy::RPS
};

/// A hog takes the time of the other CPU; flows are steered to it and to the polling CPU.
struct Scene<'a> {
    active: Active<'a>,
    bed: &'a Testbed,
    witness: Witness,
    wire: Generator,
    hog: Hog,
    start: Instant,
}

fn options(bed: &Testbed, policy: Policy) -> Options {
    Options {
        policy,
        // A short backlog drains soon, although the hog leaves little time.
        backlog: Some(64),
        balance_moves: MOVES,
        rps_flow_cnt: RPS_FLOW_CNT,
        ..bed.options(&[POLLING_CPU, OTHER_CPU])
    }
}

/// Sends in bursts with sleep in between: the generator's own pacing would keep a slow CPU busy.
fn slowly(frames: Frames, rate: f64) -> GeneratorConfig {
    let start = Instant::now();
    let due = move || {
        sleep(Duration::from_millis(2));
        (start.elapsed().as_secs_f64() * rate) as u64
    };
    GeneratorConfig {
        window: Some(Window {
            frames: 128,
            received: Arc::new(due),
            may_drop: false,
        }),
        ..GeneratorConfig::lossless(frames, None)
    }
}

impl<'a> Scene<'a> {
    fn new(bed: &'a Testbed, options: Options, rate: f64) -> Result<Self> {
        let flows = UdpFlows::to(&bed.link.dut, NR_FLOWS);
        let frames = Frames::Udp(flows);
        let witness = Witness::new(&bed.link.dut, &frames)?;
        let start = Instant::now();
        let active = Active::steer(&bed.link.dut, options)?;
        Ok(Self {
            active,
            bed,
            witness,
            wire: Generator::start(&bed.link, POLLING_CPU, &slowly(frames, rate))?,
            hog: Hog::new(OTHER_CPU)?,
            start,
        })
    }

    fn queue(&self) -> Result<Queue> {
        sleep(PAUSE);
        Ok(status(&self.active)?.devices[0].queues[0].clone())
    }

    fn set(&self, policy: Policy) -> Result<()> {
        let change = Change {
            policy: Some(policy),
            ..Change::default()
        };
        self.bed.link.dut.netns.run(|| client::set(change))?;
        Ok(())
    }

    /// All flows, as pairs of hash and wanted location.
    fn wants(&self) -> Result<Vec<(u32, Location)>> {
        sleep(PAUSE);
        let query = Query {
            limit: flows::LIMIT_MAX,
            ..Query::default()
        };
        let Flows { flows, .. } = self.bed.link.dut.netns.run(|| client::flows(query))?;
        let mut wants: Vec<_> = flows.iter().map(|f| (f.hash.0, f.wanted)).collect();
        wants.sort_by_key(|(hash, _)| *hash);
        Ok(wants)
    }

    /// Stops everything; returns the queue's counters and the number of reordered packets.
    fn end(self) -> Result<(Queue, u64)> {
        drop(self.hog);
        let sent = self.wire.stop()?;
        let queue = at_rest(&self.active, 0, sent.sent - sent.lost)?;
        self.active.stop()?;
        Ok((queue, self.witness.reordered()))
    }
}

#[test]
fn slots_leave_a_cpu_that_is_kept_from_its_work() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let scene = Scene::new(&bed, options(&bed, RPS_BALANCE), RATE)?;
    until("most flows want to be at the CPU that polls", || {
        let queue = scene.queue()?;
        let most = f64::from(MOVES) * scene.start.elapsed().as_secs_f64();
        assert!(queue.balanced as f64 <= most, "{queue:?}, {most}");
        let wants = scene.wants()?;
        let all = wants.len();
        Ok((all > NR_FLOWS as usize / 2 && at_other(&wants) < all / 3).then_some(()))
    })?;
    let before = scene.queue()?;
    until("and are there", || {
        let now = scene.queue()?;
        let [inline, all] = [now.inline - before.inline, now.received - before.received];
        Ok((all > 1_000 && inline > all * 3 / 5).then_some(()))
    })?;
    let (queue, reordered) = scene.end()?;
    assert!(queue.moves > 0 && queue.balanced > 0, "{queue:?}");
    assert_eq!(reordered, 0, "{queue:?}");
    Ok(())
}

/// Control of the order check above.
#[test]
fn without_the_rule_of_order_packets_overtake() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let options = Options {
        unguarded: true,
        // Packets must not be dropped before, and must wait long: of 40,000 packets a second the
        // CPU processes the share of a thread of nice 19 beside the hog, 1/66 of its time.
        backlog: Some(LIMIT_MAX),
        backlog_nice: 19,
        ..options(&bed, RPS_BALANCE)
    };
    let scene = Scene::new(&bed, options, 16.0 * RATE)?;
    until("a packet has overtaken another", || {
        sleep(PAUSE);
        Ok((scene.witness.reordered() > 0).then_some(()))
    })?;
    let (queue, _) = scene.end()?;
    assert!(queue.balanced > 0, "{queue:?}");
    Ok(())
}

/// Number of flows that want to be on the other CPU.
fn at_other(wants: &[(u32, Location)]) -> usize {
    let other = |want: &&(u32, Location)| want.1 == Location::Cpu(OTHER_CPU);
    wants.iter().filter(other).count()
}

/// Number of flows in both lists with another wanted location in the second. The second may have
/// more flows: not all are known at first.
fn moved(before: &[(u32, Location)], after: &[(u32, Location)]) -> usize {
    let after: HashMap<u32, Location> = after.iter().copied().collect();
    let elsewhere =
        |&&(hash, at): &&(u32, Location)| after.get(&hash).is_some_and(|&now| now != at);
    before.iter().filter(elsewhere).count()
}

/// Control: without balance in the policy no slot moves, also after a change at run time.
#[test]
fn slots_move_only_while_the_policy_says_so() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let scene = Scene::new(&bed, options(&bed, Policy::RPS), RATE)?;
    until("all flows are known", || {
        let wants = scene.wants()?;
        Ok((wants.len() > NR_FLOWS as usize * 9 / 10).then_some(()))
    })?;
    let before = scene.wants()?;
    sleep(WHILE);
    assert_eq!(scene.queue()?.balanced, 0);
    assert_eq!(moved(&before, &scene.wants()?), 0);

    scene.set(RPS_BALANCE)?;
    until("many flows want to be elsewhere", || {
        Ok((at_other(&scene.wants()?) < at_other(&before) * 3 / 4).then_some(()))
    })?;
    scene.set(Policy::RPS)?;
    let (balanced, after) = (scene.queue()?.balanced, scene.wants()?);
    assert!(moved(&before, &after) > 0);
    sleep(WHILE);
    assert_eq!(scene.queue()?.balanced, balanced);
    assert_eq!(moved(&after, &scene.wants()?), 0);
    let (queue, reordered) = scene.end()?;
    assert_eq!(reordered, 0, "{queue:?}");
    Ok(())
}
