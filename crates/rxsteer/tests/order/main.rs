// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rule of order, steer.h and backlog.h as they are, on a simulated receive path whose turns
//! come in any order: no packet overtakes an earlier one of its flow, no frame is lost to the
//! accounts, and every flow gets where it wants to be.

#[path = "../common/mod.rs"]
mod common;
mod leave;
mod mix;
#[path = "../sim/mod.rs"]
mod sim;

use common::cases::{config, fixed};
use mix::*;
use proptest::prelude::*;
use rxsteer::types::{rx_pressure, rx_reason};
use sim::shape::Lie;

proptest! {
    #![proptest_config(config(5000))]

    #[test]
    fn no_packet_overtakes_and_every_frame_is_accounted_for(
        shape in shapes(),
        mix in mixes(),
        turns in turns(600),
    ) {
        prop_assert_eq!(run(&shape, mix, &turns).err(), None);
    }
}

/// The control: every reason to be somewhere comes up, and every kind of load.
#[test]
fn flows_have_every_reason_to_move() {
    let all = (
        (1 << rx_reason::NR_RX_REASONS.0) - 1,
        (1 << (rx_pressure::RX_POLLED.0 + 1)) - 1,
    );
    let mut had = (0, 0);
    let seen = fixed((shapes(), mixes(), turns(600)))
        .take(2000)
        .any(|(shape, mix, turns)| {
            let path = run(&shape, mix, &turns).unwrap();
            had.0 |= path.reasons;
            had.1 |= path.pressures;
            had == all
        });
    assert!(seen, "{:b} {:b}", had.0, had.1);
}

/// The control: each fault of the data path is seen as packets out of order.
#[test]
fn every_lie_lets_packets_overtake() {
    const RUNS: usize = 20_000;
    for lie in [
        Lie::Unguarded,
        Lie::NapiGroEmpty,
        Lie::PollEnds,
        Lie::ThreadGroEmpty,
        Lie::Sleeping,
        Lie::SleepingBefore,
        Lie::FreshBelieved,
        Lie::HeadAhead,
        Lie::TakenMore,
        Lie::QtailBefore,
        Lie::LostTwice,
        Lie::EpochAbroad,
        Lie::RemovedFull,
    ] {
        let found = fixed((shapes(), mixes(), turns(600))).take(RUNS).position(
            |(mut shape, mix, turns)| {
                shape.lie = Some(lie);
                run(&shape, mix, &turns).is_err()
            },
        );
        assert!(found.is_some(), "{lie:?}");
    }
}

/// The control of the accounts.
#[test]
fn miscounting_is_seen() {
    for lie in [Lie::TakenMore, Lie::LostTwice] {
        let mut cases = fixed((shapes(), mixes(), turns(600))).take(200);
        let seen = cases.any(|(mut shape, mix, turns)| {
            shape.lie = Some(lie);
            run(&shape, mix, &turns).is_ok_and(|path| path.balance().is_err())
        });
        assert!(seen, "{lie:?}");
    }
}
