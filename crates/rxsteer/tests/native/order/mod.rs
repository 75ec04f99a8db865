// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rule of order (steer.h and backlog.h unchanged) on a simulated receive path with events in
//! any order: no packet overtakes an earlier one of its flow, every frame is accounted for, and
//! every flow reaches its wanted location.

mod faults;
mod leave;
mod mix;
mod softnet;

use crate::cases::{config, fixed};
use crate::sim::shape::Fault;
use mix::*;
use proptest::prelude::*;
use rxsteer::types::{rx_pressure, rx_reason};

proptest! {
    #![proptest_config(config(5000))]

    #[test]
    fn no_packet_overtakes_and_every_frame_is_accounted_for(
        shape in shapes(),
        mix in mixes(),
        events in events(600),
    ) {
        prop_assert_eq!(run(&shape, mix, &events).err(), None);
    }
}

/// The control: every reason for a location occurs, and every kind of load.
#[test]
fn flows_have_every_reason_to_move() {
    let all = (
        (1 << rx_reason::NR_RX_REASONS.0) - 1,
        (1 << (rx_pressure::RX_POLLED.0 + 1)) - 1,
    );
    let mut had = (0, 0);
    let seen = fixed((shapes(), mixes(), events(600)))
        .take(2000)
        .any(|(shape, mix, events)| {
            let path = run(&shape, mix, &events).unwrap();
            had.0 |= path.reasons;
            had.1 |= path.pressures;
            had == all
        });
    assert!(seen, "{:b} {:b}", had.0, had.1);
}

/// The control: each fault of the data path leads to packets out of order.
#[test]
fn every_fault_lets_packets_overtake() {
    const RUNS: usize = 20_000;
    for fault in [
        Fault::Unguarded,
        Fault::NapiGroEmpty,
        Fault::PollEnds,
        Fault::ThreadGroEmpty,
        Fault::Sleeping,
        Fault::SleepingBefore,
        Fault::FreshBelieved,
        Fault::HeadAhead,
        Fault::TakenMore,
        Fault::QtailBefore,
        Fault::LostTwice,
        Fault::EpochAbroad,
        Fault::RemovedFull,
        Fault::Unflushed,
        Fault::BlockedEarly,
    ] {
        let found = fixed((shapes(), mixes(), events(600))).take(RUNS).position(
            |(mut shape, mix, events)| {
                shape.fault = Some(fault);
                run(&shape, mix, &events).is_err()
            },
        );
        assert!(found.is_some(), "{fault:?}");
    }
}

/// The control of the accounts.
#[test]
fn miscounting_is_seen() {
    for fault in [Fault::TakenMore, Fault::LostTwice] {
        let mut cases = fixed((shapes(), mixes(), events(600))).take(200);
        let seen = cases.any(|(mut shape, mix, events)| {
            shape.fault = Some(fault);
            run(&shape, mix, &events).is_ok_and(|path| path.balance().is_err())
        });
        assert!(seen, "{fault:?}");
    }
}
