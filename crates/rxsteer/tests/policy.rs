// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where flows want to be, by policy.h, load.h and steer.h as they are, on CPUs whose load is made
//! up. Whether they may go there is left out: whatever came earlier counts as delivered (tests/order.rs
//! has the rule of order).

mod common;

use common::cases::{config, fixed};
use proptest::prelude::*;
use proptest::sample::subsequence;
use rxsteer::datapath::native;
use rxsteer::datapath::rps_map::SLOTS;
use rxsteer::datapath::tables::cpu_mask;
use rxsteer::native_skel::types::rx_facts;
use rxsteer::rx::types::{
    backlog, rps_dev_flow, rps_location, rps_map, rx_policy, rx_pressure, rx_queue, rx_reason,
    rx_verdict,
};

const INLINE: u16 = rps_location::RPS_INLINE.0 as u16;
const FOLLOW: u16 = rx_policy::RX_FOLLOW.0 as u16;
const IDLE: u16 = rx_policy::RX_IDLE.0 as u16;
const ADAPT: u16 = rx_policy::RX_ADAPT.0 as u16;
const RELAXED: u16 = rx_pressure::RX_RELAXED.0 as u16;
const PRESSED: u16 = rx_pressure::RX_PRESSED.0 as u16;
const POLLED: u16 = rx_pressure::RX_POLLED.0 as u16;
const IDLE_CPU: u8 = rx_reason::RX_IDLE_CPU.0 as u8;

/// Policies that look at the load.
const LOADED: [u16; 5] = [
    IDLE | FOLLOW,
    ADAPT | FOLLOW,
    ADAPT | IDLE | FOLLOW,
    ADAPT,
    ADAPT | IDLE,
];

const NR_CPUS: u32 = 8;

/// Polls in a turn.
const POLLS: u32 = 8;

/// All of a CPU's time.
const WHOLE: u32 = 1024;

const TURN_NS: u64 = 10_000_000;

/// Frames that a backlog may hold.
const LIMIT: u64 = 400;

/// An eighth of a queue's frames.
const FLOW_LIMIT: u32 = 123;

struct World {
    facts: rx_facts,
    q: rx_queue,
    backlogs: Vec<backlog>,
    map: Box<rps_map>,
    flows: Vec<rps_dev_flow>,
    /// entries of the sock_flow_table
    applications: Vec<u32>,
    /// CPUs to which frames come faster than they take them: three quarters of the limit wait
    crowded: u64,
    polling: u32,
    /// of a turn's polls, those that an application does
    busy_polls: u32,
}

impl World {
    /// CPU 0 polls; all CPUs are busy, have room, and wait for a flow's first packet.
    fn new(policy: u16, nr_flows: usize) -> Self {
        let backlog = backlog {
            head: u64::MAX,
            ..Default::default()
        };
        let mut world = Self {
            facts: rx_facts {
                entries: u64::MAX,
                limit: LIMIT,
                nr_cpus: NR_CPUS,
                cpu_mask: cpu_mask(NR_CPUS),
                ..Default::default()
            },
            q: rx_queue {
                epoch: 1,
                policy,
                polls_delivered: u64::MAX,
                ..Default::default()
            },
            backlogs: vec![backlog; NR_CPUS as usize],
            map: Box::new(rps_map {
                location: [INLINE; SLOTS],
            }),
            flows: vec![rps_dev_flow::default(); nr_flows],
            applications: vec![0; nr_flows],
            crowded: 0,
            polling: 0,
            busy_polls: 0,
        };
        let everyone = Vec::from_iter(0..NR_CPUS as u16);
        world.near(&vec![everyone; NR_CPUS as usize]);
        world
    }

    /// Where an idle CPU is looked for, by CPU.
    fn near(&mut self, near: &[Vec<u16>]) {
        for (cpu, near) in self.facts.cpus.iter_mut().zip(near) {
            cpu.near[..near.len()].copy_from_slice(near);
            cpu.nr_near = near.len() as u32;
        }
    }

    fn hash(flow: usize) -> u32 {
        (flow as u32).wrapping_mul(0x9e37_79b1)
    }

    /// Its application is on a CPU, or polls.
    fn application(&mut self, flow: usize, location: u32) {
        self.applications[flow] =
            native::sock_flow_entry(Self::hash(flow), location as u16, self.facts.cpu_mask);
    }

    fn frame(&mut self, flow: usize) -> rx_verdict {
        let cpu = self.polling;
        self.facts.sock_flow = self.applications[flow];
        self.facts.nr_polls += 1;
        let verdict = native::rx_steer(
            &mut self.facts,
            &mut self.q,
            &mut self.backlogs,
            &self.map,
            &mut self.flows[flow],
            Self::hash(flow),
            cpu,
        );
        self.serve();
        verdict
    }

    /// Each backlog is as full as it is meant to be.
    fn serve(&mut self) {
        for (cpu, b) in self.backlogs.iter_mut().enumerate() {
            let waiting = LIMIT * 3 / 4 * (self.crowded >> cpu & 1);
            b.tail = b.tail.max(waiting);
            b.taken = b.tail - waiting;
        }
    }

    /// A turn ends in which polls, and everything, took so much of the polling CPU's time.
    fn turn(&mut self, polls: u32, all: u32) {
        let now = self.q.load.turn_start + TURN_NS;
        self.q.load.poll_ns = u64::from(polls) * TURN_NS / u64::from(WHOLE);
        (self.q.load.nr_polls, self.q.nr_busy_polls) = (POLLS, self.busy_polls);
        self.q.load.nr_exhausted = POLLS - self.busy_polls;
        native::load_turn(&mut self.q, now, all, 0);
    }

    fn bit(bits: &mut u64, cpu: u32, set: bool) {
        *bits = *bits & !(1 << cpu) | u64::from(set) << cpu;
    }

    fn is_idle(&self, cpu: u16) -> bool {
        self.facts.idle >> cpu & 1 == 1
    }

    /// Where a packet may be processed that is not processed here.
    fn is_elsewhere(&self, cpu: u16) -> bool {
        u32::from(cpu) != self.polling && self.backlogs[usize::from(cpu)].closed == 0
    }

    /// A CPU as a location.
    fn location(&self, cpu: u16) -> u16 {
        match u32::from(cpu) == self.polling {
            true => INLINE,
            false => cpu,
        }
    }

    /// A flow's part of a CPU's time.
    fn share(&self, flow: &rps_dev_flow) -> u32 {
        let inline_ns = match self.q.load.inline_ns {
            0 => 2000 * 16,
            known => known,
        };
        let ns = u64::from(flow.load) * u64::from(inline_ns) / 16;
        (ns * u64::from(WHOLE) / TURN_NS).min(u64::from(WHOLE)) as u32
    }

    /// The nearest idle CPU on which the flow would find the time that it needs. The one that polls
    /// counts as idle while it has room for all.
    fn idle_near(&self, flow: &rps_dev_flow, cpu: u16) -> Option<u16> {
        let center = &self.facts.cpus[usize::from(cpu)];
        let mut near = center.near[..center.nr_near as usize].iter().copied();
        let near = near.find(|&near| {
            if u32::from(near) == self.polling {
                return self.q.load.pressure == RELAXED;
            }
            let busy = self.facts.busy[usize::from(near)];
            let crowded = self.backlogs[usize::from(near)].crowded as u32;
            let now = self.crowded >> near & 1 > 0;
            let rested = !now && (crowded == 0 || self.q.load.turn - crowded >= 100);
            let fits = busy + self.share(flow) <= WHOLE;
            self.is_elsewhere(near) && self.is_idle(near) && fits && rested
        });
        near.map(|near| self.location(near))
    }

    /// What a number makes of everything that is neither a flow's nor a table's.
    fn load(&mut self, number: u32) {
        let [a, b, c, d] = number.to_le_bytes().map(u32::from);
        let cpu = a % NR_CPUS;
        let share = b % 5 * 256;
        match c % 9 {
            0 | 1 => Self::bit(&mut self.facts.idle, cpu, b % 2 > 0),
            2 => self.facts.busy[cpu as usize] = share,
            3 => self.facts.demand[cpu as usize] = share,
            4 => Self::bit(&mut self.crowded, cpu, b % 4 == 0),
            5 => {
                self.facts.consumer_waits = b % 2;
                self.facts.consumer_busy = (b >> 1) * WHOLE / 127;
            }
            // Up to 2 ms a frame: few frames make a CPU busy here.
            6 => self.q.load.inline_ns = b % 5 * 8_000_000,
            7 => self.busy_polls = b % (POLLS + 1),
            _ => self.turn(b % 3 * 512, d % 3 * 512),
        }
        self.serve();
    }

    /// What a number makes of where applications and CPUs are.
    fn stir(&mut self, number: u32) {
        let [a, b, c, _] = number.to_le_bytes().map(u32::from);
        let cpu = a % NR_CPUS;
        match c % 4 {
            0 => {
                let location = if a < 32 { INLINE.into() } else { cpu };
                self.application(b as usize % self.flows.len(), location);
            }
            1 => {
                let first = b as usize * SLOTS / 256;
                let location = if a < 32 { INLINE } else { cpu as u16 };
                self.map.location[first..].fill(location);
            }
            2 if cpu != self.polling => self.backlogs[cpu as usize].closed = u64::from(b % 2),
            3 if b < 64 => {
                self.polling = cpu;
                self.backlogs[cpu as usize].closed = 0;
            }
            _ => {}
        }
    }

    /// What is wrong with where a flow is now that was `before`.
    fn mistake(&self, before: &rps_dev_flow, flow: &rps_dev_flow) -> Option<&'static str> {
        let begins = before.epoch != self.q.epoch;
        let wanted = self.location(before.wanted);
        let stayed = begins || (before.location, wanted) == (INLINE, INLINE);
        let leaves = stayed && flow.location != INLINE;
        let chosen = flow.reason == IDLE_CPU
            && (before.reason, wanted) != (IDLE_CPU, self.location(flow.wanted));
        let adapts = self.q.policy & ADAPT != 0;
        let pressure = self.q.load.pressure;
        // For what is moving already.
        let waits = self.q.load.moving_ns > TURN_NS / 64;
        if flow.location != INLINE && !self.is_elsewhere(flow.location) {
            Some("a CPU that is offline, or polls")
        } else if chosen && self.idle_near(flow, flow.base) != Some(flow.wanted) {
            Some("not the nearest idle CPU with room")
        } else if adapts && pressure == RELAXED && flow.location != INLINE && !waits {
            Some("elsewhere, although there is room")
        } else if adapts && ![PRESSED, POLLED].contains(&pressure) && leaves {
            Some("left INLINE without pressure")
        } else if adapts && leaves && flow.load < self.q.load.leaving {
            Some("left INLINE before larger flows")
        } else if adapts && leaves && flow.base == INLINE {
            Some("left its application's polls")
        } else {
            None
        }
    }
}

fn loaded() -> impl Strategy<Value = u16> {
    proptest::sample::select(&LOADED)
}

/// For each CPU, some of the CPUs in some order.
fn near() -> impl Strategy<Value = Vec<Vec<u16>>> {
    let cpus = Vec::from_iter(0..NR_CPUS as u16);
    let some = subsequence(cpus, 0..=NR_CPUS as usize).prop_shuffle();
    proptest::collection::vec(some, NR_CPUS as usize)
}

/// Turns at random, each a number: proptest makes and shrinks numbers faster than anything else.
fn numbers(max: usize) -> impl Strategy<Value = Vec<u32>> {
    proptest::collection::vec(any::<u32>(), 0..max)
}

const NR_FLOWS: usize = 6;

/// What a number of [`numbers`] does.
enum Turn {
    Frame(usize),
    Load,
    Stir,
}

fn turn(number: u32) -> Turn {
    match number >> 24 {
        0..160 => Turn::Frame(number as usize % NR_FLOWS),
        160..232 => Turn::Load,
        _ => Turn::Stir,
    }
}

/// The first mistake on the way, if any.
fn run(policy: u16, near: &[Vec<u16>], numbers: &[u32]) -> Result<(), String> {
    let mut world = World::new(policy, NR_FLOWS);
    world.near(near);
    for (i, &number) in numbers.iter().enumerate() {
        match turn(number) {
            Turn::Load => world.load(number),
            Turn::Stir => world.stir(number),
            Turn::Frame(flow) => {
                let before = world.flows[flow];
                world.frame(flow);
                if let Some(mistake) = world.mistake(&before, &world.flows[flow]) {
                    let load = world.q.load;
                    return Err(format!(
                        "{mistake}, at {i}: {before:?}, {:?}, {load:?}",
                        world.flows[flow]
                    ));
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(3000))]

    #[test]
    fn flows_want_what_the_policy_says(
        policy in loaded(),
        near in near(),
        numbers in numbers(400),
    ) {
        prop_assert_eq!(run(policy, &near, &numbers).err(), None);
    }
}

/// What a packet's way is decided by, and what becomes of it: all but the policies' own notes.
fn decided(world: &World) -> String {
    let flows = world.flows.iter().map(|&flow| rps_dev_flow {
        turn: 0,
        frames: 0,
        load: 0,
        asked: 0,
        ..flow
    });
    let q = rx_queue {
        load: Default::default(),
        busy_polled: 0,
        nr_busy_polls: 0,
        polled_for: 0,
        ..world.q
    };
    format!("{:?} {q:?} {:?}", Vec::from_iter(flows), world.backlogs)
}

/// Whether all becomes of packets that would become of them without a load.
fn is_plain(policy: u16, numbers: &[u32]) -> bool {
    let [mut loaded, mut plain] = [World::new(policy, NR_FLOWS), World::new(policy, NR_FLOWS)];
    numbers.iter().all(|&number| match turn(number) {
        Turn::Load => {
            loaded.load(number);
            // What waits in backlogs is no knob's.
            plain.crowded = loaded.crowded;
            plain.serve();
            true
        }
        Turn::Stir => {
            loaded.stir(number);
            plain.stir(number);
            true
        }
        Turn::Frame(flow) => {
            loaded.frame(flow) == plain.frame(flow) && decided(&loaded) == decided(&plain)
        }
    })
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn without_its_knobs_nothing_depends_on_the_load(
        policy in prop_oneof![Just(0), Just(FOLLOW)],
        numbers in numbers(300),
    ) {
        prop_assert!(is_plain(policy, &numbers));
    }
}

/// The control: with any of the knobs, it does.
#[test]
fn with_its_knobs_the_load_matters() {
    for policy in LOADED {
        let mut cases = fixed(numbers(300)).take(100);
        assert!(cases.any(|numbers| !is_plain(policy, &numbers)), "{policy}");
    }
}

/// A turn with a frame of flow 0, whose application takes it where it took the last one.
fn idle_turn(world: &mut World, application: u32) -> u16 {
    world.application(0, application);
    world.turn(0, 0);
    world.frame(0);
    world.flows[0].location
}

proptest! {
    #![proptest_config(config(1000))]

    /// Plain RFS, but for an application that is busy while a CPU near it is idle.
    #[test]
    fn idle_is_for_the_packets_of_a_busy_application(
        near in near(),
        application in 1..NR_CPUS,
        idle in 0u64..1 << NR_CPUS,
        busy in proptest::collection::vec(0..=WHOLE, NR_CPUS as usize),
        waits in any::<bool>(),
    ) {
        let mut world = World::new(FOLLOW | IDLE, 1);
        world.near(&near);
        world.facts.idle = idle;
        world.facts.busy[..busy.len()].copy_from_slice(&busy);
        world.facts.consumer_waits = waits.into();
        let home = application as u16;
        let idle = match waits || world.is_idle(home) {
            true => home,
            false => world.idle_near(&world.flows[0], home).unwrap_or(home),
        };
        idle_turn(&mut world, application);
        prop_assert_eq!(idle_turn(&mut world, application), idle);

        // It is no longer idle with the flow there, and the application has written its entry again.
        if idle == INLINE {
            world.turn(0, WHOLE * 3 / 4);
        } else if idle != home {
            World::bit(&mut world.facts.idle, idle.into(), false);
            world.facts.busy[usize::from(idle)] = WHOLE;
        }
        for _ in 0..50 {
            prop_assert_eq!(idle_turn(&mut world, application), idle);
        }
        world.facts.consumer_waits = 1;
        prop_assert_eq!(idle_turn(&mut world, application), home);
    }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn large_flows_leave_before_small_ones(
        frames in proptest::collection::vec(1u32..100, 2..20),
        polls in 400..=WHOLE,
    ) {
        let mut world = World::new(FOLLOW | ADAPT, frames.len());
        world.facts.consumer_waits = 1;
        let mut left = vec![0; frames.len()];
        for turn in 1..1000 {
            if !left.contains(&0) {
                break;
            }
            for (flow, &frames) in frames.iter().enumerate() {
                world.application(flow, 1 + flow as u32 % (NR_CPUS - 1));
                for _ in 0..frames {
                    world.frame(flow);
                }
                if left[flow] == 0 && world.flows[flow].location != INLINE {
                    left[flow] = turn;
                }
            }
            world.turn(polls, WHOLE);
        }
        let flows = Vec::from_iter(std::iter::zip(frames, left));
        prop_assert!(flows.iter().all(|&(_, left)| left > 0), "{:?}", flows);
        for small in &flows {
            let large = |&&(frames, _): &&(u32, i32)| small.0 < frames / 2;
            let last = flows.iter().filter(large).map(|&(_, left)| left).max();
            prop_assert!(last.is_none_or(|last| last < small.1), "{small:?} of {flows:?}");
        }
    }

    /// What leaves in a turn or comes home is seen by the averages before more does.
    #[test]
    fn no_more_moves_at_once_than_an_eighth_of_a_cpu(
        frames in proptest::collection::vec(1u32..50, 1..60),
        frame_ns in 100u32..4000,
    ) {
        let moved = moved_at_once(&frames, frame_ns, false);
        prop_assert!(moved.is_ok(), "{:?}", moved);
    }
}

/// The control: who forgets what is moving moves more.
#[test]
fn who_forgets_what_moves_moves_all() {
    assert!(moved_at_once(&[10; 60], 2000, true).is_err());
}

/// Flows of so many frames in a turn that leave, and come home: the first turn in which more moves
/// than may, in what each costs in ns.
fn moved_at_once(frames: &[u32], frame_ns: u32, forgets: bool) -> Result<(), Vec<u64>> {
    let mut world = World::new(FOLLOW | ADAPT, frames.len());
    world.facts.consumer_waits = 1;
    for turn in 0..100 {
        // Half of the time there is room for all.
        let busy = if turn < 50 { WHOLE } else { 0 };
        world.turn(busy, busy);
        world.q.load.inline_ns = 16 * frame_ns;
        let before = Vec::from_iter(world.flows.iter().map(|flow| flow.wanted));
        for (flow, &frames) in frames.iter().enumerate() {
            world.application(flow, 1 + flow as u32 % (NR_CPUS - 1));
            for _ in 0..frames {
                world.frame(flow);
            }
            if forgets {
                world.q.load.moving_ns = 0;
            }
        }
        // Before the first turn they were nowhere.
        let flows = std::iter::zip(&world.flows, before).skip_while(|_| turn == 0);
        let moved = flows.filter(|(flow, before)| flow.wanted != *before);
        let cost = |flow: &rps_dev_flow| u64::from(flow.load + 1) * u64::from(frame_ns);
        let costs = Vec::from_iter(moved.map(|(flow, _)| cost(flow)));
        // The first may be as large as it is.
        let largest = costs.iter().max().copied().unwrap_or_default();
        if costs.iter().sum::<u64>() > TURN_NS / 8 + largest {
            return Err(costs);
        }
    }
    Ok(())
}

/// A turn in which the polling CPU is pressed, and its flow has a frame; where that wants to be.
fn pressed(world: &mut World) -> u16 {
    world.application(0, 1);
    world.turn(WHOLE, WHOLE);
    world.frame(0);
    world.flows[0].wanted
}

#[test]
fn an_application_that_has_waited_lately_keeps_up() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.consumer_waits_so_far = 5;
    for _ in 0..50 {
        assert_eq!(pressed(&mut world), INLINE);
    }
    world.facts.consumer_waits_so_far += 1;
    assert_eq!(pressed(&mut world), 1);

    // What it did while nobody asked says nothing.
    for _ in 0..300 {
        world.turn(0, 0);
        world.frame(0);
    }
    world.facts.consumer_waits_so_far += 1;
    for _ in 0..50 {
        assert_eq!(pressed(&mut world), INLINE);
    }
}

/// Its CPU is busy with others: they share it. With the application itself, there is nothing to share.
#[test]
fn an_application_keeps_the_time_that_it_needs() {
    // All of the polls' time is theirs, in equal parts.
    const NR_FLOWS: usize = 16;
    let share = WHOLE / NR_FLOWS as u32;
    let mut world = World::new(FOLLOW | ADAPT, NR_FLOWS);
    world.facts.consumer_waits = 1;
    world.facts.busy[1] = WHOLE;
    let leaves = |world: &mut World, consumer_busy| {
        world.facts.consumer_busy = consumer_busy;
        for flow in 0..NR_FLOWS {
            world.application(flow, 1);
            for _ in 0..8 {
                world.frame(flow);
            }
        }
        world.turn(WHOLE, WHOLE);
        world.flows.iter().any(|flow| flow.wanted == 1)
    };
    let most = WHOLE * 7 / 8 - share;
    // What a frame costs is learnt in the first turn.
    assert!(!leaves(&mut world, WHOLE));
    assert!((0..50).all(|_| !leaves(&mut world, most + 8)));
    assert!((0..50).any(|_| leaves(&mut world, most - 8)));
}

#[test]
fn who_keeps_an_application_from_ever_waiting_goes_home() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.consumer_waits = 1;
    assert!((0..50).any(|_| pressed(&mut world) == 1));
    world.facts.consumer_waits = 0;
    for _ in 0..15 {
        assert_eq!(pressed(&mut world), 1);
    }
    // It has waited once more.
    world.facts.consumer_waits_so_far += 1;
    for _ in 0..16 {
        assert_eq!(pressed(&mut world), 1);
    }
    assert_eq!(pressed(&mut world), INLINE);
}

#[test]
fn nobody_goes_where_many_want_to_run() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.consumer_waits = 1;
    world.facts.demand[1] = 5 * WHOLE;
    for _ in 0..50 {
        assert_eq!(pressed(&mut world), INLINE);
    }
    world.facts.demand[1] = 4 * WHOLE;
    assert_eq!(pressed(&mut world), 1);
    // Who is there stays for longer.
    world.facts.demand[1] = 8 * WHOLE;
    assert_eq!(pressed(&mut world), 1);
    world.facts.demand[1] += 1;
    assert_eq!(pressed(&mut world), INLINE);
}

#[test]
fn a_backlog_that_was_crowded_rests() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.consumer_waits = 1;
    let leaves = |world: &mut World| (0..1000).find(|_| pressed(world) == 1).unwrap();
    leaves(&mut world);
    World::bit(&mut world.crowded, 1, true);
    world.serve();
    assert_eq!(pressed(&mut world), INLINE);
    World::bit(&mut world.crowded, 1, false);
    world.serve();
    assert_eq!(leaves(&mut world), 99);
}

/// What the CPUs do in a turn, as a number says, whatever they did before.
fn set_load(world: &mut World, number: u32) {
    let [a, b, c, d] = number.to_le_bytes().map(u32::from);
    world.facts.idle = u64::from(a);
    world.facts.consumer_waits = b % 2;
    world.facts.consumer_busy = (b >> 1) * WHOLE / 127;
    world.crowded = u64::from(c & d);
    for (cpu, demand) in world.facts.demand[..NR_CPUS as usize]
        .iter_mut()
        .enumerate()
    {
        *demand = (b >> cpu & 1) * WHOLE;
    }
    world.serve();
    let (polls, all) = [(0, 0), (256, 700), (WHOLE, WHOLE), (WHOLE, WHOLE)][c as usize % 4];
    world.turn(polls, all);
}

/// Moves of a flow that sends three frames in each of as many turns, in which `number` says what the
/// CPUs do. `forgets`: that it has changed its mind lately.
fn moves(policy: u16, numbers: impl IntoIterator<Item = u32>, forgets: bool) -> u32 {
    let mut world = World::new(policy, 1);
    world.application(0, 1);
    world.map.location.fill(2);
    for number in numbers {
        set_load(&mut world, number);
        for _ in 0..3 {
            world.frame(0);
        }
        if forgets {
            world.flows[0].backoff = 0;
        }
    }
    world.flows[0].nr_moves
}

/// Turns within which a flow that has not had to wait yet leaves home soon: next time it waits twice
/// as long (flow_may_leave()).
const SOON: usize = 256;

/// Moves in a load that changes to and fro: away and home for each time that the wait doubles, up to
/// 1024 turns, and then once in as many.
fn moves_to_and_fro(turns: usize) -> u32 {
    2 * (11 + turns / 1024) as u32
}

/// Moves in any load at all: away and home in each [`SOON`] turns, since that is not soon, and those
/// that are quicker until it has to wait for longest.
fn moves_at_most(turns: usize) -> u32 {
    2 * (turns / SOON + 11) as u32
}

/// A load that is another every `period` turns.
fn to_and_fro(load: [u32; 2], period: usize) -> impl Iterator<Item = u32> {
    (0..TURNS).map(move |turn| load[turn / period % 2])
}

/// A load that is another for a moment, whenever a flow may leave without doing so soon.
fn now_and_then(load: [u32; 2]) -> impl Iterator<Item = u32> {
    (0..TURNS).map(move |turn| load[usize::from(turn % (SOON + 3) >= SOON)])
}

const TURNS: usize = 3000;

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn a_flow_settles_where_nothing_changes(policy in loaded(), load in any::<u32>()) {
        // It leaves INLINE, and whatever it finds then is still so.
        let moves = moves(policy, (0..100).map(|_| load), false);
        prop_assert!(moves <= 1, "{} moves", moves);
    }

    #[test]
    fn no_ping_pong(policy in loaded(), load in any::<[u32; 2]>(), period in 1..SOON / 2) {
        let moves = moves(policy, to_and_fro(load, period), false);
        prop_assert!(moves <= moves_to_and_fro(TURNS), "{} moves", moves);
    }

    #[test]
    fn moves_are_bounded_whatever_happens(
        policy in loaded(),
        load in proptest::collection::vec(any::<u32>(), 1..1000),
    ) {
        let turns = load.len();
        let moves = moves(policy, load, false);
        prop_assert!(moves <= moves_at_most(turns), "{} moves", moves);
    }
}

/// The control: the bound is reached, where the load changes for a moment and just too late to be soon.
#[test]
fn a_flow_goes_along_with_a_load_that_changes_slowly() {
    for policy in LOADED {
        let mut loads = fixed(any::<[u32; 2]>()).take(200);
        let seen =
            loads.any(|load| moves(policy, now_and_then(load), false) > moves_at_most(TURNS) - 28);
        assert!(seen, "{policy}");
    }
}

/// The control: who forgets when it moved moves too often, under each of the policies.
#[test]
fn who_does_not_wait_moves_to_and_fro() {
    for policy in LOADED {
        let mut loads = fixed((any::<[u32; 2]>(), 1..SOON / 2)).take(200);
        let seen = loads.any(|(load, period)| {
            let moves = moves(policy, to_and_fro(load, period), true);
            moves > moves_to_and_fro(TURNS) && moves > moves_at_most(TURNS)
        });
        assert!(seen, "{policy}");
    }
}

/// Frames of a turn, the part of them that is one flow's, of 1024, and the turn's load, as for
/// [`World::turn`].
type Flood = (u32, u32, [u32; 2]);

fn floods() -> impl Strategy<Value = Vec<Flood>> {
    let load = prop_oneof![Just([0, 0]), Just([256, 700]), Just([WHOLE, WHOLE])];
    let turns = (200u32..2000, 0..WHOLE, load)
        .prop_flat_map(|turn| (1usize..12).prop_map(move |times| vec![turn; times]));
    proptest::collection::vec(turns, 1..6).prop_map(|turns| turns.concat())
}

/// Frames that were dropped of those of 50 modest flows, with an even share each of what is left,
/// and of the one that floods. Wherever they go it is crowded, but nowhere full.
fn limited(policy: u16, waits: bool, floods: &[Flood]) -> (u32, u32) {
    const MODEST: usize = 50;
    let mut world = World::new(policy, MODEST + 1);
    world.facts.flow_limit = FLOW_LIMIT;
    world.facts.consumer_waits = waits.into();
    world.crowded = !0;
    world.map.location[..SLOTS / 2].fill(1);
    world.serve();
    let mut modest = (0..MODEST).cycle();
    for &(frames, part, [polls, all]) in floods {
        for i in 0..frames {
            let is_flood = i * part / WHOLE != (i + 1) * part / WHOLE;
            let flow = if is_flood {
                MODEST
            } else {
                modest.next().unwrap()
            };
            world.frame(flow);
        }
        world.turn(polls, all);
    }
    let dropped = |flows: &[rps_dev_flow]| flows.iter().map(|flow| flow.nr_dropped).sum();
    (
        dropped(&world.flows[..MODEST]),
        dropped(&world.flows[MODEST..]),
    )
}

fn policies() -> impl Strategy<Value = u16> {
    prop_oneof![Just(0), Just(FOLLOW), loaded()]
}

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn a_modest_flow_is_never_limited(
        policy in policies(),
        waits in any::<bool>(),
        floods in floods(),
    ) {
        prop_assert_eq!(limited(policy, waits, &floods).0, 0);
    }
}

/// The control: a large one is, at a CPU and INLINE.
#[test]
fn a_large_flow_is_limited() {
    for policy in [0, FOLLOW | ADAPT] {
        let floods = [(2000, WHOLE / 2, [WHOLE, WHOLE]); 10];
        assert!(limited(policy, false, &floods).1 > 0, "{policy}");
    }
}

/// After a pause, a flow's frames in its last turns may be more than all of the queue's since.
#[test]
fn a_flow_that_comes_back_is_not_large_before_there_are_others() {
    let mut world = World::new(0, 2);
    world.facts.flow_limit = FLOW_LIMIT;
    world.map.location.fill(1);
    world.crowded = !0;
    world.serve();
    for frames in [[1000, 2000], [0, 1]] {
        for (flow, frames) in frames.into_iter().enumerate() {
            for _ in 0..frames {
                world.frame(flow);
            }
        }
        world.turn(0, 0);
    }
    assert_eq!(world.frame(0), rx_verdict::RX_REDIRECTED);
    assert_eq!(world.flows[0].load, 500);
}

/// Frames for a CPU's backlog in each poll, and those that its thread takes meanwhile.
#[derive(Clone, Copy, Debug)]
struct Rates {
    flood: u32,
    modest: u32,
    taken: u32,
}

/// More than is taken, by the one that floods.
fn rates() -> impl Strategy<Value = Rates> {
    (1u32..48, 1u32..16, 0u32..200).prop_map(|(taken, modest, flood)| Rates {
        flood: taken + flood,
        modest: modest.min(taken),
        taken,
    })
}

/// Frames that are lost of those of a thousand modest flows, and those of the one that floods that
/// are not. It begins in the second turn, and is known to be large in the third, from which on they
/// are counted; a turn is 50 polls.
fn flooded(limit: u64, flow_limit: u32, rates: Rates) -> (u32, u32) {
    const MODEST: usize = 1000;
    let mut world = World::new(0, MODEST + 1);
    (world.facts.limit, world.facts.flow_limit) = (limit, flow_limit);
    world.map.location.fill(1);
    let mut modest = (0..MODEST).cycle();
    let mut queued = 0;
    let mut early = (0, 0);
    for turn in 1..=FLOOD_TURNS + 2 {
        let flood = if turn == 1 { 0 } else { rates.flood };
        let frames = flood + rates.modest;
        for i in (0..50).flat_map(|_| 0..frames) {
            let is_modest = i * rates.modest / frames != (i + 1) * rates.modest / frames;
            let flow = if is_modest {
                modest.next().unwrap()
            } else {
                MODEST
            };
            let tail = world.backlogs[1].tail;
            world.frame(flow);
            queued += world.backlogs[1].tail - tail;
            if i + 1 == frames {
                queued = queued.saturating_sub(rates.taken.into());
            }
            world.backlogs[1].taken = world.backlogs[1].tail - queued;
        }
        world.turn(WHOLE / 4, WHOLE / 4);
        let lost = world.flows[..MODEST]
            .iter()
            .map(|flow| flow.nr_dropped)
            .sum::<u32>();
        let counts = (lost, world.flows[MODEST].nr_packets);
        if turn == 2 {
            early = counts;
        } else if turn == FLOOD_TURNS + 2 {
            return (counts.0 - early.0, counts.1 - early.1);
        }
    }
    unreachable!("it returns in the last turn")
}

const FLOOD_TURNS: u32 = 40;

proptest! {
    #![proptest_config(config(20))]

    #[test]
    fn modest_flows_lose_nothing_to_a_flood(rates in rates(), limit in 200u64..2000) {
        let (lost, flood) = flooded(limit, FLOW_LIMIT, rates);
        prop_assert_eq!(lost, 0);
        // And the flood has what they leave, but for half a backlog that was full.
        let left = (rates.taken - rates.modest) * 50 * FLOOD_TURNS;
        prop_assert!(u64::from(flood) + limit >= left.into());
        // The control: without a limit they lose, once the backlog is full.
        let excess = u64::from(rates.flood + rates.modest - rates.taken);
        if excess * 1000 > limit {
            prop_assert!(flooded(limit, 0, rates).0 > 0);
        }
    }
}

/// A flow that has to leave a backlog, but can't yet: its frames are shed where they would be dropped
/// if it stayed, and else are not.
#[test]
fn who_waits_to_leave_is_shed_only_where_frames_are_dropped() {
    for (crowded, part, verdict) in [
        (LIMIT * 3 / 4, WHOLE / 50, rx_verdict::RX_REDIRECTED),
        (LIMIT * 3 / 4, WHOLE / 4, rx_verdict::RX_DROP),
        (LIMIT, WHOLE / 50, rx_verdict::RX_DROP),
    ] {
        let mut world = World::new(0, 2);
        world.facts.flow_limit = FLOW_LIMIT;
        world.map.location.fill(1);
        for i in 0..1024 {
            world.frame(usize::from(i * part / WHOLE == (i + 1) * part / WHOLE));
        }
        let b = &mut world.backlogs[1];
        (b.head, b.taken, b.tail_limit) = (0, b.tail - crowded, 0);
        world.map.location.fill(2);
        assert_eq!(world.frame(0), verdict, "{crowded} {part}");
        assert_eq!(world.flows[0].location, 1);
    }
}

/// Flow 0's application polls and finds `busy_polls` of the polls' packets; flow 1's is on CPU 2.
/// Where flow 1 is after some turns, with its reason.
fn beside_who_polls(world: &mut World, busy_polls: u32) -> (u16, u8) {
    world.busy_polls = busy_polls;
    for _ in 0..50 {
        world.turn(WHOLE / 16, WHOLE / 8);
        for flow in 0..2 {
            world.frame(flow);
        }
        assert_eq!(world.flows[0].location, INLINE);
    }
    (world.flows[1].location, world.flows[1].reason)
}

#[test]
fn others_leave_the_polls_of_an_application() {
    let (room, stay, consumer, no_gain, spread) = (
        rx_reason::RX_ROOM.0 as u8,
        rx_reason::RX_STAY.0 as u8,
        rx_reason::RX_CONSUMER.0 as u8,
        rx_reason::RX_NO_GAIN.0 as u8,
        rx_reason::RX_SPREAD.0 as u8,
    );
    let world = |policy| {
        let mut world = World::new(policy, 2);
        world.facts.consumer_waits = 1;
        world.map.location.fill(2);
        world.application(0, INLINE.into());
        world.application(1, 2);
        world
    };
    for policy in [ADAPT | FOLLOW, ADAPT | FOLLOW | IDLE] {
        let mut world = world(policy);
        assert_eq!(beside_who_polls(&mut world, 0), (INLINE, room));
        // Interrupts find most.
        assert_eq!(beside_who_polls(&mut world, POLLS / 2 - 1), (INLINE, room));
        assert_eq!(beside_who_polls(&mut world, POLLS), (2, consumer));
        assert_eq!(world.q.load.pressure, POLLED);
        // Once it is known that it polls, less will do.
        assert_eq!(beside_who_polls(&mut world, POLLS / 2 - 1), (2, consumer));
        assert_eq!(beside_who_polls(&mut world, 0), (INLINE, room));
    }
    // No application is known for flow 1: by its hash.
    let mut spreads = world(ADAPT | FOLLOW);
    spreads.applications[1] = 0;
    assert_eq!(beside_who_polls(&mut spreads, POLLS), (2, spread));
    // Somebody polls whose packets no table knows: they might have to leave as well.
    let mut unknown = world(ADAPT | FOLLOW);
    unknown.applications[0] = 0;
    unknown.map.location.fill(INLINE);
    assert_eq!(beside_who_polls(&mut unknown, POLLS), (INLINE, stay));
    let mut nobody = world(ADAPT);
    assert_eq!(beside_who_polls(&mut nobody, POLLS), (INLINE, room));
    // Nowhere to go.
    let mut crowded = world(ADAPT | FOLLOW);
    crowded.crowded = 1 << 2;
    crowded.serve();
    assert_eq!(beside_who_polls(&mut crowded, POLLS), (INLINE, no_gain));
}

/// Polls of a turn, in ns, with what each received and sent elsewhere.
#[derive(Clone, Debug)]
struct Poll {
    gap: u64,
    length: u64,
    received: u32,
    elsewhere: u32,
    over_idle: bool,
    exhausted: bool,
    busy: bool,
}

/// From nothing at all to what a machine that stood still makes of it.
fn polls() -> impl Strategy<Value = Vec<Poll>> {
    let time = || prop_oneof![Just(0), 0..2_000_000u64, Just(1 << 31), Just(1 << 50)];
    let frames = prop_oneof![Just(0), 1..100u32, Just(u32::MAX)];
    let poll = (time(), time(), frames, 0..=WHOLE, any::<[bool; 3]>()).prop_map(
        |(gap, length, received, elsewhere, [over_idle, exhausted, busy])| Poll {
            gap,
            length,
            received,
            elsewhere: (u64::from(received) * u64::from(elsewhere) / u64::from(WHOLE)) as u32,
            over_idle,
            exhausted,
            busy,
        },
    );
    proptest::collection::vec(poll, 1..300)
}

proptest! {
    #![proptest_config(config(1000))]

    #[test]
    fn a_turn_counts_what_was_in_it(
        polls in polls(),
        first in prop_oneof![Just(0), Just(u32::MAX)],
        tasks in 0..=WHOLE,
        irq in 0..=WHOLE,
        known in any::<bool>(),
        policy in loaded(),
    ) {
        let mut q = rx_queue {
            policy,
            ..Default::default()
        };
        q.load.turn = first;
        q.polled_for = u32::from(known) * (first.wrapping_add(1).max(1));
        let mut now = 1_000_000_000;
        let (mut poll_ns, mut received, mut elsewhere) = (0u64, 0u64, 0u64);
        let (mut nr_busy, mut nr_others) = (0, 0);
        for poll in polls {
            let start = now + poll.gap;
            now = start + poll.length;
            q.nr_received += u64::from(poll.received);
            q.nr_inline += u64::from(poll.received - poll.elsewhere);
            poll_ns += poll.length;
            received += u64::from(poll.received);
            elsewhere += u64::from(poll.elsewhere);
            let busy = u32::from(poll.busy);
            (nr_busy, nr_others) = (nr_busy + busy, nr_others + 1 - busy);
            let over =
                native::load_polled(&mut q, start, now, poll.over_idle, poll.exhausted, poll.busy);
            prop_assert_eq!(over, now - q.load.turn_start >= TURN_NS);
            if !over {
                continue;
            }
            let (before, before_polled) = (q.load, q.busy_polled);
            native::load_turn(&mut q, now, tasks, irq);
            let l = &q.load;
            prop_assert_eq!(l.turn, before.turn.wrapping_add(1));
            prop_assert!(l.poll_share <= WHOLE as u16 && l.police <= WHOLE as u16);
            let busy = (tasks + irq).min(WHOLE) as u16;
            prop_assert!((busy..=WHOLE as u16).contains(&l.busy_share));
            prop_assert!(l.police <= before.police || l.pressure == PRESSED);
            prop_assert!([PRESSED, POLLED].contains(&l.pressure) || l.leaving == u32::MAX);
            prop_assert!(l.pressure != POLLED || known && policy & FOLLOW != 0 && l.leaving == 0);
            // The part goes a quarter of the way towards this turn's, but for what is rounded off.
            let (was, now_polled) = (i64::from(before_polled), i64::from(q.busy_polled));
            let part = i64::from(nr_busy * WHOLE / (nr_busy + nr_others));
            prop_assert!((now_polled - (was * 3 + part) / 4).abs() <= 2);
            prop_assert_eq!(q.nr_busy_polls, 0);
            (nr_busy, nr_others) = (0, 0);
            // 32 frames in 8.6 s: the machine stood still.
            let still = poll_ns >= 1 << 33;
            let short = now - before.turn_start < 100 * TURN_NS;
            let known = received >= 32 && elsewhere <= received / 8;
            let cost = match known && short {
                true => (poll_ns * 16 / received) as u32,
                false => before.inline_ns,
            };
            prop_assert!(still || l.inline_ns == cost);
            (poll_ns, received, elsewhere) = (0, 0, 0);
        }
    }
}
