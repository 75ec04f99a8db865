// SPDX-License-Identifier: MIT OR Apache-2.0
//! +adapt: who leaves a CPU that is pressed, and who may stay.

use super::world::*;
use crate::common::cases::config;
use proptest::prelude::*;
use rxsteer::types::rps_dev_flow;

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
