// SPDX-License-Identifier: MIT OR Apache-2.0
//! A scenario under way: the order, what is measured again, and what becomes of a measurement that failed.

use anyhow::{Context, Result};

use super::experiment::{Effort, Experiment, Plan, Unfit, Values};
use super::report::document::{Better, Refusal, Report, Rounds};
use super::setup::pace::Pace;
use super::setup::watch::{STEAL, Steal};

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
