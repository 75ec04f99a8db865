// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rr`: netperf's TCP_RR and UDP_RR, one byte to and fro, alone and 500 at once.

use anyhow::Result;

use super::bed::Bed;
use super::closed_loop::ClosedLoop;
use super::mode::{Mode, Way};
use super::{CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values};

/// Connections of a case; a thread each, as each netserver is a process.
const CONNECTIONS: [u32; 2] = [1, 500];

/// The scenario.
pub struct Rr {
    conditions: Vec<Condition>,
    beds: Vec<Bed>,
    ways: Vec<Way>,
    cases: Vec<(usize, ClosedLoop)>,
    seconds: f64,
}

impl Rr {
    /// Makes the lab.
    ///
    /// # Errors
    /// When the host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Interrupt], &[Gro::On]);
        let beds = Bed::under(&conditions)?;
        let modes = [Mode::None, Mode::KernelRps, Mode::KernelRfs, Mode::Rxsteer];
        let case = |tcp, connections| ClosedLoop {
            tcp,
            len: 1,
            connections,
            threads: connections,
            work: None,
            busy_poll: false,
        };
        let cases = (0..beds.len()).flat_map(|bed| {
            CONNECTIONS
                .map(|n| [true, false].map(|tcp| (bed, case(tcp, n))))
                .into_iter()
                .flatten()
        });
        Ok(Self {
            ways: beds[0].masks().ways(&modes),
            cases: cases.collect(),
            conditions,
            beds,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for Rr {
    fn plan(&self) -> Plan {
        let cases = self.cases.iter().map(|(bed, case)| {
            let proto = if case.tcp { "TCP_RR" } else { "UDP_RR" };
            let plural = if case.connections > 1 { "s" } else { "" };
            let name = format!("{proto}, {} connection{plural}", case.connections);
            CasePlan {
                case: self.conditions[*bed].case(&name, &self.conditions),
                modes: self.ways.iter().map(Way::to_string).collect(),
            }
        });
        Plan {
            scenario: "rr",
            question: "How many one-byte transactions per second, how long does one take, and what \
                       does it cost?",
            metrics: ClosedLoop::metrics(),
            cases: cases.collect(),
            conditions: self.beds[0].conditions(&self.conditions),
            notes: vec![
                "A server has a thread for each connection; a single one is bound to the first CPU \
                 that does not poll the queue. The client is an XDP program at the other end: what it \
                 costs, some hundred ns for each transaction, is part of the service demand in all \
                 modes."
                    .to_owned(),
            ],
            seconds_each: self.seconds + 0.6,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (bed, case) = &self.cases[case];
        case.measure(&self.beds[*bed], self.ways[mode], self.seconds)
    }
}
