// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wanted locations according to policy.h, load.h and steer.h on CPUs with a simulated load. All
//! earlier packets count as delivered; the rule of order has its own test (tests/native/order/).

mod adapt;
mod busy;
mod limit;
mod merged;
mod owner;
mod polls;
mod shared;
mod trial;
mod world;

use crate::cases::{config, fixed};
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

/// The inputs of decisions and their results, without the policies' own counters.
fn decided(world: &World) -> String {
    let flows = world.flows.iter().map(|&flow| rps_dev_flow {
        window: 0,
        frames: 0,
        load: 0,
        may_leave: 0,
        ..flow
    });
    let q = rx_queue {
        load: Default::default(),
        ..world.q
    };
    format!("{:?} {q:?} {:?}", Vec::from_iter(flows), world.backlogs)
}

/// Whether the results are the same as without a load.
fn is_plain(policy: u16, numbers: &[u32]) -> bool {
    let [mut loaded, mut plain] = [World::new(policy, NR_FLOWS), World::new(policy, NR_FLOWS)];
    numbers.iter().all(|&number| match step(number) {
        Step::Load => {
            loaded.load(number);
            // Frames in backlogs don't belong to the policies.
            plain.crowded = loaded.crowded;
            plain.serve();
            true
        }
        Step::Stir => {
            loaded.stir(number);
            plain.stir(number);
            true
        }
        Step::Frame(flow) => {
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

/// The control: with any of the knobs, the load has an effect.
#[test]
fn with_its_knobs_the_load_matters() {
    for policy in LOADED {
        let mut cases = fixed(numbers(300)).take(100);
        assert!(cases.any(|numbers| !is_plain(policy, &numbers)), "{policy}");
    }
}
