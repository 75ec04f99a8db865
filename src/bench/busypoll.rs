// SPDX-License-Identifier: MIT OR Apache-2.0
//! `busypoll`: what one connection gains, and costs, when its reads poll the device's queue.

use anyhow::Result;

use super::bed::Bed;
use super::closed_loop::{BUSY_POLL_US, ClosedLoop};
use super::mode::{Cpus, Mode, Way};
use super::{CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values};

/// The modes: a way to steer, and whether the application polls.
const MODES: [(&str, Mode, bool); 4] = [
    ("none", Mode::None, false),
    ("kernel-busypoll", Mode::None, true),
    ("cpumap-busypoll", Mode::Cpumap, true),
    ("rxsteer", Mode::Rxsteer, false),
];

/// The scenario.
pub struct BusyPoll {
    conditions: Vec<Condition>,
    beds: Vec<Bed>,
    cases: Vec<(usize, bool)>,
    seconds: f64,
}

impl BusyPoll {
    /// Makes the lab.
    ///
    /// # Errors
    /// When the host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Interrupt], &[Gro::On, Gro::Off]);
        let beds = Bed::under(&conditions)?;
        let cases = (0..beds.len()).flat_map(|bed| [(bed, true), (bed, false)]);
        Ok(Self {
            cases: cases.collect(),
            conditions,
            beds,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for BusyPoll {
    fn plan(&self) -> Plan {
        let cases = self.cases.iter().map(|(bed, tcp)| CasePlan {
            case: self.conditions[*bed]
                .case(if *tcp { "TCP_RR" } else { "UDP_RR" }, &self.conditions),
            modes: MODES.map(|(name, ..)| name.to_owned()).to_vec(),
        });
        let mut conditions = self.beds[0].conditions(&self.conditions);
        conditions.insert(
            "poll".to_owned(),
            format!("{BUSY_POLL_US} us for each read at most"),
        );
        Plan {
            scenario: "busypoll",
            question: "What does one connection gain, and cost, when its reads poll the queue?",
            metrics: ClosedLoop::metrics(),
            cases: cases.collect(),
            conditions,
            notes: vec![
                "rxsteer does not work together with busy polling yet, so that mode is missing: \
                 behind a redirect, as in the naive cpumap, polling finds nothing."
                    .to_owned(),
            ],
            seconds_each: self.seconds + 0.5,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (bed, tcp) = self.cases[case];
        let (_, mode, busy_poll) = MODES[mode];
        // To the application's CPU, where the others take the packet too.
        let cpus = match mode {
            Mode::Cpumap => Cpus::Others,
            _ => Cpus::Default,
        };
        let case = ClosedLoop {
            tcp,
            len: 1,
            connections: 1,
            threads: 1,
            work: None,
            busy_poll,
        };
        case.measure(&self.beds[bed], Way { mode, cpus }, self.seconds)
    }
}
