// SPDX-License-Identifier: MIT OR Apache-2.0
//! `nat`: the transactions of `rr`, with the server in a container and the client at a published port.

use anyhow::Result;

use crate::bench::experiment::{CasePlan, Effort, Experiment, Gro, Napi, Plan, Values};
use crate::bench::report::document::SUBJECT;
use crate::bench::scenario::closed_loop::{self, ClosedLoop};
use crate::bench::scenario::rr;
use crate::bench::setup::mode::{Mode, Way};
use crate::bench::setup::place::Places;

/// Connections of a case, each with a thread.
const CONNECTIONS: [u32; 2] = [1, 100];

const MODES: [Mode; 7] = [
    Mode::None,
    Mode::KernelRps,
    Mode::KernelRfs,
    Mode::RxsteerRfs,
    Mode::RxsteerRfsNat,
    Mode::RxsteerNat,
    Mode::RxsteerSoftirqRfsNat,
];

pub struct Nat {
    places: Places,
    ways: Vec<Way>,
    cases: Vec<(usize, ClosedLoop)>,
    seconds: f64,
}

impl Nat {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU; [`Unfit`](crate::bench::experiment::Unfit)
    /// when it has no `nft`, or no NAT.
    pub fn new(effort: &Effort) -> Result<Self> {
        let places = Places::behind_nat(effort, &[Napi::Interrupt], &[Gro::On])?;
        Ok(Self {
            ways: places.masks().ways(&MODES),
            cases: rr::cases(&places, CONNECTIONS),
            places,
            seconds: effort.seconds,
        })
    }
}

/// The mode to compare with kernel RFS is the one that follows as it does.
fn label(way: &Way) -> String {
    match way.mode {
        Mode::RxsteerRfsNat => SUBJECT.to_owned(),
        _ => way.to_string(),
    }
}

impl Experiment for Nat {
    fn plan(&self) -> Plan {
        let cases = self.cases.iter().map(|(place, case)| CasePlan {
            case: self.places.case(*place, &rr::name(case)),
            modes: self.ways.iter().map(label).collect(),
        });
        Plan {
            scenario: "nat",
            question: "How many one-byte transactions per second does a container behind NAT take, \
                       how long does one take, and what does it cost?",
            metrics: ClosedLoop::metrics(),
            cases: cases.collect(),
            conditions: self.places.conditions(),
            notes: self.places.notes(&[
                closed_loop::NOTE,
                "The host publishes a port of a container by nftables (DNAT to another port) and \
                 passes the packets on by a veth without GRO. rxsteer runs under --policy rfs and \
                 --follow-nat, which the other modes with \"+nat\" have too; rxsteer-rfs is the same \
                 policy without it.",
            ]),
            seconds_each: self.seconds + 0.8,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (place, case) = &self.cases[case];
        case.measure(self.places.get(*place), self.ways[mode], self.seconds)
    }
}
