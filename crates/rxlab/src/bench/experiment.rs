// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a scenario is: what it would measure, and how it measures one mode.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use indexmap::IndexMap;

use super::report::document::{Better, Metric};

/// How often, how long, and under which conditions.
#[derive(Clone, Debug)]
pub struct Effort {
    /// Every mode runs once a round.
    pub rounds: u32,
    /// Of one measurement.
    pub seconds: f64,
    /// How the queue is polled; empty: as the scenario sees fit.
    pub napi: Vec<Napi>,
    /// GRO at the device under test; empty: as the scenario sees fit.
    pub gro: Vec<Gro>,
    /// On a device of the host, rather than in the lab.
    pub on: Option<On>,
    /// A part of it.
    pub only: Only,
}

/// Which of a scenario's measurements are made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Only {
    /// Cases whose names contain one of these; empty: all.
    pub cases: Vec<String>,
    /// Modes of these names; empty: all.
    pub modes: Vec<String>,
}

impl Only {
    pub(super) fn case(&self, name: &str) -> bool {
        self.cases.is_empty() || self.cases.iter().any(|part| name.contains(part))
    }

    pub(super) fn mode(&self, name: &str) -> bool {
        self.modes.is_empty() || self.modes.iter().any(|mode| mode == name)
    }
}

/// A device of the host, and who puts the load on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct On {
    /// Its name.
    pub device: String,
    /// Where `rxlab bench serve` listens.
    pub peer: SocketAddr,
}

/// How the device's queue is polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Napi {
    /// In softirq, as after an interrupt; where generators have CPUs of their own, by a thread that runs
    /// before all others
    Interrupt,
    /// By a thread bound to the interrupt's CPU (threaded NAPI)
    Thread,
}

/// GRO at the device under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum Gro {
    On,
    Off,
}

/// What the lab's device is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Condition {
    pub napi: Napi,
    pub gro: Gro,
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let napi = match self.napi {
            Napi::Interrupt => "interrupt",
            Napi::Thread => "threaded NAPI",
        };
        let gro = match self.gro {
            Gro::On => "GRO on",
            Gro::Off => "GRO off",
        };
        write!(f, "{napi}, {gro}")
    }
}

impl Condition {
    /// The name of a case under this one of several conditions.
    pub(super) fn case(self, name: &str, conditions: &[Self]) -> String {
        match conditions {
            [_] => name.to_owned(),
            _ => format!("{name}; {self}"),
        }
    }
}

impl Effort {
    /// Every combination that was asked for; of what was not, the scenario's own.
    pub fn conditions(&self, napi: &[Napi], gro: &[Gro]) -> Vec<Condition> {
        let or = |asked: &[Napi]| if asked.is_empty() { napi } else { asked }.to_vec();
        let or_gro = |asked: &[Gro]| if asked.is_empty() { gro } else { asked }.to_vec();
        let gro = or_gro(&self.gro);
        or(&self.napi)
            .into_iter()
            .flat_map(|napi| gro.iter().map(move |&gro| Condition { napi, gro }))
            .collect()
    }
}

/// What a scenario is going to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The scenario's name.
    pub scenario: &'static str,
    /// What it asks, in a sentence.
    pub question: &'static str,
    /// What it measures, the most important first.
    pub metrics: IndexMap<String, Metric>,
    /// In the order of a round.
    pub cases: Vec<CasePlan>,
    /// What shapes all figures.
    pub conditions: IndexMap<String, String>,
    /// What else should be known.
    pub notes: Vec<String>,
    /// Seconds that a measurement takes, all in all.
    pub seconds_each: f64,
}

/// A case, and its modes in the order of a round.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct CasePlan {
    pub case: String,
    pub modes: Vec<String>,
}

impl Plan {
    /// One round's measurements: the numbers and names of case and mode.
    pub(super) fn round(
        &self,
        only: &Only,
    ) -> impl Iterator<Item = ((usize, &str), (usize, &str))> {
        let cases = self.cases.iter().enumerate();
        cases
            .filter(|(_, case)| only.case(&case.case))
            .flat_map(|(c, CasePlan { case, modes })| {
                let modes = modes.iter().enumerate();
                modes.map(move |(m, mode)| ((c, case.as_str()), (m, mode.as_str())))
            })
            .filter(|(_, (_, mode))| only.mode(mode))
    }

    /// Measurements of all rounds.
    pub fn nr_measurements(&self, effort: &Effort) -> u64 {
        u64::from(effort.rounds) * self.round(&effort.only).count() as u64
    }

    /// How long they take.
    pub fn duration(&self, effort: &Effort) -> Duration {
        Duration::from_secs_f64(self.seconds_each * self.nr_measurements(effort) as f64)
    }
}

/// A metric, with its name: its title and unit, and which way it gets better.
pub fn headline(name: &str, title: &str, unit: &str, better: Better) -> (String, Metric) {
    let metric = Metric {
        title: title.to_owned(),
        unit: unit.to_owned(),
        better,
        headline: true,
    };
    (name.to_owned(), metric)
}

/// The same, of one that explains the headlines.
pub fn detail(name: &str, title: &str, unit: &str, better: Better) -> (String, Metric) {
    let (name, metric) = headline(name, title, unit, better);
    let headline = false;
    (name, Metric { headline, ..metric })
}

/// What one measurement found, by metric.
pub type Values = Vec<(&'static str, f64)>;

/// A scenario.
pub trait Experiment {
    /// What it is going to do.
    fn plan(&self) -> Plan;

    /// Measures once; both numbers are indices into the plan.
    ///
    /// # Errors
    /// [`Unfit`] when this measurement did not measure what it claims; any other error ends the
    /// scenario.
    fn measure(&mut self, case: usize, mode: usize) -> Result<Values>;
}

/// A measurement that did not measure what it claims: it gives no figure.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unfit(pub String);

/// `ensure!` for what makes a measurement [`Unfit`].
macro_rules! fit {
    ($condition:expr, $($why:tt)*) => {
        let fit: bool = $condition;
        if !fit {
            return Err($crate::bench::experiment::Unfit(format!($($why)*)).into());
        }
    };
}
pub(crate) use fit;
