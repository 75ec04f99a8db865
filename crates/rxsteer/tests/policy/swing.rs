// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads that change to and fro do not take flows with them.

use super::world::*;
use crate::common::cases::{config, fixed};
use proptest::prelude::*;

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
