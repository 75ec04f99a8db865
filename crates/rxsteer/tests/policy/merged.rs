// SPDX-License-Identifier: MIT OR Apache-2.0
//! TCP segments that GRO merges: their flows stay INLINE.

use super::world::*;
use rxsteer::types::rx_reason;

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
