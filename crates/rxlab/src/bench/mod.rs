// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxlab bench`: measured comparisons, modes interleaved, medians and per-round ratios.
//!
//! A scenario is an [`Experiment`]: it says what it would measure, and measures one mode at a time.
//! [`Measurement`] does the rest: the order, what becomes of a measurement that failed. A round goes
//! through all scenarios before the next one begins: what changes slowly on a machine then shows in the
//! spread of the rounds, and not as a difference between two runs.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use indexmap::IndexMap;

pub mod bed;
pub mod busypoll;
pub mod closed_loop;
pub mod columns;
pub mod compare;
pub mod crr;
pub mod decide;
pub mod fairness;
pub mod files;
pub mod flood;
pub mod follow;
pub mod forward;
pub mod host;
pub mod latency;
pub mod load;
pub mod lossfree;
pub mod mode;
pub mod pace;
pub mod page;
pub mod pair;
pub mod peer;
pub mod place;
pub mod plot;
pub mod published;
pub mod ramp;
pub mod record;
pub mod reorder;
pub mod report;
pub mod router;
pub mod rpc;
pub mod rr;
pub mod stream;
pub mod throughput;
pub mod traffic;
pub mod wakeup;
pub mod watch;

use forward::Forward;
use pace::Pace;
pub use report::{Better, Document, Metric, Refusal, Report, Rounds};
use router::Ruleset;
use watch::{STEAL, Steal};

/// What `rxlab bench` can measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// Time of one decision, against a program that only passes
    Decide,
    /// What it costs an application that rxsteer notes where it runs
    Record,
    /// How long a flow takes to arrive where its application has gone
    Follow,
    /// More UDP packets than the host can use
    Flood,
    /// From the first packet of a flood until the application gets what it gets in the end
    Ramp,
    /// What a packet costs while the host has time to sleep in between
    Wakeup,
    /// One flooding flow among a thousand modest ones
    Fairness,
    /// One byte to and fro, over one connection and over 500
    Rr,
    /// A connection for each byte to and fro, 100 at once
    Crr,
    /// Requests that make the server work
    Rpc,
    /// One TCP connection in bulk, to a consumer that polls and to one that sleeps
    Stream,
    /// One connection whose reads poll the device's queue
    Busypoll,
    /// The highest rate without loss, what is left of it at twice that rate and at the most that can
    /// be offered, and the receiving CPU's cost per packet
    Lossfree,
    /// The same of a router with a firewall that tracks connections
    Forward,
    /// The same of a router whose firewall has 150 rules before the one that matches
    Firewall,
    /// Packets that overtake an earlier one of their flow while masks, applications, interrupts and
    /// CPUs change, against the same without the rule of order
    Reorder,
}

impl Scenario {
    /// Whether a peer host can put its load on: what needs a generator inside the kernel is for the
    /// lab alone.
    pub fn takes_peer(self) -> bool {
        match self {
            Self::Rr | Self::Rpc | Self::Stream => true,
            Self::Decide | Self::Record | Self::Follow => false,
            Self::Flood | Self::Fairness | Self::Lossfree | Self::Forward => false,
            Self::Crr | Self::Firewall | Self::Busypoll | Self::Reorder => false,
            Self::Ramp | Self::Wakeup => false,
        }
    }

    /// Makes what it needs.
    ///
    /// # Errors
    /// When the host does not allow it. What this host lacks for this scenario alone is no error: it
    /// then has nothing to measure, and says why.
    pub fn prepare(self, effort: &Effort) -> Result<Box<dyn Experiment>> {
        if effort.on.is_some() {
            let name = |scenario: &Self| {
                scenario
                    .to_possible_value()
                    .map(|v| v.get_name().to_owned())
            };
            let able = Self::value_variants().iter().filter(|s| s.takes_peer());
            ensure!(
                self.takes_peer(),
                "{} runs in the lab alone; on a device: {}",
                name(&self).unwrap_or_default(),
                able.filter_map(name).collect::<Vec<_>>().join(", ")
            );
        }
        Ok(match self {
            Self::Decide => Box::new(decide::Decide::new(effort)?),
            Self::Record => Box::new(record::Record::new(effort)?),
            Self::Follow => Box::new(follow::Follow::new(effort)?),
            Self::Flood => Box::new(flood::Flood::new(effort)?),
            Self::Ramp => Box::new(ramp::Ramp::new(effort)?),
            Self::Wakeup => Box::new(wakeup::Wakeup::new(effort)?),
            Self::Fairness => Box::new(fairness::Fairness::new(effort)?),
            Self::Rr => Box::new(rr::Rr::new(effort)?),
            Self::Crr => Box::new(crr::Crr::new(effort)?),
            Self::Rpc => Box::new(rpc::Rpc::new(effort)?),
            Self::Stream => Box::new(stream::TcpStream::new(effort)?),
            Self::Busypoll => Box::new(busypoll::BusyPoll::new(effort)?),
            Self::Lossfree => Box::new(lossfree::Lossfree::new(effort)?),
            Self::Forward => possible("forward", Forward::new(effort, Ruleset::Stateful))?,
            Self::Firewall => possible("firewall", Forward::new(effort, Ruleset::Blocklist))?,
            Self::Reorder => Box::new(reorder::Reorder::new(effort)),
        })
    }
}

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
    fn case(&self, name: &str) -> bool {
        self.cases.is_empty() || self.cases.iter().any(|part| name.contains(part))
    }

    fn mode(&self, name: &str) -> bool {
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
    fn case(self, name: &str, conditions: &[Self]) -> String {
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
    fn round(&self, only: &Only) -> impl Iterator<Item = ((usize, &str), (usize, &str))> {
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

/// A scenario that this host lacks something for: nothing to measure, and the reason.
struct Impossible {
    scenario: &'static str,
    why: String,
}

impl Experiment for Impossible {
    fn plan(&self) -> Plan {
        Plan {
            scenario: self.scenario,
            question: "Not measured on this host.",
            metrics: IndexMap::new(),
            cases: Vec::new(),
            conditions: IndexMap::new(),
            notes: vec![self.why.clone()],
            seconds_each: 0.0,
        }
    }

    fn measure(&mut self, _: usize, _: usize) -> Result<Values> {
        Err(Unfit(self.why.clone()).into())
    }
}

/// The scenario, or if it is [`Unfit`] for this host, one that says so.
fn possible<E: Experiment + 'static>(
    scenario: &'static str,
    made: Result<E>,
) -> Result<Box<dyn Experiment>> {
    match made {
        Ok(experiment) => Ok(Box::new(experiment)),
        Err(error) if error.is::<Unfit>() => Ok(Box::new(Impossible {
            scenario,
            why: format!("{error:#}"),
        })),
        Err(error) => Err(error),
    }
}

/// `ensure!` for what makes a measurement [`Unfit`].
macro_rules! fit {
    ($condition:expr, $($why:tt)*) => {
        let fit: bool = $condition;
        if !fit {
            return Err($crate::bench::Unfit(format!($($why)*)).into());
        }
    };
}
pub(crate) use fit;

/// A scenario under way.
pub struct Measurement {
    experiment: Box<dyn Experiment>,
    plan: Plan,
    /// How many are complete.
    nr_rounds: u32,
    rounds: Rounds,
    refused: Vec<Refusal>,
}

impl Measurement {
    /// Nothing is measured yet.
    pub fn new(experiment: Box<dyn Experiment>, effort: &Effort) -> Self {
        let plan = experiment.plan();
        let mut rounds = Rounds::default();
        for ((_, case), (_, mode)) in plan.round(&effort.only) {
            rounds.expect(case, mode);
        }
        Self {
            experiment,
            plan,
            nr_rounds: 0,
            rounds,
            refused: Vec::new(),
        }
    }

    /// What is going to be done.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Measures every mode of every case once. `progress` is told before each what it is. With a
    /// `pace`, what was measured while CPUs were not equally fast is refused.
    ///
    /// # Errors
    /// When the experiment failed for another reason than that a measurement was unfit.
    pub fn round(
        &mut self,
        effort: &Effort,
        pace: Option<&Pace>,
        progress: &dyn Fn(&str),
    ) -> Result<()> {
        for ((c, case), (m, mode)) in self.plan.round(&effort.only) {
            let what = format!("{}: {case}, {mode}", self.plan.scenario);
            progress(&what);
            let mut steal = Steal::begin()?;
            let mut measure = || {
                pace.map_or(Ok(()), Pace::begin)?;
                let values = self.experiment.measure(c, m)?;
                pace.map_or(Ok(()), Pace::end)?;
                Ok(values)
            };
            let measured = undisturbed(&mut measure, || steal.share());
            match measured {
                Ok(values) => {
                    for (metric, value) in values {
                        self.rounds.add(self.nr_rounds, case, mode, metric, value);
                    }
                }
                Err(e) if e.is::<Unfit>() => self.refused.push(Refusal {
                    case: case.to_owned(),
                    mode: mode.to_owned(),
                    round: self.nr_rounds + 1,
                    why: format!("{e:#}"),
                }),
                Err(error) => return Err(error).context(what),
            }
        }
        self.nr_rounds += 1;
        Ok(())
    }

    /// What the complete rounds found, if there are any.
    pub fn report(&self, effort: &Effort) -> Option<Report> {
        let plan = self.plan.clone();
        let mut cases = self.rounds.cases(self.nr_rounds);
        for case in &mut cases {
            // What is neither good nor bad explains; to compare it would only confuse.
            let compared =
                |name: &str| plan.metrics.get(name).map(|m| m.better) != Some(Better::Neither);
            case.ratios.retain(|metric, _| compared(metric));
        }
        (self.nr_rounds > 0).then(|| Report {
            scenario: plan.scenario.to_owned(),
            question: plan.question.to_owned(),
            rounds: self.nr_rounds,
            seconds: effort.seconds,
            conditions: plan.conditions,
            metrics: plan.metrics,
            cases,
            refused: self.refused.clone(),
            notes: plan.notes,
        })
    }
}

/// How often something is measured in a round, while the host is disturbed.
const TRIES: u32 = 3;

/// Measures; again, up to [`TRIES`] times in all, when the hypervisor took too much for others: that
/// says nothing of a mode. `steal` tells the share since it was last asked.
fn undisturbed(
    mut measure: impl FnMut() -> Result<Values>,
    mut steal: impl FnMut() -> Result<f64>,
) -> Result<Values> {
    let mut more = 1..TRIES;
    loop {
        steal()?;
        let measured = measure();
        let share = steal()?;
        if share < STEAL || measured.as_ref().is_err_and(|e| !e.is::<Unfit>()) {
            return measured;
        }
        if more.next().is_none() {
            let percent = 100.0 * share;
            let why = format!("the hypervisor took {percent:.0} % of the CPUs' time for others");
            return Err(Unfit(why).into());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use anyhow::anyhow;

    use super::*;

    /// What comes of a measurement on a host that is disturbed so often, and how often it was made.
    fn measured(nr_disturbed: u32, error: fn() -> Result<()>) -> (Result<Values>, u32) {
        let (nr, nr_asked) = (Cell::new(0), Cell::new(0));
        let measure = || {
            nr.set(nr.get() + 1);
            error()?;
            Ok(vec![("one", 1.0)])
        };
        let steal = || {
            nr_asked.set(nr_asked.get() + 1);
            let before = nr_asked.get() % 2 == 1;
            Ok(if before || nr.get() <= nr_disturbed {
                0.5
            } else {
                0.01
            })
        };
        (undisturbed(measure, steal), nr.get())
    }

    #[test]
    fn only_who_was_disturbed_is_measured_again_and_not_for_ever() {
        let unfit = || Err(Unfit("nothing was measured".to_owned()).into());
        for (nr_disturbed, tries) in [(0, 1), (2, 3)] {
            let (values, nr) = measured(nr_disturbed, || Ok(()));
            assert_eq!((values.unwrap(), nr), (vec![("one", 1.0)], tries));
            let (values, nr) = measured(nr_disturbed, unfit);
            assert_eq!(values.unwrap_err().to_string(), "nothing was measured");
            assert_eq!(nr, tries);
        }
        let (values, nr) = measured(99, || Ok(()));
        let why = values.unwrap_err();
        assert!(
            why.is::<Unfit>() && why.to_string().contains("50 %"),
            "{why}"
        );
        assert_eq!(nr, TRIES);
        let (values, nr) = measured(99, || Err(anyhow!("the lab is gone")));
        assert!(!values.unwrap_err().is::<Unfit>());
        assert_eq!(nr, 1);
    }
}
