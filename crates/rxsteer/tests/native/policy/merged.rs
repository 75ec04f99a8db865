// SPDX-License-Identifier: MIT OR Apache-2.0
//! TCP segments that GRO merges: their flows stay INLINE.

use super::world::*;
use crate::cases::config;
use proptest::prelude::*;
use rxsteer::types::{rx_reason, rx_trial};

/// Flows, by the segments that they send in a poll.
const SEGMENTS: [u32; 3] = [4, 1, 2];

/// Wanted locations and reasons of these flows after some windows in which the polling CPU is
/// saturated, or polls are an application's in `busy_polls` of 8. `segments`: whether the
/// frames are TCP segments of a device with GRO.
fn saturated(segments: bool, busy_polls: u32) -> Vec<(u16, u8)> {
    let mut world = World::new(FOLLOW | ADAPT, SEGMENTS.len());
    world.facts.segment = segments.into();
    for flow in 0..SEGMENTS.len() {
        world.application(flow, 1 + flow as u32);
    }
    for window in 0..20 {
        world.busy_polls = busy_polls;
        world.q.load.polled_for = world.q.load.window + u32::from(busy_polls > 0);
        match window {
            0..4 => world.window(0, 0),
            _ if busy_polls > 0 => world.window(WHOLE / 8, WHOLE * 3 / 4),
            _ => world.window(WHOLE, WHOLE),
        }
        for _ in 0..POLLS {
            for (flow, &segments) in SEGMENTS.iter().enumerate() {
                world.frame(flow);
                for _ in 1..segments {
                    world.next_frame(flow);
                }
            }
        }
    }
    let flows = world.flows.iter();
    flows.map(|flow| (flow.wanted, flow.reason)).collect()
}

fn wanted(segments: bool, busy_polls: u32) -> Vec<u16> {
    let flows = saturated(segments, busy_polls).into_iter();
    flows.map(|(wanted, _)| wanted).collect()
}

#[test]
fn flows_that_gro_merges_stay() {
    assert_eq!(wanted(true, 0), [INLINE, 2, 3]);
    let (_, reason) = saturated(true, 0)[0];
    assert_eq!(u32::from(reason), rx_reason::RX_MERGED.0);
    // The control: datagrams, or segments without GRO.
    assert_eq!(wanted(false, 0), [1, 2, 3]);
}

#[test]
fn they_leave_a_queue_that_an_application_polls() {
    assert_eq!(wanted(true, POLLS), [1, 2, 3]);
}

#[test]
fn a_flow_that_is_merged_again_returns() {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.facts.segment = 1;
    world.application(0, 1);
    let mut after = |segments: u32| {
        for _ in 0..4 {
            world.window(WHOLE, WHOLE);
            for _ in 0..POLLS {
                world.frame(0);
                for _ in 1..segments {
                    world.next_frame(0);
                }
            }
        }
        world.flows[0].wanted
    };
    assert_eq!([after(1), after(4), after(1)], [1, INLINE, 1]);
}

/// The flow of each segment, and whether it is the first one of a poll.
fn segments() -> impl Strategy<Value = Vec<(usize, bool)>> {
    prop::collection::vec((0..3_usize, any::<bool>()), 0..400)
}

/// The counts of both worlds after the same segments, `dry` a dry run, on a saturated CPU. Fails with
/// a flow of which the dry run says other than what the policy decides.
fn both(segments: &[(usize, bool)]) -> Result<[World; 2], usize> {
    let mut worlds = [false, true].map(|dry_run| {
        let mut world = World::new(FOLLOW | ADAPT, 3);
        (world.facts.segment, world.facts.dry_run) = (1, dry_run.into());
        (0..3).for_each(|flow| world.application(flow, 1 + flow as u32));
        world
    });
    for &(flow, begins) in segments {
        for world in &mut worlds {
            // Each segment decides. No trial begins, since a dry run has none.
            world.trial = rx_trial::default();
            world.window(WHOLE, WHOLE);
            match begins {
                true => world.frame(flow),
                false => world.next_frame(flow),
            };
        }
        let merges = |world: &World| {
            let flow = &world.flows[flow];
            let merged = flow.reason == rx_reason::RX_MERGED.0 as u8;
            (
                flow.merging,
                flow.base,
                merged,
                merged.then_some(flow.wanted),
            )
        };
        if merges(&worlds[0]) != merges(&worlds[1]) {
            return Err(flow);
        }
    }
    Ok(worlds)
}

proptest! {
    #![proptest_config(config(1000))]

    #[test]
    fn a_dry_run_says_the_same(segments in segments()) {
        let both = both(&segments);
        prop_assert!(both.is_ok(), "{:?}", both.err());
        let [_, dry] = both.unwrap();
        let mut seen = dry.flows.iter().filter(|flow| flow.epoch > 0);
        prop_assert!(seen.all(|flow| flow.location == INLINE));
    }
}

#[test]
fn a_dry_run_counts_them_as_inline() {
    let [_, dry] = both(&[(0, false); 40]).unwrap();
    let decided: u64 = dry.backlogs.iter().map(|b| b.nr_decided).sum();
    // Until the count was above half.
    assert_eq!(decided, 8);
    // The control: the other flow has a segment in each poll.
    let [_, dry] = both(&[(1, true); 40]).unwrap();
    assert_eq!(dry.backlogs[2].nr_decided, 40);
}
