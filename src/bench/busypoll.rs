// SPDX-License-Identifier: MIT OR Apache-2.0
//! `busypoll`: what one connection gains, and costs, when its reads poll the device's queue.

use anyhow::Result;

use super::closed_loop::{self, BUSY_POLL_US, ClosedLoop};
use super::mode::{Cpus, Mode, Way};
use super::place::Places;
use super::{CasePlan, Effort, Experiment, Gro, Napi, Plan, Values};

/// The modes: a way to steer, and whether the application polls.
const MODES: [(&str, Mode, bool); 6] = [
    ("none", Mode::None, false),
    ("kernel-busypoll", Mode::None, true),
    ("cpumap-busypoll", Mode::Cpumap, true),
    ("rxsteer", Mode::Rxsteer, false),
    ("rxsteer-rfs-busypoll", Mode::RxsteerRfs, true),
    ("rxsteer-busypoll", Mode::Rxsteer, true),
];

/// The scenario.
pub struct BusyPoll {
    places: Places,
    cases: Vec<(usize, bool)>,
    seconds: f64,
}

impl BusyPoll {
    /// Makes the lab, or meets the peer.
    ///
    /// # Errors
    /// When the host does not allow it, or has a single CPU; when the peer is not there.
    pub fn new(effort: &Effort) -> Result<Self> {
        let places = Places::of(effort, &[Napi::Interrupt], &[Gro::On, Gro::Off])?;
        Ok(Self {
            cases: places.each([true, false]),
            places,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for BusyPoll {
    fn plan(&self) -> Plan {
        let cases = self.cases.iter().map(|(place, tcp)| CasePlan {
            case: self
                .places
                .case(*place, if *tcp { "TCP_RR" } else { "UDP_RR" }),
            modes: MODES.map(|(name, ..)| name.to_owned()).to_vec(),
        });
        let mut conditions = self.places.conditions();
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
            notes: self.places.notes(&[
                closed_loop::NOTE,
                "Behind a redirect, as in the naive cpumap, polling finds nothing: rxsteer leaves the \
                 flows of who polls where they are received.",
            ]),
            seconds_each: self.seconds + 0.3,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (place, tcp) = self.cases[case];
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
        case.measure(self.places.get(place), Way { mode, cpus }, self.seconds)
    }
}
