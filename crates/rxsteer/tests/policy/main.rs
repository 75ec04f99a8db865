// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where flows want to be, by policy.h, load.h and steer.h as they are, on CPUs whose load is made
//! up. Whether they may go there is left out: whatever came earlier counts as delivered (tests/order.rs
//! has the rule of order).

mod adapt;
#[path = "../common/mod.rs"]
mod common;
mod limit;
mod polls;
mod swing;
mod world;

use common::cases::{config, fixed};
use proptest::prelude::*;
use rxsteer::types::{rps_dev_flow, rx_queue};
use world::*;

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
