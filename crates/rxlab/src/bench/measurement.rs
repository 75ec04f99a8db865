// SPDX-License-Identifier: MIT OR Apache-2.0
//! Progress of a scenario: order, repeated and refused measurements.

use anyhow::{Context, Result};

use super::experiment::{Effort, Experiment, Plan, Unfit, Values};
use super::report::document::{Better, Refusal, Report, Rounds};
use super::setup::pace::Pace;
use super::setup::watch::{STEAL, Steal};

/// A scenario and its figures so far.
pub struct Measurement {
    experiment: Box<dyn Experiment>,
    plan: Plan,
    /// Number of complete rounds.
    nr_rounds: u32,
    rounds: Rounds,
    refused: Vec<Refusal>,
}

impl Measurement {
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

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Measures every mode of every case once. `progress` is called with the name before each
    /// measurement. With a `pace`, measurements during which the CPUs were not equally fast are
    /// refused.
    ///
    /// # Errors
    /// When the experiment failed other than by an unfit measurement.
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

    /// Report of the complete rounds; None before the first.
    pub fn report(&self, effort: &Effort) -> Option<Report> {
        let plan = self.plan.clone();
        let mut cases = self.rounds.cases(self.nr_rounds);
        for case in &mut cases {
            // Metrics without a good direction only explain the others and are not compared.
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

/// Attempts per measurement if the host is disturbed.
const TRIES: u32 = 3;

/// Measures, up to [`TRIES`] times if the hypervisor took more than [`STEAL`] of the CPU time,
/// which says nothing about a mode. `steal` returns the share since its last call.
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

    /// Result and number of attempts on a host that is disturbed `nr_disturbed` times.
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
    fn disturbed_measurements_are_repeated_up_to_a_limit() {
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
