// SPDX-License-Identifier: MIT OR Apache-2.0
//! +adapt: which flows leave a saturated CPU, and which stay.

use super::world::*;
use crate::common::cases::config;
use proptest::prelude::*;
use rxsteer::types::rps_dev_flow;

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
            false => world.idle_near(&world.flows[0], home).unwrap_or(home),
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
        for window in 1..1000 {
            if !left.contains(&0) {
                break;
            }
            for (flow, &frames) in frames.iter().enumerate() {
                world.application(flow, 1 + flow as u32 % (NR_CPUS - 1));
                for _ in 0..frames {
                    world.frame(flow);
                }
                if left[flow] == 0 && world.flows[flow].location != INLINE {
                    left[flow] = window;
                }
            }
            world.window(polls, WHOLE);
        }
        let flows = Vec::from_iter(std::iter::zip(frames, left));
        prop_assert!(flows.iter().all(|&(_, left)| left > 0), "{:?}", flows);
        for small in &flows {
            let large = |&&(frames, _): &&(u32, i32)| small.0 < frames / 2;
            let last = flows.iter().filter(large).map(|&(_, left)| left).max();
            prop_assert!(last.is_none_or(|last| last < small.1), "{small:?} of {flows:?}");
        }
    }

    /// Moves within a window are limited, since the averages show them only later.
    #[test]
    fn no_more_moves_at_once_than_an_eighth_of_a_cpu(
        frames in proptest::collection::vec(1u32..50, 1..60),
        frame_ns in 100u32..4000,
    ) {
        let moved = moved_at_once(&frames, frame_ns, false);
        prop_assert!(moved.is_ok(), "{:?}", moved);
    }
}

/// The control: without the account of moving load, more flows move.
#[test]
fn without_moving_load_too_many_flows_move() {
    assert!(moved_at_once(&[10; 60], 2000, true).is_err());
}

/// Makes flows leave and return. If too many move at once, returns their costs in ns.
fn moved_at_once(frames: &[u32], frame_ns: u32, forgets: bool) -> Result<(), Vec<u64>> {
    let mut world = World::new(FOLLOW | ADAPT, frames.len());
    world.facts.consumer_waits = 1;
    for window in 0..100 {
        // The CPU is saturated for the first half, and idle for the second.
        let busy = if window < 50 { WHOLE } else { 0 };
        world.window(busy, busy);
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
        // Before the first window the flows have no location.
        let flows = std::iter::zip(&world.flows, before).skip_while(|_| window == 0);
        let moved = flows.filter(|(flow, before)| flow.wanted != *before);
        let cost = |flow: &rps_dev_flow| u64::from(flow.load + 1) * u64::from(frame_ns);
        let costs = Vec::from_iter(moved.map(|(flow, _)| cost(flow)));
        // The first flow to move may have any size.
        let largest = costs.iter().max().copied().unwrap_or_default();
        if costs.iter().sum::<u64>() > WINDOW_NS / 8 + largest {
            return Err(costs);
        }
    }
    Ok(())
}

/// A window with a saturated polling CPU and a frame of its flow; returns the wanted location.
fn saturated(world: &mut World) -> u16 {
    world.application(0, 1);
    world.window(WHOLE, WHOLE);
    world.frame(0);
    world.flows[0].wanted
}

#[test]
fn an_application_that_has_waited_lately_keeps_up() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.consumer_waits_so_far = 5;
    for _ in 0..50 {
        assert_eq!(saturated(&mut world), INLINE);
    }
    world.facts.consumer_waits_so_far += 1;
    assert_eq!(saturated(&mut world), 1);

    // Waits counted before the load was consulted again are ignored.
    for _ in 0..300 {
        world.window(0, 0);
        world.frame(0);
    }
    world.facts.consumer_waits_so_far += 1;
    for _ in 0..50 {
        assert_eq!(saturated(&mut world), INLINE);
    }
}

/// A flow shares the CPU with other work, but leaves the application its own time.
#[test]
fn an_application_keeps_the_time_that_it_needs() {
    // The flows have equal parts of all polling time.
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
        world.window(WHOLE, WHOLE);
        world.flows.iter().any(|flow| flow.wanted == 1)
    };
    let most = WHOLE * 7 / 8 - share;
    // The first window measures the cost of a frame.
    assert!(!leaves(&mut world, WHOLE));
    assert!((0..50).all(|_| !leaves(&mut world, most + 8)));
    assert!((0..50).any(|_| leaves(&mut world, most - 8)));
}

#[test]
fn an_application_that_never_waits_loses_its_flow() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.consumer_waits = 1;
    assert!((0..50).any(|_| saturated(&mut world) == 1));
    world.facts.consumer_waits = 0;
    for _ in 0..15 {
        assert_eq!(saturated(&mut world), 1);
    }
    // The application has waited once more.
    world.facts.consumer_waits_so_far += 1;
    for _ in 0..16 {
        assert_eq!(saturated(&mut world), 1);
    }
    assert_eq!(saturated(&mut world), INLINE);
}

#[test]
fn no_flow_goes_to_a_cpu_in_demand() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.consumer_waits = 1;
    world.facts.demand[1] = 5 * WHOLE;
    for _ in 0..50 {
        assert_eq!(saturated(&mut world), INLINE);
    }
    world.facts.demand[1] = 4 * WHOLE;
    assert_eq!(saturated(&mut world), 1);
    // The limit for a flow that is there already is higher.
    world.facts.demand[1] = 8 * WHOLE;
    assert_eq!(saturated(&mut world), 1);
    world.facts.demand[1] += 1;
    assert_eq!(saturated(&mut world), INLINE);
}

#[test]
fn a_backlog_that_was_crowded_rests() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.consumer_waits = 1;
    let leaves = |world: &mut World| (0..1000).find(|_| saturated(world) == 1).unwrap();
    leaves(&mut world);
    World::bit(&mut world.crowded, 1, true);
    world.serve();
    assert_eq!(saturated(&mut world), INLINE);
    World::bit(&mut world.crowded, 1, false);
    world.serve();
    assert_eq!(leaves(&mut world), 99);
}
