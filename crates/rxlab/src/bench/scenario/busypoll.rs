// SPDX-License-Identifier: MIT OR Apache-2.0
//! `busypoll`: gain and cost of busy-polling reads, for one connection.

use anyhow::Result;

use crate::bench::experiment::{CasePlan, Effort, Experiment, Gro, Napi, Plan, Values};
use crate::bench::scenario::closed_loop::{self, BUSY_POLL_US, ClosedLoop, Others};
use crate::bench::setup::mode::{Cpus, Mode, Way};
use crate::bench::setup::place::Places;

/// Mode's name, way to steer, and whether the application polls.
const MODES: [(&str, Mode, bool); 6] = [
    ("none", Mode::None, false),
    ("kernel-busypoll", Mode::None, true),
    ("cpumap-busypoll", Mode::Cpumap, true),
    ("rxsteer", Mode::Rxsteer, false),
    ("rxsteer-rfs-busypoll", Mode::RxsteerRfs, true),
    ("rxsteer-busypoll", Mode::Rxsteer, true),
];

/// More packets than this make a machine with two CPUs lose requests, where generator, client and
/// interrupt share a CPU.
const OTHERS: Others = Others {
    flows: 100,
    pps: 150_000,
};

/// Case's name, TCP or UDP, and flows beside the connection.
const CASES: [(&str, bool, Option<Others>); 3] = [
    ("TCP_RR", true, None),
    ("UDP_RR", false, None),
    (
        "UDP_RR beside 100 flows, 150000 packets/s",
        false,
        Some(OTHERS),
    ),
];

pub struct BusyPoll {
    places: Places,
    /// Index of the place, and of the case in [`CASES`].
    cases: Vec<(usize, usize)>,
    seconds: f64,
}

impl BusyPoll {
    /// Prepares the lab, or connects to the peer.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU; the peer is absent.
    pub fn new(effort: &Effort) -> Result<Self> {
        let places = Places::of(effort, &[Napi::Interrupt], &[Gro::On, Gro::Off])?;
        Ok(Self {
            // Other flows are generated in the lab only.
            cases: places
                .each((0..CASES.len()).filter(|&c| effort.on.is_none() || CASES[c].2.is_none())),
            places,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for BusyPoll {
    fn plan(&self) -> Plan {
        let cases = self.cases.iter().map(|(place, case)| CasePlan {
            case: self.places.case(*place, CASES[*case].0),
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
                 flows of an application that polls where they are received.",
            ]),
            seconds_each: self.seconds + 0.3,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (place, case) = self.cases[case];
        let (_, tcp, others) = CASES[case];
        let (_, mode, busy_poll) = MODES[mode];
        // The cpumap must move packets to the application's CPU, as the other modes do.
        let cpus = match mode {
            Mode::Cpumap => Cpus::Others,
            _ => Cpus::Default,
        };
        let case = ClosedLoop {
            busy_poll,
            others,
            ..ClosedLoop::rr(tcp, 1)
        };
        case.measure(self.places.get(place), Way { mode, cpus }, self.seconds)
    }
}
