// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random schedules of packets and of failures around the data path.

use proptest::prelude::*;

use super::mix::*;
use crate::cases::{config, fixed};
use crate::sim::gro::Kind;
use crate::sim::path::Path;
use crate::sim::shape::{End, Event, Failure, Fault, NO_CPU, Shape};

/// Events of 256 that are failures.
const FAILURES: u8 = 10;

/// What another program may write into a map.
const FOREIGN: [u16; 4] = [INLINE, 63, 4096, NO_CPU];

/// Random events as numbers; the upper half decides whether it is a failure, and which.
fn schedule() -> impl Strategy<Value = Vec<u64>> {
    proptest::collection::vec(any::<u64>(), 0..300)
}

fn failure(number: u32) -> Event {
    let [which, a, b, _] = number.to_le_bytes();
    Event::Fail(match which % 16 {
        0..2 => Failure::Makes(1 + u32::from(a % 4)),
        2 => Failure::Removals(1 + u32::from(a % 2)),
        3 => Failure::Tables,
        4 => Failure::Requests,
        5..7 => Failure::Kill,
        7..9 => Failure::Stop,
        9..12 => Failure::Start,
        12..14 => Failure::Napi,
        14 => Failure::Clock([1, 1 << 10, 1 << 31, (1 << 32) - 1][usize::from(a % 4)]),
        _ => {
            let [first, last] = [a, b].map(|slot| u16::from(slot) * 4);
            let location = FOREIGN[usize::from(a % 4)];
            return Event::Map(first.min(last), first.max(last), location);
        }
    })
}

/// Runs the schedule to its end, where every component finishes its work.
///
/// # Errors
/// When a packet was overtaken, or one is in no account or in two.
fn survive(shape: &Shape, mix: Mix, schedule: &[u64]) -> Result<Path, String> {
    let mut path = begun(shape);
    for _ in 0..if mix.warm { 4 } else { 0 } {
        round(&mut path, shape, &[0, 1, 2, 3, 4, 5, 6, 7]);
    }
    for &number in schedule {
        let (event, times) = match (number >> 32) as u8 {
            coin if coin < FAILURES => (failure((number >> 40) as u32), 1),
            _ => event(number as u32, shape.nr_cpus, mix),
        };
        for _ in 0..times {
            path.apply(event);
        }
        if path.stack.nr_overtaken > 0 {
            return Err(format!("overtaken at {event:?}"));
        }
    }
    // The poll under way, and another one, after which GRO holds nothing.
    for _ in 0..2 {
        path.apply(Event::EndPoll(End::Complete));
        for cpu in 0..shape.nr_cpus {
            path.apply(Event::PollTraced(cpu));
        }
        path.apply(Event::Frame(0, Kind::Normal));
    }
    path.apply(Event::EndPoll(End::Complete));
    rest(&mut path, shape);
    match path.stack.nr_overtaken {
        0 => path.balance().and(path.nothing_is_missing()).map(|()| path),
        n => Err(format!("{n} overtaken at the end")),
    }
}

proptest! {
    #![proptest_config(config(10_000))]

    #[test]
    fn no_failure_breaks_order_or_accounts(
        shape in shapes(),
        mix in mixes(),
        schedule in schedule(),
    ) {
        prop_assert_eq!(survive(&shape, mix, &schedule).err(), None);
    }
}

/// The control: such schedules find a daemon that fails to do its part.
#[test]
fn schedules_of_failures_find_faults() {
    for fault in [Fault::NapiKept, Fault::DetachedEarly, Fault::OrphansCounted] {
        let mut schedules = fixed((shapes(), mixes(), schedule())).take(10_000);
        let found = schedules.position(|(mut shape, mix, schedule)| {
            shape.fault = Some(fault);
            survive(&shape, mix, &schedule).is_err()
        });
        println!("{fault:?}: schedule {found:?}");
        assert!(found.is_some(), "{fault:?}");
    }
}

/// The control: schedules have daemons that were killed, and started again.
#[test]
fn daemons_die_and_are_born() {
    let lives = fixed((shapes(), mixes(), schedule()))
        .take(500)
        .map(|(shape, mix, schedule)| survive(&shape, mix, &schedule).unwrap().daemon)
        .fold((0, 0), |(most, ended), daemon| {
            (daemon.life.max(most), ended + u32::from(!daemon.attached))
        });
    assert!(lives.0 >= 2 && lives.1 > 0, "{lives:?}");
}
