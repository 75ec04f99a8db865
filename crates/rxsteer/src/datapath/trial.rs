// SPDX-License-Identifier: MIT OR Apache-2.0
//! The answer to the question whether it helps that flows move (`bpf/core/trial.h`).

use std::fmt;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::types::rx_trial;

/// What all queues delivered while their flows moved and while they stayed INLINE, by the last answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Trial {
    /// Bytes delivered per second while flows moved.
    pub moving_bytes_per_second: u64,
    /// Bytes delivered per second while all flows stayed INLINE.
    pub inline_bytes_per_second: u64,
    /// Age of the answer, in seconds.
    pub seconds_ago: u64,
    /// Whether flows move since then.
    pub helps: bool,
}

impl Trial {
    /// `None` while there is no answer: no queue was under load, or none has been for a second.
    /// `now` is the time since boot by the monotonic clock.
    pub fn of(t: &rx_trial, now: Duration) -> Option<Self> {
        /// The kernel side counts bytes per 2^20 ns.
        const SECOND: u128 = 1_000_000_000;
        let per_second = |rate: u64| ((u128::from(rate) * SECOND) >> 20) as u64;
        let answered = t.answered_at != 0 && t.answer_staying != 0;
        answered.then(|| Self {
            moving_bytes_per_second: per_second(t.answer_moving),
            inline_bytes_per_second: per_second(t.answer_staying),
            seconds_ago: now
                .saturating_sub(Duration::from_nanos(t.answered_at))
                .as_secs(),
            helps: t.stay == 0,
        })
    }
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ratio = self.moving_bytes_per_second as f64 / self.inline_bytes_per_second as f64;
        let action = match self.helps {
            true => "moving flows helps",
            false => "flows stay inline",
        };
        write!(
            f,
            "{action}: {} of packets delivered while they moved, {} while inline ({ratio:.2} times, {} s ago)",
            bits(self.moving_bytes_per_second),
            bits(self.inline_bytes_per_second),
            self.seconds_ago
        )
    }
}

/// A rate in bytes per second, as bits per second.
fn bits(bytes: u64) -> String {
    let bits = bytes as f64 * 8.0;
    match bits {
        1e9.. => format!("{:.1} Gbit/s", bits / 1e9),
        _ => format!("{:.0} Mbit/s", bits / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_per_second_and_answers_have_an_age() {
        let mut t = rx_trial {
            answered_at: 5_000_000_000,
            answer_moving: 1 << 20,
            answer_staying: 1 << 19,
            stay: 0,
            ..rx_trial::default()
        };
        let now = Duration::from_secs(17);
        let trial = Trial {
            moving_bytes_per_second: 1_000_000_000,
            inline_bytes_per_second: 500_000_000,
            seconds_ago: 12,
            helps: true,
        };
        assert_eq!(Trial::of(&t, now), Some(trial.clone()));
        assert_eq!(
            trial.to_string(),
            "moving flows helps: 8.0 Gbit/s of packets delivered while they moved, 4.0 Gbit/s while inline (2.00 times, 12 s ago)"
        );
        t.answered_at = 0;
        assert_eq!(Trial::of(&t, now), None, "no answer yet");
    }
}
