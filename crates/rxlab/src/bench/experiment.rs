// SPDX-License-Identifier: MIT OR Apache-2.0
//! Interface of a scenario: its plan, and the measurement of one mode.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use indexmap::IndexMap;

use super::report::document::{Better, Metric};

/// Rounds, length and conditions of the measurements.
#[derive(Clone, Debug)]
pub struct Effort {
    /// Each round measures every mode once.
    pub rounds: u32,
    /// Length of one measurement.
    pub seconds: f64,
    /// Ways to poll the queue; empty: the scenario's own.
    pub napi: Vec<Napi>,
    /// GRO at the device under test; empty: the scenario's own.
    pub gro: Vec<Gro>,
    /// The device under test, in the lab.
    pub device: DeviceKind,
    /// Measure on a device of the host instead of the lab.
    pub on: Option<On>,
    /// Selects cases and modes.
    pub only: Only,
}

/// A selection of cases and modes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Only {
    /// Cases with one of these in their names; empty: all.
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

/// A device of the host, and the peer that generates its load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct On {
    pub device: String,
    /// Address of `rxlab bench serve`.
    pub peer: SocketAddr,
}

/// What the lab steers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// A veth that stands for a NIC: it has NAPI, and checksums are filled in
    #[default]
    Nic,
    /// A veth as it comes, without NAPI: behind a bridge where frames are generated, else receiving
    /// where the peer sends
    Plain,
    /// The inner end of a VXLAN tunnel over a NIC
    Vxlan,
    /// A tun device, written by one thread
    Tun,
    /// The loopback device
    Lo,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nic => "a veth that stands for a NIC",
            Self::Plain => "a veth without NAPI",
            Self::Vxlan => "the inner end of a VXLAN tunnel",
            Self::Tun => "a tun device",
            Self::Lo => "the loopback device",
        })
    }
}

impl DeviceKind {
    /// Whether frames can be generated for it: the others take a peer's sockets.
    pub fn takes_frames(self) -> bool {
        matches!(self, Self::Nic | Self::Plain | Self::Vxlan)
    }
}

/// How the device's queue is polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Napi {
    /// In softirq, as after an interrupt; where generators have CPUs of their own, by a thread that
    /// runs before all others
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

/// Properties of the lab's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Condition {
    pub napi: Napi,
    pub gro: Gro,
    pub device: DeviceKind,
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
    /// Name of a case under this condition; names the condition if there are several.
    pub fn case(self, name: &str, conditions: &[Self]) -> String {
        match conditions {
            [_] => name.to_owned(),
            _ => format!("{name}; {self}"),
        }
    }
}

impl Effort {
    /// All combinations of the requested values; `napi` and `gro` are the scenario's defaults.
    pub fn conditions(&self, napi: &[Napi], gro: &[Gro]) -> Vec<Condition> {
        let or = |asked: &[Napi]| if asked.is_empty() { napi } else { asked }.to_vec();
        let or_gro = |asked: &[Gro]| if asked.is_empty() { gro } else { asked }.to_vec();
        let gro = or_gro(&self.gro);
        or(&self.napi)
            .into_iter()
            .flat_map(|napi| {
                gro.iter().map(move |&gro| Condition {
                    napi,
                    gro,
                    device: self.device,
                })
            })
            .collect()
    }
}

/// Plan of a scenario.
#[derive(Clone, Debug)]
pub struct Plan {
    pub scenario: &'static str,
    /// The question it answers, in a sentence.
    pub question: &'static str,
    /// Metrics by name, the most important first.
    pub metrics: IndexMap<String, Metric>,
    /// In the order of a round.
    pub cases: Vec<CasePlan>,
    /// Conditions that apply to all figures.
    pub conditions: IndexMap<String, String>,
    /// Remarks for the reader of the figures.
    pub notes: Vec<String>,
    /// Duration of a measurement including overhead, s.
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
    /// Measurements of one round: index and name of the case and of the mode.
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

    /// Number of measurements in all rounds.
    pub fn nr_measurements(&self, effort: &Effort) -> u64 {
        u64::from(effort.rounds) * self.round(&effort.only).count() as u64
    }

    /// Estimated duration of all measurements.
    pub fn duration(&self, effort: &Effort) -> Duration {
        Duration::from_secs_f64(self.seconds_each * self.nr_measurements(effort) as f64)
    }
}

/// A headline metric, with its name.
pub fn headline(name: &str, title: &str, unit: &str, better: Better) -> (String, Metric) {
    let metric = Metric {
        title: title.to_owned(),
        unit: unit.to_owned(),
        better,
        headline: true,
    };
    (name.to_owned(), metric)
}

/// A metric that explains the headlines, with its name.
pub fn detail(name: &str, title: &str, unit: &str, better: Better) -> (String, Metric) {
    let (name, metric) = headline(name, title, unit, better);
    let headline = false;
    (name, Metric { headline, ..metric })
}

/// The metric of packets that the kernel's own RPS drops.
pub fn flow_limit_drops(unit: &str) -> (String, Metric) {
    let title = "Dropped by the kernel's flow limit";
    detail("flow_limit_drops", title, unit, Better::Neither)
}

/// Figures of one measurement, by metric.
pub type Values = Vec<(&'static str, f64)>;

pub trait Experiment {
    fn plan(&self) -> Plan;

    /// Measures once; `case` and `mode` are indices into the plan.
    ///
    /// # Errors
    /// [`Unfit`] when this measurement did not measure what it claims; any other error ends the
    /// scenario.
    fn measure(&mut self, case: usize, mode: usize) -> Result<Values>;
}

/// A measurement that did not measure what it claims, and gives no figure.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unfit(pub String);

/// `ensure!` with [`Unfit`] as the error.
macro_rules! fit {
    ($condition:expr, $($why:tt)*) => {
        let fit: bool = $condition;
        if !fit {
            return Err($crate::bench::experiment::Unfit(format!($($why)*)).into());
        }
    };
}
pub(crate) use fit;
