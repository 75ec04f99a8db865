// SPDX-License-Identifier: MIT OR Apache-2.0
//! Only large flows are limited.

use super::world::*;
use crate::cases::config;
use proptest::prelude::*;
use rxsteer::types::{rps_dev_flow, rx_verdict};

/// Frames of a window, the part of one flow in 1/1024, and the arguments of [`World::window`].
type Flood = (u32, u32, [u32; 2]);

fn floods() -> impl Strategy<Value = Vec<Flood>> {
    let load = prop_oneof![Just([0, 0]), Just([256, 700]), Just([WHOLE, WHOLE])];
    let windows = (200u32..2000, 0..WHOLE, load)
        .prop_flat_map(|window| (1usize..12).prop_map(move |times| vec![window; times]));
    proptest::collection::vec(windows, 1..6).prop_map(|windows| windows.concat())
}

/// Dropped frames of 50 modest flows, which share the rest equally, and of the flooding one. All
/// backlogs are crowded, and none is full.
fn limited(policy: u16, waits: bool, floods: &[Flood]) -> (u32, u32) {
    const MODEST: usize = 50;
    let mut world = World::new(policy, MODEST + 1);
    world.facts.flow_limit = FLOW_LIMIT;
    world.facts.consumer_waits = waits.into();
    world.crowded = !0;
    world.map.location.fill(1);
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
        world.window(polls, all);
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

/// The control: a large flow is limited.
#[test]
fn a_large_flow_is_limited() {
    for policy in [0, FOLLOW] {
        let floods = [(2000, WHOLE / 2, [WHOLE, WHOLE]); 10];
        assert!(limited(policy, false, &floods).1 > 0, "{policy}");
    }
}

/// Frames for a CPU's backlog in each poll, and frames that its thread dequeues meanwhile.
#[derive(Clone, Copy, Debug)]
struct Rates {
    flood: u32,
    modest: u32,
    dequeued: u32,
}

/// The flood alone exceeds what is dequeued.
fn rates() -> impl Strategy<Value = Rates> {
    (1u32..48, 1u32..16, 0u32..200).prop_map(|(dequeued, modest, flood)| Rates {
        flood: dequeued + flood,
        modest: modest.min(dequeued),
        dequeued,
    })
}

/// Frames lost by a thousand modest flows, and frames of the flooding flow that got through. The
/// flood begins in the second window and counts as large from the third on, where counting starts.
/// A window has 50 polls.
fn flooded(limit: u64, flow_limit: u32, rates: Rates) -> (u32, u32) {
    const MODEST: usize = 1000;
    let mut world = World::new(0, MODEST + 1);
    (world.facts.limit, world.facts.flow_limit) = (limit, flow_limit);
    world.map.location.fill(1);
    let mut modest = (0..MODEST).cycle();
    let mut queued = 0;
    let mut early = (0, 0);
    for window in 1..=FLOOD_WINDOWS + 2 {
        let flood = if window == 1 { 0 } else { rates.flood };
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
                queued = queued.saturating_sub(rates.dequeued.into());
            }
            world.backlogs[1].dequeued = world.backlogs[1].tail - queued;
        }
        world.window(WHOLE / 4, WHOLE / 4);
        let lost = world.flows[..MODEST]
            .iter()
            .map(|flow| flow.nr_dropped)
            .sum::<u32>();
        let counts = (lost, world.flows[MODEST].nr_packets);
        if window == 2 {
            early = counts;
        } else if window == FLOOD_WINDOWS + 2 {
            return (counts.0 - early.0, counts.1 - early.1);
        }
    }
    unreachable!("it returns in the last window")
}

const FLOOD_WINDOWS: u32 = 40;

proptest! {
    #![proptest_config(config(20))]

    #[test]
    fn modest_flows_lose_nothing_to_a_flood(rates in rates(), limit in 200u64..2000) {
        let (lost, flood) = flooded(limit, FLOW_LIMIT, rates);
        prop_assert_eq!(lost, 0);
        // The flood gets what the modest flows leave, except half a full backlog.
        let left = (rates.dequeued - rates.modest) * 50 * FLOOD_WINDOWS;
        prop_assert!(u64::from(flood) + limit >= left.into());
        // The control: without a limit modest flows lose frames once the backlog is full.
        let excess = u64::from(rates.flood + rates.modest - rates.dequeued);
        if excess * 1000 > limit {
            prop_assert!(flooded(limit, 0, rates).0 > 0);
        }
    }
}

/// Frames of a flow that can't leave its backlog yet are shed only if they would be dropped in it.
#[test]
fn a_leaving_flow_is_shed_only_where_frames_are_dropped() {
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
        (b.head, b.dequeued, b.tail_limit) = (0, b.tail - crowded, 0);
        world.map.location.fill(2);
        assert_eq!(world.frame(0), verdict, "{crowded} {part}");
        assert_eq!(world.flows[0].location, 1);
    }
}
