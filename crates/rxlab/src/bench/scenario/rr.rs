// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rr`: netperf's TCP_RR and UDP_RR, one byte in each direction, over 1 and 500 connections.

use anyhow::Result;

use crate::bench::experiment::{CasePlan, Effort, Experiment, Gro, Napi, Plan, Values};
use crate::bench::scenario::closed_loop::{self, ClosedLoop, MODES};
use crate::bench::setup::mode::{Mode, Way};
use crate::bench::setup::place::Places;

/// Connections of a case, each with a thread, as netserver has a process for each.
const CONNECTIONS: [u32; 2] = [1, 500];

/// The cases with these numbers of connections, for each place.
pub(super) fn cases(places: &Places, connections: [u32; 2]) -> Vec<(usize, ClosedLoop)> {
    let cases = connections
        .map(|n| closed_loop::connections(n, places.masks()))
        .map(|n| [ClosedLoop::rr(true, n), ClosedLoop::rr(false, n)]);
    places.each(cases.into_iter().flatten())
}

/// The name of a case.
pub(super) fn name(case: &ClosedLoop) -> String {
    let proto = if case.tcp { "TCP_RR" } else { "UDP_RR" };
    let plural = if case.connections > 1 { "s" } else { "" };
    format!("{proto}, {} connection{plural}", case.connections)
}

pub struct Rr {
    places: Places,
    ways: Vec<Way>,
    cases: Vec<(usize, ClosedLoop)>,
    seconds: f64,
}

impl Rr {
    /// Prepares the lab, or connects to the peer.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU; the peer is absent.
    pub fn new(effort: &Effort) -> Result<Self> {
        let places = Places::of(effort, &[Napi::Interrupt], &[Gro::On])?;
        Ok(Self {
            ways: places.masks().ways(&Mode::on(effort.device, &MODES)),
            cases: cases(&places, CONNECTIONS),
            places,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for Rr {
    fn plan(&self) -> Plan {
        let cases = self.cases.iter().map(|(place, case)| CasePlan {
            case: self.places.case(*place, &name(case)),
            modes: self.ways.iter().map(Way::to_string).collect(),
        });
        Plan {
            scenario: "rr",
            question: "How many one-byte transactions per second, how long does one take, and what \
                       does it cost?",
            metrics: ClosedLoop::metrics(),
            cases: cases.collect(),
            conditions: self.places.conditions(),
            notes: self.places.notes(&[closed_loop::NOTE]),
            seconds_each: self.seconds + 0.8,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (place, case) = &self.cases[case];
        case.measure(self.places.get(*place), self.ways[mode], self.seconds)
    }
}
