// SPDX-License-Identifier: MIT OR Apache-2.0
//! `neighbour`: requests to a host on whose CPUs other programs compute.
//!
//! A thread of a backlog competes with them for its CPU; a softirq does not.

use anyhow::Result;
use indexmap::IndexMap;

use super::closed_loop::ClosedLoop;
use super::servers::{self, Servers};
use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, detail, headline,
};
use crate::bench::programs::Service;
use crate::bench::report::document::Better;
use crate::bench::setup::mode::{Active, Way};
use crate::bench::setup::place::Place;
use crate::bench::setup::testbed::Testbed;
use crate::lab::hog::Hog;

/// The server that a case asks.
#[derive(Clone, Copy)]
enum Asked {
    /// A server of the lab's own, over that many connections.
    Rr(u32),
    Server(servers::Case),
}

/// In the order of a round.
const ASKED: [Asked; 4] = [
    Asked::Rr(1),
    Asked::Rr(100),
    Asked::Server(servers::of(Service::DnsUdp, 1)),
    Asked::Server(servers::of(Service::Http, 1)),
];

/// Nice values of the computing threads.
const NICE: [i32; 2] = [0, 19];

/// See the module's documentation.
pub struct Neighbour {
    conditions: Vec<Condition>,
    places: Vec<(Place, Servers)>,
    ways: Vec<Way>,
    seconds: f64,
}

impl Neighbour {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Interrupt], &[Gro::On]);
        let place = |condition: &Condition| {
            let lab = Testbed::new(*condition)?;
            Ok((Place::Lab(lab.into()), Servers::new(*condition)?))
        };
        let places = conditions.iter().map(place).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            ways: places[0].1.ways(),
            conditions,
            places,
            seconds: effort.seconds,
        })
    }

    fn name(&self, asked: Asked, nice: i32) -> String {
        let asked = match asked {
            Asked::Rr(1) => "TCP_RR, 1 connection".to_owned(),
            Asked::Rr(connections) => format!("TCP_RR, {connections} connections"),
            Asked::Server(case) => case.name(&self.places[0].1.testbed),
        };
        format!("{asked}; nice {nice}")
    }
}

impl Experiment for Neighbour {
    fn plan(&self) -> Plan {
        use Better::{Higher, Lower};
        let cases = self.conditions.iter().flat_map(|condition| {
            ASKED.iter().flat_map(move |&asked| {
                NICE.map(|nice| CasePlan {
                    case: condition.case(&self.name(asked, nice), &self.conditions),
                    modes: self.ways.iter().map(Way::to_string).collect(),
                })
            })
        });
        let mut metrics = IndexMap::from([
            headline("answers_per_s", "Answers", "1/s", Higher),
            headline("latency_us_p99", "Latency, 99th percentile", "us", Lower),
            detail("latency_us_p50", "Latency, median", "us", Lower),
        ]);
        metrics.extend(Active::metrics());
        Plan {
            scenario: "neighbour",
            question: "How many requests are answered, and how late, while a thread computes on each CPU?",
            metrics,
            cases: cases.collect(),
            conditions: self.places[0].1.conditions(&self.conditions),
            notes: vec![
                "The computing threads are bound to the host's CPUs, one to each, with the nice value of the \
                 case. For TCP_RR the client has a quarter of the CPUs, for nsd and nginx a half, if there are \
                 four or more."
                    .to_owned(),
                servers::NOTE.to_owned(),
            ],
            seconds_each: self.seconds + 0.8,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (kind, nice) = (case / NICE.len(), NICE[case % NICE.len()]);
        let (place, servers) = &mut self.places[kind / ASKED.len()];
        let (asked, way) = (ASKED[kind % ASKED.len()], self.ways[mode]);
        let masks = match asked {
            Asked::Rr(_) => place.masks(),
            Asked::Server(_) => servers.testbed.masks(),
        };
        let hogs = masks.all.iter().map(|cpu| Hog::nice(cpu, nice));
        let _hogs = hogs.collect::<Result<Vec<_>>>()?;
        let values = match asked {
            Asked::Rr(connections) => {
                let case = ClosedLoop::rr(true, connections);
                case.measure(place, way, self.seconds)?
            }
            Asked::Server(case) => servers.measure(case, way, self.seconds, None)?.values(),
        };
        Ok(servers::as_answers(values, &self.plan().metrics))
    }
}
