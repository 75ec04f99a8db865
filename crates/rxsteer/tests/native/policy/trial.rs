// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether it helps that flows move: what a queue delivers in windows in which they do and do not.

use super::world::*;
use crate::cases::config;
use proptest::prelude::*;
use rxsteer::datapath::native;
use rxsteer::types::{rx_queue, rx_trial};

/// Packets of a window.
const PACKETS: u64 = 1000;

/// Windows of a second.
const SECOND: usize = 100;

/// A queue under load.
struct Load {
    q: rx_queue,
    trial: rx_trial,
    nr_refused: u64,
    now: u64,
    /// Bytes that are delivered in a window while flows stay INLINE, and while they move.
    staying: u64,
    moving: u64,
    /// Of a window's packets, those that sockets have no room for while flows move.
    refused: u64,
}

impl Load {
    fn new(staying: u64, moving: u64) -> Self {
        Self {
            q: rx_queue {
                ifindex: 1,
                policy: ADAPT,
                ..Default::default()
            },
            trial: rx_trial::default(),
            nr_refused: 0,
            now: WINDOW_NS,
            staying,
            moving,
            refused: 0,
        }
    }

    /// Whether flows moved in the last window, as far as the queue knows.
    fn moves(&self) -> bool {
        self.q.load.pressure == SATURATED
    }

    /// A window on a CPU that is `busy` so much; delivers `percent` of what it would. Returns whether flows moved.
    fn window(&mut self, busy: u32, percent: u64) -> bool {
        let moves = self.moves() && busy > 0;
        self.q.nr_received += PACKETS;
        self.q.nr_inline += if moves { PACKETS / 2 } else { PACKETS };
        let bytes = if moves { self.moving } else { self.staying };
        self.q.load.bytes += bytes * percent / 100;
        self.nr_refused += if moves { self.refused } else { 0 };
        self.q.load.poll_ns = WINDOW_NS * u64::from(busy) / u64::from(WHOLE);
        (self.q.load.nr_polls, self.q.load.nr_exhausted) = (8, 8 * u32::from(busy > 0));
        self.now += WINDOW_NS;
        native::load_window(
            &mut self.q,
            &mut self.trial,
            self.nr_refused,
            self.now,
            busy,
            0,
        );
        moves
    }

    /// Ends so many windows without load.
    fn rests(&mut self, nr: usize) {
        for _ in 0..nr {
            self.window(0, 100);
        }
    }

    /// Ends so many windows under load; returns in how many flows moved.
    fn windows(&mut self, nr: usize) -> usize {
        (0..nr).filter(|_| self.window(WHOLE, 100)).count()
    }
}

#[test]
fn flows_return_where_moving_harms() {
    let mut load = Load::new(100_000, 90_000);
    // They move at once, and until the answer is there.
    assert!(load.windows(4) > 1);
    load.windows(SECOND);
    let moved = load.windows(60 * SECOND);
    assert!(moved < 60 * SECOND / 20, "{moved}");
}

#[test]
fn flows_move_where_it_helps() {
    for moving in [105_000, 125_000, 400_000] {
        let mut load = Load::new(100_000, moving);
        load.windows(SECOND);
        let moved = load.windows(60 * SECOND);
        assert!(moved > 60 * SECOND * 19 / 20, "{moving}: {moved}");
    }
}

/// A clear gain needs no question at first, and none delays what a flood needs.
#[test]
fn what_clearly_helps_is_not_asked_at_once() {
    let mut load = Load::new(100_000, 150_000);
    load.windows(1);
    assert_eq!(load.windows(SECOND), SECOND);
}

#[test]
fn without_a_difference_they_stay() {
    let mut load = Load::new(100_000, 100_000);
    load.windows(SECOND);
    let moved = load.windows(60 * SECOND);
    assert!(moved < 60 * SECOND / 20, "{moved}");
}

/// Packets that find a socket full have not been delivered.
#[test]
fn what_sockets_refuse_does_not_count() {
    let mut load = Load::new(100_000, 180_000);
    load.refused = PACKETS / 2;
    load.windows(10 * SECOND);
    let moved = load.windows(60 * SECOND);
    assert!(moved < 60 * SECOND / 20, "{moved}");
}

#[test]
fn another_load_is_another_question() {
    let mut load = Load::new(100_000, 80_000);
    load.windows(20 * SECOND);
    assert!(load.trial.stay != 0);
    (load.staying, load.moving) = (400_000, 800_000);
    load.windows(SECOND / 2);
    let moved = load.windows(10 * SECOND);
    assert!(moved > 9 * SECOND, "{moved}");
}

#[test]
fn without_load_the_answer_is_forgotten() {
    let mut load = Load::new(100_000, 80_000);
    load.windows(20 * SECOND);
    assert!(load.trial.stay != 0);
    load.rests(SECOND + 2);
    load.windows(1);
    assert!(load.moves());
    // After a shorter pause it is not.
    load.windows(20 * SECOND);
    load.rests(SECOND / 2);
    load.windows(1);
    assert!(!load.moves());
}

proptest! {
    #![proptest_config(config(100))]

    /// What is delivered varies by a fifth up and down from window to window.
    #[test]
    fn the_answer_survives_noise(
        noise in prop::collection::vec(80..=120u64, 60 * SECOND),
        helps in any::<bool>(),
    ) {
        let moving = if helps { 125_000 } else { 80_000 };
        let mut load = Load::new(100_000, moving);
        load.windows(SECOND);
        let moved = noise.iter().filter(|&&percent| load.window(WHOLE, percent)).count();
        let wrong = if helps { noise.len() - moved } else { moved };
        prop_assert!(wrong < noise.len() / 10, "{} of {}", wrong, noise.len());
    }
}
