// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a scenario measured, round by round, and the report made of it.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use crate::status::table;

/// The mode whose ratios to the others are reported.
pub const SUBJECT: &str = "rxsteer";

/// Values as they are measured: case, mode, metric, then one value a round. Cases keep the order in
/// which they came.
#[derive(Debug, Default)]
pub struct Rounds {
    cases: Vec<(String, Modes<Vec<f64>>)>,
}

/// By mode, by metric.
type Modes<T> = BTreeMap<String, BTreeMap<String, T>>;

/// The middle and the ends of the rounds, in the metric's unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// One case of a scenario.
#[derive(Debug, Serialize)]
pub struct Case {
    /// Its name.
    pub case: String,
    /// What each mode reached.
    pub modes: Modes<Spread>,
    /// By metric, by mode: rxsteer's value over that mode's, the median of the rounds' ratios.
    pub ratios: Modes<f64>,
}

/// The result of a scenario.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Its name.
    pub scenario: String,
    /// How often every mode ran.
    pub rounds: u32,
    /// In the order in which they were measured.
    pub cases: Vec<Case>,
}

impl Rounds {
    /// Adds what `mode` reached in the next round of `case`.
    pub fn add(&mut self, case: &str, mode: &str, metric: &str, value: f64) {
        let index = self
            .cases
            .iter()
            .position(|(name, _)| name == case)
            .unwrap_or_else(|| {
                self.cases.push((case.to_owned(), Modes::new()));
                self.cases.len() - 1
            });
        let metrics = self.cases[index].1.entry(mode.to_owned()).or_default();
        metrics.entry(metric.to_owned()).or_default().push(value);
    }

    /// The report of all rounds.
    pub fn report(&self, scenario: &str, rounds: u32) -> Report {
        let cases = self.cases.iter().map(|(case, modes)| Case {
            case: case.clone(),
            modes: map(modes, Spread::of),
            ratios: ratios(modes),
        });
        Report {
            scenario: scenario.to_owned(),
            rounds,
            cases: cases.collect(),
        }
    }
}

fn map<T>(modes: &Modes<Vec<f64>>, f: impl Fn(&[f64]) -> T) -> Modes<T> {
    let metrics = |m: &BTreeMap<String, Vec<f64>>| {
        m.iter()
            .map(|(metric, values)| (metric.clone(), f(values)))
            .collect()
    };
    modes
        .iter()
        .map(|(mode, m)| (mode.clone(), metrics(m)))
        .collect()
}

fn ratios(modes: &Modes<Vec<f64>>) -> Modes<f64> {
    let mut ratios = Modes::new();
    let Some(subject) = modes.get(SUBJECT) else {
        return ratios;
    };
    for (mode, metrics) in modes.iter().filter(|(mode, _)| *mode != SUBJECT) {
        for (metric, theirs) in metrics {
            let Some(ours) = subject.get(metric) else {
                continue;
            };
            // A round in which the other mode got nothing at all has no ratio.
            let per_round: Vec<f64> = ours
                .iter()
                .zip(theirs)
                .filter(|(_, theirs)| **theirs != 0.0)
                .map(|(ours, theirs)| ours / theirs)
                .collect();
            if !per_round.is_empty() {
                let of = ratios.entry(metric.clone()).or_default();
                of.insert(mode.clone(), Spread::of(&per_round).median);
            }
        }
    }
    ratios
}

impl Spread {
    /// Of at least one value.
    fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        Self {
            median: f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]),
            min: sorted[0],
            max: sorted[n - 1],
        }
    }
}

impl Report {
    /// The report for people; ends with a newline.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{}, medians of {} rounds (lowest … highest)",
            self.scenario, self.rounds
        );
        for case in &self.cases {
            let _ = writeln!(out, "\n{}", case.case);
            let metrics: std::collections::BTreeSet<_> =
                case.modes.values().flat_map(|m| m.keys()).collect();
            let mut header = vec!["mode".to_owned()];
            for metric in &metrics {
                header.push((*metric).clone());
                header.push(format!("{SUBJECT} is"));
            }
            let header: Vec<&str> = header.iter().map(String::as_str).collect();
            let mut table = table(&header);
            for (mode, values) in &case.modes {
                let mut row = vec![mode.clone()];
                for metric in &metrics {
                    row.push(values.get(*metric).map_or("-".to_owned(), |s| {
                        format!(
                            "{} ({} … {})",
                            number(s.median),
                            number(s.min),
                            number(s.max)
                        )
                    }));
                    let ratio = case.ratios.get(*metric).and_then(|r| r.get(mode));
                    row.push(ratio.map_or(String::new(), |r| format!("× {r:.2}")));
                }
                table.add_row(row);
            }
            let _ = writeln!(out, "{}", table.trim_fmt());
        }
        out
    }
}

/// Four significant digits or so: more would promise what a noisy machine can't keep.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians() {
        let mut rounds = Rounds::default();
        for (ours, theirs) in [(10.0, 1.0), (2.0, 2.0), (9.0, 3.0), (0.0, 0.0)] {
            rounds.add("all", "rxsteer", "delivered_pps", ours);
            rounds.add("all", "none", "delivered_pps", theirs);
        }
        let report = rounds.report("flood", 4);
        let case = &report.cases[0];
        // 10, 1 and 3; a round without a value for the other has no ratio.
        assert_eq!(case.ratios["delivered_pps"]["none"], 3.0);
        assert_eq!(
            case.modes["rxsteer"]["delivered_pps"],
            Spread {
                median: 5.5,
                min: 0.0,
                max: 10.0
            }
        );
    }

    #[test]
    fn the_json_has_the_documented_form() {
        let mut rounds = Rounds::default();
        rounds.add("tcp4", "rxsteer", "ns_per_packet", 3.0);
        rounds.add("tcp4", "none", "ns_per_packet", 2.0);
        assert_eq!(
            serde_json::to_value(rounds.report("decide", 1)).unwrap(),
            serde_json::json!({"scenario": "decide", "rounds": 1, "cases": [{
                "case": "tcp4",
                "modes": {
                    "none": {"ns_per_packet": {"median": 2.0, "min": 2.0, "max": 2.0}},
                    "rxsteer": {"ns_per_packet": {"median": 3.0, "min": 3.0, "max": 3.0}},
                },
                "ratios": {"ns_per_packet": {"none": 1.5}},
            }]})
        );
    }
}
