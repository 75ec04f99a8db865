// SPDX-License-Identifier: MIT OR Apache-2.0
//! +adapt: which flows leave a saturated CPU, and which stay.

use super::world::*;
use crate::cases::config;
use proptest::prelude::*;

/// A window with a frame of flow 0, on an application that stays; returns the location.
fn idle_window(world: &mut World, application: u32) -> u16 {
    world.application(0, application);
    world.window(0, 0);
    world.frame(0);
    world.flows[0].location
}

proptest! {
    #![proptest_config(config(1000))]

    /// The same as plain RFS, unless the application is busy and a CPU near it idle.
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
            false => world.idle_near(&world.flows[0], home, &world.given()).unwrap_or(home),
        };
        idle_window(&mut world, application);
        prop_assert_eq!(idle_window(&mut world, application), idle);

        // With the flow on it, that CPU is no longer idle; the application has updated its entry.
        if idle == INLINE {
            world.window(0, WHOLE * 3 / 4);
        } else if idle != home {
            World::bit(&mut world.facts.idle, idle.into(), false);
            world.facts.busy[usize::from(idle)] = WHOLE;
        }
        for _ in 0..50 {
            prop_assert_eq!(idle_window(&mut world, application), idle);
        }
        world.facts.consumer_waits = 1;
        prop_assert_eq!(idle_window(&mut world, application), home);
    }
}

/// Windows of a relaxed CPU whose flows send these frames, so that their load is known afterwards.
fn count_frames(world: &mut World, frames: &[u32]) {
    for _ in 0..4 {
        world.window(0, 0);
        for (flow, &frames) in frames.iter().enumerate() {
            for _ in 0..frames {
                world.frame(flow);
            }
        }
    }
}

/// A window in which polls take all of the polling CPU's time and its flows send these frames.
fn saturated_window(world: &mut World, frames: &[u32], frame_ns: u32) {
    world.q.load.inline_ns = 16 * frame_ns;
    world.window(WHOLE, WHOLE);
    for (flow, &frames) in frames.iter().enumerate() {
        for _ in 0..frames {
            world.frame(flow);
        }
    }
}

/// The flows and costs, in ns per window, for which `wanted` has changed since `before`.
fn moved(world: &World, before: &[u16]) -> Vec<(usize, u64)> {
    let flows = world.flows.iter().zip(before).enumerate();
    let moved = flows.filter(|(_, (flow, before))| flow.wanted != **before);
    moved.map(|(i, (flow, _))| (i, world.cost(flow))).collect()
}

/// `costs` without the largest: the last flow to move may exceed the limit by any cost.
fn without_largest(costs: impl Iterator<Item = u64>) -> u64 {
    let costs = Vec::from_iter(costs);
    costs.iter().sum::<u64>() - costs.iter().max().unwrap_or(&0)
}

fn wanted(world: &World) -> Vec<u16> {
    world.flows.iter().map(|flow| flow.wanted).collect()
}

/// Saturates the polling CPU while its flows send `frames` per window. If a CPU gets more than it
/// has, returns the flows' costs. `forgets`: resets the count of what the CPUs got.
fn leave_at_once(frames: &[u32], frame_ns: u32, busy: &[u32], forgets: bool) -> Result<(), String> {
    let mut world = World::new(FOLLOW | ADAPT, frames.len());
    world.facts.busy[..busy.len()].copy_from_slice(busy);
    for flow in 0..frames.len() {
        world.application(flow, 1 + flow as u32 % (NR_CPUS - 1));
    }
    world.map.location.fill(1);
    count_frames(&mut world, frames);
    for _ in 0..10 {
        let before = wanted(&world);
        world.q.load.inline_ns = 16 * frame_ns;
        world.window(WHOLE, WHOLE);
        let mut given = world.given();
        for (flow, &frames) in frames.iter().enumerate() {
            for _ in 0..frames {
                world.frame(flow);
                if forgets {
                    world.facts.cpus.iter_mut().for_each(|cpu| cpu.given = 0);
                }
            }
        }
        let moved = moved(&world, &before);
        for &(flow, _) in &moved {
            let cpu = usize::from(world.flows[flow].wanted);
            let share = world.share(&world.flows[flow], world.flows[flow].wanted);
            given[cpu] += share;
            let fits = busy[cpu] + given[cpu] <= WHOLE * 7 / 8;
            if !fits && (busy[cpu] >= WHOLE * 63 / 64 || given[cpu] - share >= WHOLE / 32) {
                return Err(format!("CPU {cpu} got: {moved:?}"));
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn flows_leave_as_fast_as_other_cpus_have_time(
        frames in proptest::collection::vec(1u32..50, 1..60),
        frame_ns in 100u32..4000,
        busy in proptest::collection::vec(0..=WHOLE, NR_CPUS as usize),
    ) {
        prop_assert_eq!(leave_at_once(&frames, frame_ns, &busy, false), Ok(()));
    }
}

/// The control.
#[test]
fn without_the_account_too_many_flows_leave() {
    let busy = [WHOLE * 15 / 16; NR_CPUS as usize];
    assert_eq!(leave_at_once(&[10; 60], 40_000, &busy, false), Ok(()));
    assert!(leave_at_once(&[10; 60], 40_000, &busy, true).is_err());
}

/// Two flows send in turns of several windows; the CPU is saturated while the first sends.
#[test]
fn a_flow_that_saturated_the_cpu_leaves_at_its_next_turn() {
    let mut world = World::new(FOLLOW | ADAPT, 2);
    (0..2).for_each(|flow| world.application(flow, 1));
    count_frames(&mut world, &[10; 2]);
    let turn = |world: &mut World, flow: usize| {
        for _ in 0..3 {
            world.frame(flow);
            world.window(0, WHOLE * 3 / 4);
            assert_eq!(world.q.load.pressure, FULL);
        }
        world.flows[flow].wanted
    };
    turn(&mut world, 1);
    world.frame(0);
    world.window(WHOLE, WHOLE);
    assert_eq!(world.q.load.pressure, SATURATED);
    world.window(0, WHOLE * 3 / 4);
    assert_eq!(turn(&mut world, 1), INLINE);
    assert_eq!(turn(&mut world, 0), 1);
}

/// The other CPUs of the map get equal parts of a CPU's flows, though its slots have one neighbour.
#[test]
fn flows_of_a_cpu_are_spread_over_all_others() {
    const NR_FLOWS: usize = 4096;
    let mut world = World::new(ADAPT, NR_FLOWS);
    let slots = world.map.location.iter_mut().enumerate();
    slots.for_each(|(slot, cpu)| *cpu = (slot as u32 % NR_CPUS) as u16);
    // The flows of CPU 1, which has no time, and those of the polling CPU.
    world.facts.busy[1] = WHOLE;
    world.q.load.inline_ns = 16;
    // A flow that finds no room in the slots that it searches stays for another window.
    for _ in 0..20 {
        world.window(WHOLE, WHOLE);
        (0..NR_FLOWS).for_each(|flow| {
            world.frame(flow);
        });
    }
    let mut got = [0; NR_CPUS as usize];
    for flow in world
        .flows
        .iter()
        .filter(|flow| flow.base <= 1 || flow.base == INLINE)
    {
        assert_ne!(flow.wanted, INLINE);
        got[usize::from(flow.wanted)] += 1;
    }
    let others = &got[2..];
    let even = others.iter().sum::<u32>() / others.len() as u32;
    assert!(even > 100, "{got:?}");
    assert!(
        others.iter().all(|&n| n * 4 > even * 3 && n * 3 < even * 4),
        "{got:?}"
    );
}

/// A window with a saturated polling CPU and a frame of its flow; returns the wanted location.
fn saturated(world: &mut World) -> u16 {
    world.application(0, 1);
    saturated_window(world, &[1], 2000);
    world.flows[0].wanted
}

#[test]
fn a_cpu_that_is_never_idle_gets_no_flow() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.busy[1] = WHOLE * 63 / 64;
    for _ in 0..50 {
        assert_eq!(saturated(&mut world), INLINE);
    }
    world.facts.busy[1] -= 1;
    assert_eq!(saturated(&mut world), 1);
}

#[test]
fn an_almost_busy_cpu_gets_a_flow_per_half_life() {
    const NR_FLOWS: usize = 20;
    let mut world = World::new(FOLLOW | ADAPT, NR_FLOWS);
    (0..NR_FLOWS).for_each(|flow| world.application(flow, 1));
    world.facts.busy[1] = WHOLE * 15 / 16;
    count_frames(&mut world, &[10; NR_FLOWS]);
    let left = |world: &World| world.flows.iter().filter(|flow| flow.wanted == 1).count();
    for window in 1..=20 {
        // 0.4 ms of each flow in a window: more than a step.
        saturated_window(&mut world, &[10; NR_FLOWS], 40_000);
        // Half-lives of 32 ms, windows of 10 ms.
        let half_lives = 2 + window * 10 / 32;
        assert!(left(&world) <= half_lives, "{window}: {}", left(&world));
    }
    assert!(left(&world) > 2);
}

/// Whether a CPU that gets one flow per half-life gets a second one, from a queue whose window began
/// `behind` ns before that of the first flow's queue, with which a half-life began. Returns also when
/// the CPU counts as given, in half-lives.
fn gets_another(behind: u64) -> (bool, u32) {
    let mut world = World::new(FOLLOW | ADAPT, 2);
    (0..2).for_each(|flow| world.application(flow, 1));
    world.facts.busy[1] = WHOLE * 15 / 16;
    count_frames(&mut world, &[10; 2]);
    world.q.load.window_start = 100 * HALF_LIFE_NS - WINDOW_NS;
    saturated_window(&mut world, &[10, 0], 40_000);
    assert_eq!(wanted(&world), [1, INLINE]);
    let start = &mut world.q.load.window_start;
    *start = start.wrapping_sub(behind);
    world.frame(1);
    (world.flows[1].wanted == 1, world.facts.cpus[1].given_at)
}

#[test]
fn a_queue_that_is_behind_counts_what_others_gave() {
    for behind in [0, 1, 10 * HALF_LIFE_NS, 100 * HALF_LIFE_NS] {
        assert_eq!(gets_another(behind), (false, 100), "{behind}");
    }
    // The control: what was given is shown by the scheduler's averages after some half-lives.
    assert_eq!(
        gets_another((10 * HALF_LIFE_NS).wrapping_neg()),
        (true, 110)
    );
}

/// Two years after the boot of the host its time in half-lives has the sign bit.
#[test]
fn what_is_given_decays_on_an_old_host() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.application(0, 1);
    world.q.load.window_start = (1 << 31) * HALF_LIFE_NS;
    // It was never given any time.
    saturated_window(&mut world, &[1], 400_000);
    assert_eq!(wanted(&world), [1]);
    assert_eq!(world.facts.cpus[1].given_at, 1 << 31);
    assert!(world.given()[1] > 0);
    world.q.load.window_start += 32 * HALF_LIFE_NS;
    assert_eq!(world.given()[1], 0);
}

/// A flow that takes half of the polling CPU has room on a CPU of the same speed only.
#[test]
fn a_small_cpu_gets_less() {
    let leaves = |here, there| {
        let mut world = World::new(FOLLOW | ADAPT, 1);
        world.map.location.fill(1);
        world.application(0, 1);
        // Not idle now and then, which would be enough for one flow.
        world.facts.cpus[1].given = WHOLE / 32;
        (world.facts.cpus[0].capacity, world.facts.cpus[1].capacity) = (here, there);
        saturated_window(&mut world, &[1], 5_000_000);
        world.flows[0].wanted == 1
    };
    assert!(leaves(1024, 1024) && leaves(446, 446) && leaves(446, 1024));
    assert!(!leaves(1024, 446));
}

#[test]
fn a_flow_goes_elsewhere_if_its_applications_cpu_has_no_room() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.busy[1] = WHOLE;
    world.map.location.fill(2);
    assert_eq!(saturated(&mut world), 2);
    // It stays there while that CPU has room, and returns to its application.
    world.facts.busy[2] = WHOLE;
    assert_eq!(saturated(&mut world), 2);
    world.facts.busy[1] = 0;
    assert_eq!(saturated(&mut world), 1);
}

/// Where the first of some flows, with half a CPU's work, is after some saturated windows; its
/// application's CPU is busy for this share of its time.
fn heavy_flow(frames: &[u32], busy: u32) -> World {
    let mut world = World::new(FOLLOW | ADAPT, frames.len());
    (0..frames.len()).for_each(|flow| world.application(flow, 1));
    world.facts.busy[1] = busy;
    count_frames(&mut world, frames);
    saturated_window(&mut world, frames, 5_000_000 / frames[0]);
    world
}

#[test]
fn a_flow_that_is_alone_goes_to_no_cpu_that_would_need_more_than_it_has() {
    let goes = |frames: &[u32], busy| heavy_flow(frames, busy).flows[0].wanted == 1;
    assert!(goes(&[100, 1], WHOLE / 2));
    assert!(!goes(&[100, 1], WHOLE * 6 / 8));
    // The control: with others in its queue the first one goes, whatever it needs.
    assert!(goes(&[100, 20], WHOLE * 6 / 8));
}

#[test]
fn a_flow_that_is_alone_leaves_half_a_backlog() {
    let stays = |frames: &[u32], waiting| {
        let mut world = heavy_flow(frames, 0);
        assert_eq!(world.flows[0].wanted, 1);
        world.window(WHOLE, WHOLE);
        let b = &mut world.backlogs[1];
        (b.tail, b.dequeued) = (b.tail + waiting, b.tail);
        world.frame(0);
        world.flows[0].wanted == 1
    };
    assert!(stays(&[100], LIMIT / 2 - 1));
    assert!(!stays(&[100], LIMIT / 2));
    // The control: others yield first.
    assert!(stays(&[100, 20], LIMIT / 2));
}

#[test]
fn no_flow_goes_to_a_cpu_in_demand() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.demand[1] = 8 * WHOLE + 1;
    for _ in 0..50 {
        assert_eq!(saturated(&mut world), INLINE);
    }
    world.facts.demand[1] -= 1;
    assert!((0..50).any(|_| saturated(&mut world) == 1));
    world.facts.demand[1] += 1;
    assert_eq!(saturated(&mut world), INLINE);
}

#[test]
fn a_crowded_cpu_rests() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.busy[1] = WHOLE * 25 / 32;
    let leaves = |world: &mut World| (0..1000).find(|_| saturated(world) == 1).unwrap();
    leaves(&mut world);
    World::bit(&mut world.crowded, 1, true);
    world.serve();
    assert_eq!(saturated(&mut world), INLINE);
    World::bit(&mut world.crowded, 1, false);
    world.serve();
    // Until the second half-life of 32 ms: a quarter of the CPU is given, less than an eighth is
    // free.
    let rested = leaves(&mut world);
    assert!((3..10).contains(&rested), "{rested}");
}

/// Shares that leave a crowded CPU per window, without the largest flow's, in 1/1024.
fn leave_crowded(forgets: bool) -> u32 {
    const NR_FLOWS: usize = 40;
    let mut world = World::new(FOLLOW | ADAPT, NR_FLOWS);
    (0..NR_FLOWS).for_each(|flow| world.application(flow, 1));
    let window = |world: &mut World, forgets: bool| {
        world.q.load.inline_ns = 16 * 2000;
        world.window(WHOLE, WHOLE);
        for flow in 0..NR_FLOWS {
            world.frame(flow);
            if forgets {
                world.backlogs[1].left = 0;
            }
        }
    };
    (0..5).for_each(|_| window(&mut world, false));
    let before = wanted(&world);
    assert!(before.iter().filter(|&&wanted| wanted == 1).count() > 30);
    // From here on the flows are known to send 50 frames.
    let flows = world.flows.iter_mut();
    flows.for_each(|flow| flow.frames = flow.frames.wrapping_sub(49));
    world.q.load.window_received = world
        .q
        .load
        .window_received
        .wrapping_sub(49 * NR_FLOWS as u64);
    World::bit(&mut world.crowded, 1, true);
    world.serve();
    window(&mut world, forgets);
    let moved = moved(&world, &before);
    (without_largest(moved.iter().map(|&(_, cost)| cost)) * u64::from(WHOLE) / WINDOW_NS) as u32
}

#[test]
fn a_crowded_cpu_loses_a_step_per_window() {
    let step = WHOLE / 32;
    assert!(leave_crowded(false) <= step);
    // The control.
    assert!(leave_crowded(true) > step);
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn a_flow_settles_where_nothing_changes(policy in loaded(), load in any::<[u32; 8]>()) {
        let mut world = World::new(policy, 1);
        world.map.location.fill(2);
        load.iter().for_each(|&number| world.load(number));
        for _ in 0..100 {
            world.application(0, 1);
            world.window(WHOLE, WHOLE);
            world.frame(0);
        }
        // It leaves INLINE at most once.
        prop_assert!(world.flows[0].nr_moves <= 1, "{} moves", world.flows[0].nr_moves);
    }
}
