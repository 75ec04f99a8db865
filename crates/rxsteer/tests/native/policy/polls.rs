// SPDX-License-Identifier: MIT OR Apache-2.0
//! Flows beside an application that polls for its own packets.

use super::world::*;
use crate::cases::config;
use proptest::prelude::*;
use rxsteer::datapath::native;
use rxsteer::types::{rx_queue, rx_reason, rx_trial};

/// Flow 0's application polls and finds `busy_polls` of a window's polls; flow 1's application is
/// on CPU 2. Returns location and reason of flow 1 after 50 windows.
fn beside_poller(world: &mut World, busy_polls: u32) -> (u16, u8) {
    world.busy_polls = busy_polls;
    for _ in 0..50 {
        world.window(WHOLE / 16, WHOLE / 8);
        for flow in 0..2 {
            world.frame(flow);
        }
        assert_eq!(world.flows[0].location, INLINE);
    }
    (world.flows[1].location, world.flows[1].reason)
}

#[test]
fn others_leave_the_polls_of_an_application() {
    let (room, stay, consumer, no_gain, spread) = (
        rx_reason::RX_ROOM.0 as u8,
        rx_reason::RX_STAY.0 as u8,
        rx_reason::RX_CONSUMER.0 as u8,
        rx_reason::RX_NO_GAIN.0 as u8,
        rx_reason::RX_SPREAD.0 as u8,
    );
    let world = |policy| {
        let mut world = World::new(policy, 2);
        world.facts.consumer_waits = 1;
        world.map.location.fill(2);
        world.application(0, INLINE.into());
        world.application(1, 2);
        world
    };
    for policy in [ADAPT | FOLLOW, ADAPT | FOLLOW | IDLE] {
        let mut world = world(policy);
        assert_eq!(beside_poller(&mut world, 0), (INLINE, room));
        // Interrupts find most packets.
        assert_eq!(beside_poller(&mut world, POLLS / 2 - 1), (INLINE, room));
        assert_eq!(beside_poller(&mut world, POLLS), (2, consumer));
        assert_eq!(world.q.load.pressure, POLLED);
        // The threshold is lower once the state is `POLLED`.
        assert_eq!(beside_poller(&mut world, POLLS / 2 - 1), (2, consumer));
        assert_eq!(beside_poller(&mut world, 0), (INLINE, room));
    }
    // Flow 1 without a known application goes by its hash.
    let mut spreads = world(ADAPT | FOLLOW);
    spreads.applications[1] = 0;
    assert_eq!(beside_poller(&mut spreads, POLLS), (2, spread));
    // An unknown application polls: its packets would have to leave as well.
    let mut unknown = world(ADAPT | FOLLOW);
    unknown.applications[0] = 0;
    unknown.map.location.fill(INLINE);
    assert_eq!(beside_poller(&mut unknown, POLLS), (INLINE, stay));
    let mut unfollowed = world(ADAPT);
    assert_eq!(beside_poller(&mut unfollowed, POLLS), (INLINE, room));
    // The other CPU is crowded.
    let mut crowded = world(ADAPT | FOLLOW);
    crowded.crowded = 1 << 2;
    crowded.serve();
    assert_eq!(beside_poller(&mut crowded, POLLS), (INLINE, no_gain));
}

/// A poll of a window: times in ns, frames received, and frames sent to other CPUs.
#[derive(Clone, Debug)]
struct Poll {
    gap: u64,
    length: u64,
    received: u32,
    elsewhere: u32,
    over_idle: bool,
    exhausted: bool,
    busy: bool,
}

/// Includes empty polls, and those during which the machine was suspended.
fn polls() -> impl Strategy<Value = Vec<Poll>> {
    let time = || prop_oneof![Just(0), 0..2_000_000u64, Just(1 << 31), Just(1 << 50)];
    let frames = prop_oneof![Just(0), 1..100u32, Just(u32::MAX)];
    let poll = (time(), time(), frames, 0..=WHOLE, any::<[bool; 3]>()).prop_map(
        |(gap, length, received, elsewhere, [over_idle, exhausted, busy])| Poll {
            gap,
            length,
            received,
            elsewhere: (u64::from(received) * u64::from(elsewhere) / u64::from(WHOLE)) as u32,
            over_idle,
            exhausted,
            busy,
        },
    );
    proptest::collection::vec(poll, 1..300)
}

proptest! {
    #![proptest_config(config(1000))]

    #[test]
    fn a_window_counts_what_was_in_it(
        polls in polls(),
        first in prop_oneof![Just(0), Just(u32::MAX)],
        tasks in 0..=WHOLE,
        irq in 0..=WHOLE,
        known in any::<bool>(),
        policy in loaded(),
    ) {
        let mut q = rx_queue {
            policy,
            ..Default::default()
        };
        q.load.window = first;
        q.load.polled_for = u32::from(known) * (first.wrapping_add(1).max(1));
        let mut now = 1_000_000_000;
        let (mut poll_ns, mut received, mut elsewhere) = (0u64, 0u64, 0u64);
        let (mut nr_busy, mut nr_others) = (0, 0);
        for poll in polls {
            let start = now + poll.gap;
            now = start + poll.length;
            q.nr_received += u64::from(poll.received);
            q.nr_inline += u64::from(poll.received - poll.elsewhere);
            poll_ns += poll.length;
            received += u64::from(poll.received);
            elsewhere += u64::from(poll.elsewhere);
            let busy = u32::from(poll.busy);
            (nr_busy, nr_others) = (nr_busy + busy, nr_others + 1 - busy);
            let over =
                native::load_polled(&mut q, start, now, poll.over_idle, poll.exhausted, poll.busy);
            prop_assert_eq!(over, now - q.load.window_start >= WINDOW_NS);
            if !over {
                continue;
            }
            let before = q.load;
            native::load_measure(&mut q);
            native::load_window(&mut q, &mut rx_trial::default(), 0, now, tasks, irq);
            let l = &q.load;
            prop_assert_eq!(l.window, before.window.wrapping_add(1));
            prop_assert!(l.poll_share <= l.busy_share);
            let busy = native::load_busy(tasks, irq) as u16;
            prop_assert!((busy..=WHOLE as u16).contains(&l.busy_share));
            let saturated = match l.pressure {
                RELAXED => 0,
                FULL => before.saturated << 1,
                _ => before.saturated << 1 | 1,
            };
            prop_assert_eq!(l.saturated, saturated);
            prop_assert!(l.pressure != POLLED || known && policy & FOLLOW != 0);
            // The average moves by a quarter of the difference, up to rounding.
            let (was, now_polled) = (i64::from(before.busy_polled), i64::from(l.busy_polled));
            let part = i64::from(nr_busy * WHOLE / (nr_busy + nr_others));
            prop_assert!((now_polled - (was * 3 + part) / 4).abs() <= 2);
            prop_assert_eq!(l.nr_busy_polls, 0);
            (nr_busy, nr_others) = (0, 0);
            // 32 frames in 8.6 s: the machine was suspended.
            let still = poll_ns >= 1 << 33;
            let known = received >= 32 && elsewhere <= received / 8;
            let cost = match known {
                true => (poll_ns * 16 / received) as u32,
                false => before.inline_ns,
            };
            prop_assert!(still || l.inline_ns == cost);
            (poll_ns, received, elsewhere) = (0, 0, 0);
        }
    }
}

/// A poll's tracepoint may fire when another CPU has polled the queue since, and ended a window.
#[test]
fn a_poll_that_is_counted_late_ends_no_window() {
    let start = 100 * WINDOW_NS;
    let over = |now| {
        let mut q = rx_queue::default();
        q.load.window_start = start;
        native::load_polled(&mut q, start - 2000, now, false, false, false)
    };
    assert!(!over(start - 1) && !over(start));
    // The control.
    assert!(over(start + WINDOW_NS));
}

/// The pressure of a queue of this device, of which polls have taken these 1024ths of a busy CPU.
fn pressure(ifindex: u32, polls: u32) -> u16 {
    let mut world = World::new(ADAPT, 1);
    world.q.ifindex = ifindex;
    // None of the polls uses up its budget.
    world.busy_polls = POLLS;
    world.window(polls, WHOLE);
    world.q.load.pressure
}

#[test]
fn three_eighths_of_the_time_saturate_a_busy_cpu_in_every_mode() {
    for ifindex in [1, 0] {
        assert_eq!(pressure(ifindex, WHOLE * 3 / 8), SATURATED);
        assert_eq!(pressure(ifindex, WHOLE * 3 / 8 - 1), FULL);
    }
}
