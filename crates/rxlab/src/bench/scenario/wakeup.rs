// SPDX-License-Identifier: MIT OR Apache-2.0
//! `wakeup`: cost of a packet at loads that leave the host time to sleep.
//!
//! A paced load is spread by connected sockets over all CPUs that do not poll. Modes that hand each
//! packet to another CPU have to wake that CPU.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use indexmap::IndexMap;

use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, detail, fit, headline,
};
use crate::bench::report::document::Better;
use crate::bench::scenario::flood::RCVBUF;
use crate::bench::setup::mode::{Mode, Way};
use crate::bench::setup::testbed::{INTERRUPT_CPU, Testbed};
use crate::bench::setup::traffic::{Counts, NR_CONNECTED, SETTLING, Sending, Traffic, check};
use crate::bench::setup::watch::Seen;
use crate::lab::frame::{Frames, UdpFlows};
use crate::lab::migrator::{Migrators, Reads};
use crate::lab::sockets;
use crate::lab::switches::{Scheduled, Switches};

/// Packets per second: about 5, 20 and 50 % of the maximum of `none` on common machines.
const RATES: [u64; 3] = [20_000, 80_000, 200_000];

/// Minimum length of a measurement, s: idle time has steps of 10 ms.
const SHORTEST: f64 = 0.5;

/// Smallest share of the rate that the generator must offer, and of the offered packets that must
/// arrive. Less is another load, or leaves no time to sleep.
const OFFERED: f64 = 0.9;
const ARRIVE: f64 = 0.98;

pub struct Wakeup {
    conditions: Vec<Condition>,
    testbeds: Vec<Testbed>,
    ways: Vec<Way>,
    seconds: f64,
}

/// Counts of one measurement.
struct Sample {
    seen: Seen,
    scheduled: Scheduled,
    counts: Counts,
    /// CPU time of a generator on the polling CPU, s.
    generator: f64,
}

impl Wakeup {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        use Mode::{Cpumap, KernelRfs, KernelRps, None, Rxsteer, RxsteerRfs, RxsteerSoftirq};
        let conditions = effort.conditions(&[Napi::Thread], &[Gro::On]);
        let testbeds = Testbed::each(&conditions)?;
        let modes = [
            None,
            KernelRps,
            KernelRfs,
            Cpumap,
            RxsteerRfs,
            Rxsteer,
            RxsteerSoftirq,
        ];
        Ok(Self {
            ways: testbeds[0].masks().ways(&modes),
            conditions,
            testbeds,
            seconds: effort.seconds.max(SHORTEST),
        })
    }
}

impl Experiment for Wakeup {
    fn plan(&self) -> Plan {
        use Better::Lower;
        let ns = "ns/packet";
        let cases = self.conditions.iter().flat_map(|condition| {
            RATES.map(|rate| CasePlan {
                case: condition.case(&format!("{rate} packets/s"), &self.conditions),
                modes: self.ways.iter().map(Way::to_string).collect(),
            })
        });
        let mut conditions = self.testbeds[0].conditions(&self.conditions);
        conditions.insert(
            "application".to_owned(),
            format!(
                "{NR_CONNECTED} connected sockets, a thread on each of CPUs {}",
                self.testbeds[0].masks().others
            ),
        );
        Plan {
            scenario: "wakeup",
            question: "What does a packet cost while the host has time to sleep in between?",
            metrics: IndexMap::from([
                headline("polling_ns_per_packet", "Time of the CPU that polls", ns, Lower),
                headline("cpu_ns_per_packet", "Time of all CPUs of the host", ns, Lower),
                detail("switches_per_packet", "Context switches", "1/packet", Lower),
                detail("wakeups_per_packet", "Wake-ups", "1/packet", Lower),
            ]),
            cases: cases.collect(),
            conditions,
            notes: vec![
                "The rates are some 5, 20 and 50 % of what none carries on common machines. Times are those \
                 in which a CPU was not idle, in steps of 10 ms for each CPU: at the lowest rate, half a \
                 second leaves an uncertainty of 1 us for a packet. The time of a generator that shares the \
                 CPU that polls is taken off; it sends in bursts of 500 us, generators with CPUs of their \
                 own in bursts of 20 us. Wake-ups are left out where the kernel does not count them \
                 (CONFIG_SCHEDSTATS, kernel.sched_schedstats)."
                    .to_owned(),
            ],
            seconds_each: SETTLING.as_secs_f64() + self.seconds + 0.15,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (testbed, way) = (&self.testbeds[case / RATES.len()], self.ways[mode]);
        let rate = RATES[case % RATES.len()];
        let active = testbed.start(way)?;
        let (dut, cpus) = (&testbed.link.dut, &testbed.masks().others);
        let flows = UdpFlows::to(dut, NR_CONNECTED);
        let sockets = sockets::connected(&dut.netns, &flows, RCVBUF)?;
        let application = Migrators::spread(&dut.netns, sockets, Reads::Datagrams, cpus)?;
        let watch = testbed.watch()?;
        let paced = Sending::start(testbed, &application, &Frames::Udp(flows), Some(rate))
            .and_then(|sending| load(testbed, sending, self.seconds));
        let seen = watch.end();
        // Stop also after an error: the next measurement binds the same addresses.
        application.stop()?;
        let ((traffic, sample), seen) = (paced?, seen?);
        check(testbed, &active, way, &traffic, &seen)?;
        active.stop()?;
        sample.values(rate)
    }
}

/// Counts for `seconds` while packets come.
fn load(testbed: &Testbed, sending: Sending<'_>, seconds: f64) -> Result<(Traffic, Sample)> {
    sleep(SETTLING);
    let switches = Switches::of(&testbed.masks().all)?;
    let (then, before) = (sending.look()?, switches.read()?);
    let (watch, generator) = (testbed.watch()?, sending.generator_ns()?);
    sleep(Duration::from_secs_f64(seconds));
    let generator = sending.generator_ns()? - generator;
    let seen = watch.end()?;
    let (scheduled, now) = (switches.read()?.since(before), sending.look()?);
    let sample = Sample {
        counts: now.since(then),
        seen,
        scheduled,
        generator: generator as f64 / 1e9,
    };
    Ok((sending.end()?, sample))
}

impl Sample {
    fn values(&self, rate: u64) -> Result<Values> {
        let (delivered, seconds) = (self.counts.delivered as f64, self.seen.seconds);
        let offered = (self.counts.accepted + self.counts.refused) as f64;
        fit!(
            offered >= OFFERED * rate as f64 * seconds,
            "the generator was starved: it offered {:.0} of {rate} packets/s",
            offered / seconds
        );
        fit!(
            delivered >= ARRIVE * offered,
            "of {offered:.0} packets only {delivered:.0} arrived: no time was to spare"
        );
        let share = self.seen.shares.get(&INTERRUPT_CPU).copied();
        let polling = share.unwrap_or_default() * seconds - self.generator;
        let ns_each = |time: f64| time.max(0.0) * 1e9 / delivered;
        let mut values = vec![
            ("polling_ns_per_packet", ns_each(polling)),
            (
                "cpu_ns_per_packet",
                ns_each(self.seen.busy - self.generator),
            ),
            (
                "switches_per_packet",
                self.scheduled.switches as f64 / delivered,
            ),
        ];
        if let Some(wakeups) = self.scheduled.wakeups {
            values.push(("wakeups_per_packet", wakeups as f64 / delivered));
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::experiment::Unfit;

    #[test]
    fn the_generators_time_is_not_the_packets() {
        let sample = |accepted, refused, delivered| Sample {
            seen: Seen {
                seconds: 1.0,
                busy: 0.5,
                shares: [(0, 0.3), (1, 0.2)].into(),
                ..Default::default()
            },
            scheduled: Scheduled {
                switches: 30_000,
                wakeups: None,
            },
            counts: Counts {
                accepted,
                refused,
                delivered,
            },
            generator: 0.1,
        };
        let values = sample(20_000, 0, 20_000).values(20_000).unwrap();
        let expected = [
            ("polling_ns_per_packet", 10_000.0),
            ("cpu_ns_per_packet", 20_000.0),
            ("switches_per_packet", 1.5),
        ];
        assert_eq!(values.len(), expected.len());
        for ((name, value), (expected, of)) in values.into_iter().zip(expected) {
            assert!(
                name == expected && (value / of - 1.0).abs() < 1e-9,
                "{name} {value}"
            );
        }
        // Control: loads that were not offered, or not delivered.
        for (accepted, refused, delivered) in [
            (17_000, 0, 17_000),
            (20_000, 0, 19_000),
            (19_000, 1_000, 19_000),
        ] {
            let refused = sample(accepted, refused, delivered).values(20_000);
            assert!(refused.is_err_and(|error| error.is::<Unfit>()));
        }
    }
}
