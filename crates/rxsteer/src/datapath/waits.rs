// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long frames wait in a backlog: a histogram of samples (wait.h).

use std::ops::AddAssign;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::types::{backlog_wait, wait_sample};

/// Number of buckets.
pub const BUCKETS: usize = wait_sample::WAIT_BUCKETS.0 as usize;

/// One frame in so many is measured.
pub const EVERY: u64 = wait_sample::WAIT_EVERY.0 as u64;

/// Times that frames waited in a backlog, from the redirect until they were dequeued. One frame in 64
/// is measured, one at a time: a longer wait leaves out those that are due meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Waits {
    /// Number of samples by time. Element i counts those below 2^(i+1) us and not below 2^i us; the first
    /// all below 2 us, the last all of 1.05 s and more.
    pub buckets: [u64; BUCKETS],
    /// Sum of the samples, ns.
    pub sum_ns: u64,
    /// Half of the samples are below, us: the upper bound of the bucket with the median. Null without
    /// samples, and if it is in the last bucket.
    pub half_below_us: Option<u64>,
    /// As `half_below_us`, for 99 % of the samples.
    pub p99_below_us: Option<u64>,
}

/// The upper bound of a bucket, us; `None` for the last one.
pub fn bound_us(bucket: usize) -> Option<u64> {
    (bucket + 1 < BUCKETS).then(|| 2 << bucket)
}

impl Waits {
    /// From these buckets, and the sum in ns.
    pub fn new(buckets: [u64; BUCKETS], sum_ns: u64) -> Self {
        let mut waits = Self {
            buckets,
            sum_ns,
            half_below_us: None,
            p99_below_us: None,
        };
        waits.half_below_us = waits.below_us(50);
        waits.p99_below_us = waits.below_us(99);
        waits
    }

    /// Number of samples.
    pub fn samples(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The samples that came after `before`; all of them if the counts began anew meanwhile.
    pub fn since(&self, before: &Self) -> Self {
        let mut buckets = self.buckets;
        for (bucket, before) in buckets.iter_mut().zip(&before.buckets) {
            match bucket.checked_sub(*before) {
                Some(later) => *bucket = later,
                None => return self.clone(),
            }
        }
        Self::new(buckets, self.sum_ns.saturating_sub(before.sum_ns))
    }

    /// The upper bound of the bucket with this percentile.
    fn below_us(&self, percent: u64) -> Option<u64> {
        let rank = (self.samples() * percent).div_ceil(100);
        let mut samples = 0;
        let bucket = self.buckets.iter().position(|n| {
            samples += n;
            samples >= rank.max(1)
        });
        bound_us(bucket?)
    }
}

impl AddAssign<&Self> for Waits {
    fn add_assign(&mut self, b: &Self) {
        let mut buckets = self.buckets;
        for (bucket, more) in buckets.iter_mut().zip(&b.buckets) {
            *bucket += more;
        }
        *self = Self::new(buckets, self.sum_ns + b.sum_ns);
    }
}

impl From<&backlog_wait> for Waits {
    fn from(w: &backlog_wait) -> Self {
        Self::new(w.nr, w.ns)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::datapath::native;
    use crate::types::backlog;

    fn waits(samples: &[(usize, u64)]) -> Waits {
        let mut buckets = [0; BUCKETS];
        for (bucket, number) in samples {
            buckets[*bucket] = *number;
        }
        Waits::new(buckets, 7)
    }

    #[test]
    fn percentiles_are_bounds_of_buckets() {
        for (samples, half, p99) in [
            (&[][..], None, None),
            (&[(0, 1)], Some(2), Some(2)),
            (&[(0, 1), (3, 1)], Some(2), Some(16)),
            (&[(2, 99), (5, 1)], Some(8), Some(8)),
            (&[(2, 98), (5, 2)], Some(8), Some(64)),
            (&[(19, 50), (20, 50)], Some(1 << 20), None),
            (&[(20, 1)], None, None),
        ] {
            let waits = waits(samples);
            assert_eq!(
                (waits.half_below_us, waits.p99_below_us),
                (half, p99),
                "{samples:?}"
            );
        }
    }

    #[test]
    fn sums_and_differences() {
        let mut all = waits(&[(0, 5), (20, 1)]);
        let before = all.clone();
        all += &waits(&[(0, 1), (3, 2)]);
        assert_eq!((all.samples(), all.sum_ns), (9, 14));
        assert_eq!(all.since(&before), waits(&[(0, 1), (3, 2)]));
        // The counts began anew.
        assert_eq!(before.since(&all), before);
    }

    #[test]
    fn a_time_is_below_the_bound_of_its_bucket_alone() {
        for ns in [
            0,
            1,
            1999,
            2000,
            3999,
            4000,
            1_048_575_999,
            1_048_576_000,
            u64::MAX,
        ] {
            let bucket = native::wait_bucket(ns) as usize;
            let below = |bucket| bound_us(bucket).is_none_or(|us| ns < us * 1000);
            assert!(
                below(bucket) && (bucket == 0 || !below(bucket - 1)),
                "{ns}: {bucket}"
            );
        }
    }

    /// What happens to a backlog.
    #[derive(Clone, Debug)]
    enum Step {
        /// Frames enter.
        Enter(u8),
        /// A frame is counted as entered, and lost.
        Lose,
        /// Up to so many frames are dequeued.
        Dequeue(u8),
        /// Time passes, us.
        Pass(u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            8 => (1..100u8).prop_map(Step::Enter),
            8 => (1..100u8).prop_map(Step::Dequeue),
            1 => Just(Step::Lose),
            8 => (0..100_000u32).prop_map(Step::Pass),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        /// A ring beside the counters: a sample is the time that its frame was in there.
        #[test]
        fn samples_are_the_times_that_frames_wait(steps in steps(), losses: bool) {
            let (mut b, mut w) = (backlog::default(), backlog_wait::default());
            let mut ring = VecDeque::new();
            let mut expected = [0; BUCKETS];
            let (mut now, mut measured) = (1u64, None);
            for step in steps {
                match step {
                    Step::Pass(us) => now += u64::from(us) * 1000,
                    Step::Enter(frames) => for _ in 0..frames {
                        let begun = w.nr_begun;
                        let due = b.tail.is_multiple_of(EVERY);
                        native::wait_begin(&mut w, &b, now);
                        prop_assert_eq!(w.nr_begun > begun, due && measured.is_none());
                        if w.nr_begun > begun {
                            measured = Some(now);
                        }
                        b.tail += 1;
                        ring.push_back((now, w.nr_begun > begun));
                    }
                    Step::Lose if losses => {
                        b.tail += 1;
                        b.nr_lost += 1;
                    }
                    Step::Lose => {}
                    Step::Dequeue(frames) => {
                        let frames = ring.len().min(frames.into());
                        let pending = native::wait_is_pending(&w);
                        native::backlog_dequeue(&mut b, frames as u32, true, 0);
                        let left_out = w.nr_left_out;
                        if pending {
                            native::wait_end(&mut w, &b, now);
                        }
                        for (entered, is_measured) in ring.drain(..frames) {
                            if is_measured && w.nr_left_out == left_out {
                                expected[native::wait_bucket(now - entered) as usize] += 1;
                            }
                        }
                        if !native::wait_is_pending(&w) {
                            measured = None;
                        }
                    }
                }
                prop_assert_eq!(w.nr.iter().sum::<u64>() + w.nr_left_out, w.nr_ended);
                prop_assert_eq!(w.nr_begun - w.nr_ended, u64::from(measured.is_some()));
                if !losses {
                    prop_assert_eq!(w.nr, expected);
                    prop_assert_eq!(w.nr_left_out, 0);
                }
            }
        }
    }
}
