// SPDX-License-Identifier: MIT OR Apache-2.0
//! `headroom`: latency and cost of requests at rates that leave the host time.

use anyhow::Result;
use indexmap::IndexMap;

use super::closed_loop::ClosedLoop;
use super::servers::{self, Servers};
use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, detail, headline,
};
use crate::bench::programs::Service;
use crate::bench::report::document::Better;
use crate::bench::setup::mode::{Active, Mode, Way};
use crate::bench::setup::place::Place;
use crate::bench::setup::testbed::Testbed;

/// Connections of the lab's own client.
const CONNECTIONS: u32 = 100;

/// The server that a case asks.
#[derive(Clone, Copy)]
enum Asked {
    /// A server of the lab's own.
    Rr,
    Server(servers::Case),
}

/// In the order of a round.
const ASKED: [Asked; 3] = [
    Asked::Rr,
    Asked::Server(servers::of(Service::DnsUdp, 1)),
    Asked::Server(servers::of(Service::Http, 1)),
];

/// Percent of what the host answers without steering.
const SHARES: [u32; 3] = [1, 10, 50];

/// Minimum length of a measurement, s: idle time has steps of 10 ms, and a percentile takes answers.
const SHORTEST: f64 = 0.5;

/// See the module's documentation.
pub struct Headroom {
    condition: Condition,
    place: Place,
    servers: Servers,
    ways: Vec<Way>,
    seconds: f64,
    /// Answers in a second without steering, where they have been counted.
    most: [Option<f64>; ASKED.len()],
}

impl Headroom {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let condition = effort.conditions(&[Napi::Interrupt], &[Gro::On])[0];
        let place = Place::Lab(Testbed::new(condition)?.into());
        let servers = Servers::new(condition)?;
        Ok(Self {
            ways: servers.ways(),
            servers,
            condition,
            place,
            seconds: effort.seconds.max(SHORTEST),
            most: Default::default(),
        })
    }

    fn name(&self, asked: Asked, share: u32) -> String {
        let asked = match asked {
            Asked::Rr => format!("TCP_RR, {CONNECTIONS} connections"),
            Asked::Server(case) => case.name(&self.servers.testbed),
        };
        format!("{asked}, at {share} %")
    }

    /// Measures at a pace, or at the highest rate.
    fn ask(&mut self, asked: Asked, way: Way, pace: Option<f64>) -> Result<Values> {
        match asked {
            Asked::Rr => {
                let case = ClosedLoop {
                    pace,
                    ..ClosedLoop::rr(true, CONNECTIONS)
                };
                case.measure(&self.place, way, self.seconds)
            }
            Asked::Server(case) => {
                // Only what the host answers counts here, not whether the client could ask more.
                let pace = pace.unwrap_or(1e9);
                let sample = self.servers.measure(case, way, self.seconds, Some(pace))?;
                Ok(sample.values())
            }
        }
    }

    /// Answers in a second without steering.
    fn most(&mut self, index: usize) -> Result<f64> {
        if let Some(most) = self.most[index] {
            return Ok(most);
        }
        let values = self.ask(ASKED[index], Way::by_default(Mode::None), None)?;
        let values = servers::as_answers(values, &self.plan().metrics);
        let rate = values.iter().find(|(name, _)| *name == "answers_per_s");
        let most = rate.map_or(0.0, |(_, rate)| *rate);
        self.most[index] = Some(most);
        Ok(most)
    }
}

impl Experiment for Headroom {
    fn plan(&self) -> Plan {
        use Better::{Higher, Lower, Neither};
        let cases = ASKED.iter().flat_map(|&asked| {
            SHARES.map(|share| CasePlan {
                case: self.name(asked, share),
                modes: self.ways.iter().map(Way::to_string).collect(),
            })
        });
        let mut metrics = IndexMap::from([
            headline("latency_us_p50", "Latency, median", "us", Lower),
            headline("latency_us_p99", "Latency, 99th percentile", "us", Lower),
            headline("latency_us_p999", "Latency, 99.9th percentile", "us", Lower),
            headline("demand_us", "Service demand", "us of CPU per answer", Lower),
            detail("answers_per_s", "Answers", "1/s", Higher),
            detail("cpu_percent", "CPU", "% of all CPUs", Neither),
        ]);
        metrics.extend(Active::metrics());
        Plan {
            scenario: "headroom",
            question: "How late are answers, and what do they cost, while the host has time to spare?",
            metrics,
            cases: cases.collect(),
            conditions: self.servers.conditions(&[self.condition]),
            notes: vec![
                "The rates are shares of the answers in a second without steering, which are counted first. \
                 dnsperf asks at a rate, wrk waits at random after each answer, the lab's own client asks at a \
                 rate over connections without a request under way. For TCP_RR it has a quarter of the CPUs, \
                 for nsd and nginx a half, if there are four or more."
                    .to_owned(),
                servers::NOTE.to_owned(),
            ],
            seconds_each: self.seconds + 0.8,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (index, share) = (case / SHARES.len(), SHARES[case % SHARES.len()]);
        let pace = self.most(index)? * f64::from(share) / 100.0;
        let values = self.ask(ASKED[index], self.ways[mode], Some(pace))?;
        Ok(servers::as_answers(values, &self.plan().metrics))
    }
}
