// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rpc`: requests that make the server work on memory beyond a CPU's own caches.

use std::fs;

use anyhow::Result;

use crate::bench::experiment::{CasePlan, Effort, Experiment, Gro, Napi, Plan, Values};
use crate::bench::scenario::closed_loop::{self, ClosedLoop, MODES};
use crate::bench::setup::mode::{Mode, Way};
use crate::bench::setup::place::Places;
use crate::lab::server::Work;

/// Connections, and threads of the server.
const CASES: [(u32, u32); 2] = [(100, 100), (500, 8)];

/// Longest work per request, us; the mean is half of it.
const WORK_US: f64 = 50.0;

/// Memory of the work, in multiples of the L2 cache.
const TIMES_L2: usize = 4;

/// Size of requests and replies, bytes.
const LEN: usize = 64;

pub struct Rpc {
    places: Places,
    ways: Vec<Way>,
    cases: Vec<(usize, ClosedLoop)>,
    work: Work,
    seconds: f64,
}

impl Rpc {
    /// Prepares the lab, and calibrates the work.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let places = Places::of(effort, &[Napi::Interrupt], &[Gro::On])?;
        let work = Work::up_to(WORK_US, TIMES_L2 * l2_bytes());
        let case = |(connections, threads)| ClosedLoop {
            len: LEN,
            threads,
            work: Some(work.clone()),
            ..ClosedLoop::rr(true, closed_loop::connections(connections, places.masks()))
        };
        Ok(Self {
            ways: places.masks().ways(&Mode::on(effort.device, &MODES)),
            cases: places.each(CASES.map(case)),
            places,
            work,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for Rpc {
    fn plan(&self) -> Plan {
        let cases = self.cases.iter().map(|(place, case)| {
            let name = format!("{} flows, {} threads", case.connections, case.threads);
            CasePlan {
                case: self.places.case(*place, &name),
                modes: self.ways.iter().map(Way::to_string).collect(),
            }
        });
        let mut conditions = self.places.conditions();
        let work = format!(
            "0 to {} us for each request, evenly spread: random reads in {} MiB",
            self.work.us,
            self.work.bytes() >> 20
        );
        conditions.insert("work".to_owned(), work);
        Plan {
            scenario: "rpc",
            question: "How many requests does a working server answer, and how long do they wait?",
            metrics: ClosedLoop::metrics(),
            cases: cases.collect(),
            conditions,
            notes: self.places.notes(&[
                closed_loop::NOTE,
                "The number of reads is fixed before the first measurement: where caches are colder, \
                 the same work takes longer.",
            ]),
            seconds_each: self.seconds + 0.35,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (place, case) = &self.cases[case];
        case.measure(self.places.get(*place), self.ways[mode], self.seconds)
    }
}

/// L2 cache of CPU 0, bytes; 1 MiB if unknown.
fn l2_bytes() -> usize {
    let size = fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size");
    let kib = size
        .ok()
        .and_then(|s| s.trim().strip_suffix('K')?.parse::<usize>().ok());
    kib.unwrap_or(1024) << 10
}
