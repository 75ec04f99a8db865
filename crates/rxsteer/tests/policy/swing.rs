// SPDX-License-Identifier: MIT OR Apache-2.0
//! Alternating loads do not move flows to and fro.

use super::world::*;
use crate::common::cases::{config, fixed};
use proptest::prelude::*;

/// Sets the load of all CPUs for a window from a number, independent of the previous load.
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
    world.window(polls, all);
}

/// Moves of a flow with three frames per window under the loads `numbers`. `forgets`: no backoff.
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

/// A flow that leaves its default location again within this number of windows waits twice as long
/// the next time (flow_back_off()).
const SOON: usize = 256;

/// Upper limit of moves under an alternating load: two for each doubling of the wait up to 1024
/// windows, then two per 1024 windows.
fn moves_to_and_fro(windows: usize) -> u32 {
    2 * (11 + windows / 1024) as u32
}

/// Upper limit of moves under any load: two per [`SOON`] windows, which does not count as soon, and
/// the faster ones until the wait is longest.
fn moves_at_most(windows: usize) -> u32 {
    2 * (windows / SOON + 11) as u32
}

/// A load that alternates every `period` windows.
fn to_and_fro(load: [u32; 2], period: usize) -> impl Iterator<Item = u32> {
    (0..WINDOWS).map(move |window| load[window / period % 2])
}

/// A load that changes for three windows whenever a flow may leave without doing so soon.
fn now_and_then(load: [u32; 2]) -> impl Iterator<Item = u32> {
    (0..WINDOWS).map(move |window| load[usize::from(window % (SOON + 3) >= SOON)])
}

const WINDOWS: usize = 3000;

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn a_flow_settles_where_nothing_changes(policy in loaded(), load in any::<u32>()) {
        // The flow leaves INLINE at most once, since the load stays as it is.
        let moves = moves(policy, (0..100).map(|_| load), false);
        prop_assert!(moves <= 1, "{} moves", moves);
    }

    #[test]
    fn no_ping_pong(policy in loaded(), load in any::<[u32; 2]>(), period in 1..SOON / 2) {
        let moves = moves(policy, to_and_fro(load, period), false);
        prop_assert!(moves <= moves_to_and_fro(WINDOWS), "{} moves", moves);
    }

    #[test]
    fn moves_are_bounded_whatever_happens(
        policy in loaded(),
        load in proptest::collection::vec(any::<u32>(), 1..1000),
    ) {
        let windows = load.len();
        let moves = moves(policy, load, false);
        prop_assert!(moves <= moves_at_most(windows), "{} moves", moves);
    }
}

/// The control: a load that changes briefly, just too late to be soon, reaches the bound.
#[test]
fn a_flow_goes_along_with_a_load_that_changes_slowly() {
    for policy in LOADED {
        let mut loads = fixed(any::<[u32; 2]>()).take(200);
        let seen = loads
            .any(|load| moves(policy, now_and_then(load), false) > moves_at_most(WINDOWS) - 28);
        assert!(seen, "{policy}");
    }
}

/// The control: without backoff a flow moves too often, under each of the policies.
#[test]
fn without_backoff_flows_move_to_and_fro() {
    for policy in LOADED {
        let mut loads = fixed((any::<[u32; 2]>(), 1..SOON / 2)).take(200);
        let seen = loads.any(|(load, period)| {
            let moves = moves(policy, to_and_fro(load, period), true);
            moves > moves_to_and_fro(WINDOWS) && moves > moves_at_most(WINDOWS)
        });
        assert!(seen, "{policy}");
    }
}
