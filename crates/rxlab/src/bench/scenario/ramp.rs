// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ramp`: time that a mode, just switched on, takes to reach its rate under a flood.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use indexmap::IndexMap;

use crate::bench::experiment::{Effort, Experiment, Plan, Values, fit, headline};
use crate::bench::report::document::Better;
use crate::bench::scenario::flood::{Application, Labs, Sockets};
use crate::bench::setup::mode::Mode;
use crate::bench::setup::traffic::{Counts, Sending, Traffic, check};
use crate::lab::frame::Frames;

/// Minimum length of a measurement, s.
const SHORTEST: f64 = 1.0;

/// Interval of the samples.
const SAMPLE: Duration = Duration::from_millis(5);

/// Window over which a rate is computed, s; a shorter one would show single batches.
const WINDOW: f64 = 0.02;

/// Share of the final rate that counts as reached.
const REACHED: f64 = 0.9;

/// Length of the first part of the flood, s.
const FIRST: f64 = 0.1;

/// Limit on waiting for the first packet.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Case: connected sockets, with kernel RFS.
pub struct Ramp {
    labs: Labs,
    seconds: f64,
}

impl Ramp {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        use Mode::{Cpumap, KernelRfs, KernelRps, None, Rxsteer, RxsteerRfs};
        let modes = [None, KernelRps, KernelRfs, Cpumap, RxsteerRfs, Rxsteer];
        Ok(Self {
            labs: Labs::new(effort, &[(Sockets::Connected, &modes[..])])?,
            seconds: effort.seconds.max(SHORTEST),
        })
    }
}

impl Experiment for Ramp {
    fn plan(&self) -> Plan {
        use Better::{Higher, Lower};
        let reached = format!("Until {:.0} % of the final rate", 100.0 * REACHED);
        let first = format!("Delivered in the first {:.0} ms", 1e3 * FIRST);
        Plan {
            scenario: "ramp",
            question: "How long does it take, from the first packet of a flood, until the application \
                       gets what it gets in the end?",
            metrics: IndexMap::from([
                headline("ramp_ms", &reached, "ms", Lower),
                headline(
                    "final_pps",
                    "Delivered in the last quarter",
                    "packets/s",
                    Higher,
                ),
                headline("first_100ms_pps", &first, "packets/s", Higher),
            ]),
            cases: self.labs.cases(),
            conditions: self.labs.conditions(),
            notes: vec![format!(
                "As flood, for {:.1} s, but nothing settles before: the way is switched on, and the flood \
                 begins. Packets that the application has read are counted every {SAMPLE:?}; the final \
                 rate is that of the last quarter, and it is reached when the rate over {:.0} ms comes to \
                 {:.0} % of it for the first time. A way with a low final rate reaches it soon: ramp_ms \
                 means something beside final_pps alone.",
                self.seconds,
                1e3 * WINDOW,
                100.0 * REACHED,
            )],
            seconds_each: self.seconds + 0.15,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (testbed, to, way) = self.labs.get(case, mode);
        let active = testbed.start(way)?;
        let frames = Frames::Udp(to.flows(testbed));
        let application = Application::start(testbed, to)?;
        let watch = testbed.watch()?;
        let flooded = Sending::start(testbed, &application, &frames, None)
            .and_then(|sending| flood(sending, self.seconds));
        let seen = watch.end();
        // Stop also after an error: the next measurement binds the same addresses.
        application.stop()?;
        let ((traffic, curve), seen) = (flooded?, seen?);
        check(testbed, &active, way, &traffic, &seen)?;
        traffic.exceeds_the_host()?;
        active.stop()?;
        let rate = curve.final_pps();
        let Some(ramp) = curve.reaches(REACHED * rate).filter(|_| rate > 0.0) else {
            fit!(false, "nothing was delivered in the last quarter");
            return Ok(Values::new());
        };
        Ok(vec![
            ("ramp_ms", 1e3 * ramp),
            ("final_pps", rate),
            ("first_100ms_pps", curve.delivered_by(FIRST) / FIRST),
        ])
    }
}

/// Samples for `seconds`, from the first packet on.
fn flood(sending: Sending<'_>, seconds: f64) -> Result<(Traffic, Curve)> {
    let waiting = Instant::now();
    while sending.look()?.accepted == 0 {
        fit!(
            waiting.elapsed() < TIMEOUT,
            "the device accepted nothing: the generator did not run"
        );
        sleep(Duration::from_micros(200));
    }
    let start = Instant::now();
    let mut samples = vec![(0.0, sending.look()?)];
    while start.elapsed().as_secs_f64() < seconds {
        sleep(SAMPLE);
        let look = sending.look()?;
        samples.push((start.elapsed().as_secs_f64(), look));
    }
    let curve = Curve::new(&samples);
    let (end, last) = samples[samples.len() - 1];
    let (begin, then) = samples[curve.last_quarter()];
    let traffic = Traffic {
        meanwhile: last.since(then),
        seconds: end - begin,
        ..sending.end()?
    };
    Ok((traffic, curve))
}

/// Time, s, and packets delivered up to then, in the order of time.
struct Curve(Vec<(f64, f64)>);

impl Curve {
    fn new(samples: &[(f64, Counts)]) -> Self {
        let sample = |&(at, counts): &(f64, Counts)| (at, counts.delivered as f64);
        Self(samples.iter().map(sample).collect())
    }

    /// Index of the first sample in the last quarter of the time.
    fn last_quarter(&self) -> usize {
        let end = self.0.last().map_or(0.0, |sample| sample.0);
        let first = self.0.partition_point(|sample| sample.0 < 0.75 * end);
        first.min(self.0.len().saturating_sub(2))
    }

    fn final_pps(&self) -> f64 {
        match (self.0.get(self.last_quarter()), self.0.last()) {
            (Some(first), Some(last)) if last.0 > first.0 => {
                (last.1 - first.1) / (last.0 - first.0)
            }
            _ => 0.0,
        }
    }

    /// Start of the first [`WINDOW`] with at least this rate, s.
    fn reaches(&self, pps: f64) -> Option<f64> {
        let from = |first: &(usize, &(f64, f64))| {
            let (index, &(at, delivered)) = *first;
            let mut later = self.0[index..].iter();
            later
                .find(|sample| sample.0 >= at + WINDOW)
                .is_some_and(|end| end.1 - delivered >= pps * (end.0 - at))
        };
        let found = self.0.iter().enumerate().find(from);
        found.map(|(_, sample)| sample.0)
    }

    /// Packets delivered up to a time, interpolated between samples.
    fn delivered_by(&self, at: f64) -> f64 {
        let next = self.0.partition_point(|sample| sample.0 < at);
        match (self.0.get(next.saturating_sub(1)), self.0.get(next)) {
            (Some(before), Some(after)) if after.0 > before.0 => {
                before.1 + (after.1 - before.1) * (at - before.0) / (after.0 - before.0)
            }
            (_, Some(only)) | (Some(only), None) => only.1,
            (None, None) => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 packets/s for `slow` seconds, then 1000; sampled every 7 ms.
    fn after(slow: f64) -> Curve {
        let delivered = |at: f64| 100.0 * at.min(slow) + 1000.0 * (at - slow).max(0.0);
        let times = (0..=143).map(|n| 0.007 * f64::from(n));
        Curve(times.map(|at| (at, delivered(at))).collect())
    }

    #[test]
    fn a_rate_is_reached_where_it_begins() {
        for slow in [0.0, 0.035, 0.3] {
            let curve = after(slow);
            let rate = curve.final_pps();
            assert!((rate - 1000.0).abs() < 1e-6, "{rate}");
            let found = curve.reaches(REACHED * rate).unwrap();
            assert!(
                found >= slow - WINDOW && found <= slow + 0.007,
                "{slow}: {found}"
            );
        }
        // Control: a rate that is never reached.
        assert_eq!(after(0.3).reaches(1100.0), None);
        assert_eq!(Curve(Vec::new()).final_pps(), 0.0);
    }

    #[test]
    fn the_first_packets_are_those_until_a_moment() {
        for (slow, packets) in [(0.0, 100.0), (0.3, 10.0), (0.049, 4.9 + 51.0)] {
            let found = after(slow).delivered_by(FIRST);
            assert!((found - packets).abs() < 1e-6, "{slow}: {found}");
        }
    }
}
