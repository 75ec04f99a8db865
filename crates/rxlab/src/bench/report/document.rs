// SPDX-License-Identifier: MIT OR Apache-2.0
//! Results of the scenarios by round, and the statistics of a report.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use indexmap::IndexMap;
use rxsteer::cli::table::table;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};

use crate::bench::report::host::Host;

/// The mode that the others are compared with.
pub const SUBJECT: &str = "rxsteer";

/// Probability that a ratio's interval contains the true ratio, if rounds differ by chance alone.
pub const CONFIDENCE: f64 = 0.99;

/// Results of one command, and the machine.
#[derive(Debug, Serialize, Deserialize)]
pub struct Document {
    /// Version of rxsteer.
    pub rxsteer: String,
    /// The command line.
    pub command: String,
    /// Start, seconds since 1970.
    pub unix_time: u64,
    pub host: Host,
    /// On an emulated machine, seconds of the emulator per second of the machine's clock.
    #[serde(default)]
    pub stretch: Option<f64>,
    /// In the order of measurement.
    pub scenarios: Vec<Report>,
}

impl Document {
    pub fn begin() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            rxsteer: env!("CARGO_PKG_VERSION").to_owned(),
            // Without the path of installation.
            command: std::iter::once("rxlab".to_owned())
                .chain(std::env::args().skip(1))
                .collect::<Vec<_>>()
                .join(" "),
            unix_time: now.unwrap_or_default().as_secs(),
            host: Host::this(),
            stretch: None,
            scenarios: Vec::new(),
        }
    }

    /// The reports as text; ends with a newline.
    pub fn render(&self) -> String {
        let mut out = String::new();
        for report in &self.scenarios {
            let _ = writeln!(out, "{}", report.render());
        }
        if let Some(emulated) = &self.host.emulated {
            let stretch = self.stretch.map(|s| format!(", {s:.0} s for a second"));
            let _ = writeln!(
                out,
                "This machine is emulated ({emulated}{}). Compare ratios only (docs/testbed.md).",
                stretch.unwrap_or_default()
            );
        }
        out
    }
}

/// Direction in which a metric improves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    Higher,
    Lower,
    /// Neither: the metric explains others.
    Neither,
}

/// Description of a metric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// Title without the unit.
    pub title: String,
    /// Unit: `us`, `packets/s`, `%`.
    pub unit: String,
    pub better: Better,
    /// Whether the scenario is about this metric, which is then plotted; the others explain it.
    pub headline: bool,
}

/// By mode, then by metric.
pub type Modes<T> = IndexMap<String, IndexMap<String, T>>;

/// Median and range over the rounds, in the metric's unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
    /// Values of the rounds that gave a figure, in order.
    pub rounds: Vec<f64>,
}

/// Ratio of rxsteer's value to another mode's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Median of the per-round ratios.
    pub median: f64,
    /// Confidence interval, see [`CONFIDENCE`]. None with fewer than three rounds, or if a ratio is
    /// not positive.
    pub interval: Option<(f64, f64)>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Case {
    pub case: String,
    /// Values of each mode, in the order of measurement.
    pub modes: Modes<Spread>,
    /// By metric, then by mode.
    pub ratios: Modes<Ratio>,
}

/// A measurement that did not measure what it claims, and gave no figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Refusal {
    pub case: String,
    pub mode: String,
    /// Counted from 1.
    pub round: u32,
    pub why: String,
}

/// Result of a scenario.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    pub scenario: String,
    /// The question it answers, in a sentence.
    pub question: String,
    /// Number of complete rounds.
    pub rounds: u32,
    /// Length of one measurement.
    pub seconds: f64,
    /// Conditions that apply to all figures: how the queue is polled, GRO.
    pub conditions: IndexMap<String, String>,
    /// By name, the most important first.
    pub metrics: IndexMap<String, Metric>,
    /// In the order of measurement.
    pub cases: Vec<Case>,
    /// Refused measurements.
    pub refused: Vec<Refusal>,
    /// Remarks for the reader of the figures.
    pub notes: Vec<String>,
}

/// Values with the round of each, by case, mode and metric.
#[derive(Debug, Default)]
pub struct Rounds {
    cases: IndexMap<String, Modes<Vec<(u32, f64)>>>,
}

impl Rounds {
    /// Registers a mode, so that it keeps its place even without a figure.
    pub fn expect(&mut self, case: &str, mode: &str) {
        let modes = self.cases.entry(case.to_owned()).or_default();
        modes.entry(mode.to_owned()).or_default();
    }

    /// Adds a value of `mode` in a round of `case`.
    pub fn add(&mut self, round: u32, case: &str, mode: &str, metric: &str, value: f64) {
        let modes = self.cases.entry(case.to_owned()).or_default();
        let metrics = modes.entry(mode.to_owned()).or_default();
        let values = metrics.entry(metric.to_owned()).or_default();
        values.push((round, value));
    }

    /// Statistics of all cases. A mode with figures in less than half of the rounds has none.
    pub fn cases(&self, rounds: u32) -> Vec<Case> {
        let enough = |values: &&Vec<(u32, f64)>| 2 * values.len() as u32 >= rounds;
        let spreads = |metrics: &IndexMap<String, Vec<(u32, f64)>>| {
            metrics
                .iter()
                .filter(|(_, values)| enough(values))
                .map(|(metric, values)| (metric.clone(), Spread::of(values)))
                .collect()
        };
        self.cases
            .iter()
            .map(|(case, modes)| Case {
                case: case.clone(),
                modes: modes
                    .iter()
                    .map(|(mode, metrics)| (mode.clone(), spreads(metrics)))
                    .collect(),
                ratios: ratios(modes, enough),
            })
            .collect()
    }
}

fn ratios(
    modes: &Modes<Vec<(u32, f64)>>,
    enough: impl Fn(&&Vec<(u32, f64)>) -> bool,
) -> Modes<Ratio> {
    let mut ratios = Modes::new();
    let Some(subject) = modes.get(SUBJECT) else {
        return ratios;
    };
    for (mode, metrics) in modes.iter().filter(|(mode, _)| *mode != SUBJECT) {
        for (metric, theirs) in metrics {
            let Some(ours) = subject.get(metric).filter(&enough) else {
                continue;
            };
            let theirs = Some(theirs).filter(&enough).map_or(&[][..], |t| t);
            // A round has no ratio if a value is missing or the divisor is 0.
            let per_round: Vec<f64> = ours
                .iter()
                .filter_map(|(round, ours)| {
                    let theirs = theirs.iter().find(|(r, _)| r == round)?.1;
                    (theirs != 0.0).then_some(ours / theirs)
                })
                .collect();
            if !per_round.is_empty() {
                let of: &mut IndexMap<_, _> = ratios.entry(metric.clone()).or_default();
                of.insert(mode.clone(), Ratio::of(&per_round));
            }
        }
    }
    ratios
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2])
}

impl Spread {
    /// `values` must not be empty.
    fn of(values: &[(u32, f64)]) -> Self {
        let rounds: Vec<f64> = values.iter().map(|(_, value)| *value).collect();
        Self {
            median: median(&rounds),
            min: rounds.iter().copied().fold(f64::INFINITY, f64::min),
            max: rounds.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            rounds,
        }
    }
}

impl Ratio {
    /// `rounds` must not be empty. The interval is Student's t on the logarithms, since
    /// disturbances act on two modes as common factors, not as differences.
    fn of(rounds: &[f64]) -> Self {
        let middle = median(rounds);
        let n = rounds.len() as f64;
        let interval = (rounds.len() > 2 && rounds.iter().all(|r| *r > 0.0)).then(|| {
            let logs: Vec<f64> = rounds.iter().map(|r| r.ln()).collect();
            let mean = logs.iter().sum::<f64>() / n;
            let variance = logs.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / (n - 1.0);
            let t = StudentsT::new(0.0, 1.0, n - 1.0).expect("more than one round");
            let half = t.inverse_cdf(f64::midpoint(1.0, CONFIDENCE)) * (variance / n).sqrt();
            // The interval contains the median even if the rounds are skewed.
            let (low, high) = ((mean - half).exp(), (mean + half).exp());
            (low.min(middle), high.max(middle))
        });
        Self {
            median: middle,
            interval,
        }
    }

    /// Whether the intervals overlap.
    pub fn agrees(&self, other: &Self) -> bool {
        let ends = |r: &Self| r.interval.unwrap_or((r.median, r.median));
        let ((low, high), (other_low, other_high)) = (ends(self), ends(other));
        low <= other_high && other_low <= high
    }
}

impl Report {
    /// The report as text; ends with a newline.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(out, "{}: {}", self.scenario, self.question);
        let _ = match self.rounds {
            1 => writeln!(out, "One round; {SUBJECT} over the mode of the row."),
            rounds => writeln!(
                out,
                "Medians of {rounds} rounds (lowest … highest); {SUBJECT} over the mode of the row, \
                 and its {:.0} % interval.",
                100.0 * CONFIDENCE
            ),
        };
        for (name, value) in &self.conditions {
            let _ = writeln!(out, "{name}: {value}");
        }
        for case in &self.cases {
            let _ = writeln!(out, "\n{}", case.case);
            let _ = writeln!(out, "{}", case.table(&self.metrics));
        }
        for refusal in &self.refused {
            let _ = writeln!(
                out,
                "\nNo figure: {}, {}, round {}: {}",
                refusal.case, refusal.mode, refusal.round, refusal.why
            );
        }
        for note in &self.notes {
            let _ = writeln!(out, "\nNote: {note}");
        }
        out
    }
}

impl Case {
    fn table(&self, metrics: &IndexMap<String, Metric>) -> String {
        let has = |metric: &str| self.modes.values().any(|m| m.contains_key(metric));
        let metrics: Vec<&String> = metrics.keys().filter(|metric| has(metric)).collect();
        let mut header = vec!["mode".to_owned()];
        for metric in &metrics {
            header.push((*metric).clone());
            if self.ratios.contains_key(*metric) {
                header.push(format!("{SUBJECT} is"));
            }
        }
        let mut table = table(header);
        for (mode, values) in &self.modes {
            let mut row = vec![mode.clone()];
            for metric in &metrics {
                row.push(
                    values
                        .get(*metric)
                        .map_or("-".to_owned(), Spread::to_string),
                );
                if let Some(ratios) = self.ratios.get(*metric) {
                    row.push(ratios.get(mode).map_or(String::new(), Ratio::to_string));
                }
            }
            table.add_row(row);
        }
        table.trim_fmt()
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.min == self.max {
            return f.write_str(&number(self.median));
        }
        let [median, min, max] = [self.median, self.min, self.max].map(number);
        write!(f, "{median} ({min} … {max})")
    }
}

impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "× {}", factor(self.median))?;
        match self.interval {
            Some((low, high)) => write!(f, " ({} … {})", factor(low), factor(high)),
            None => Ok(()),
        }
    }
}

/// Formats a ratio with two decimals, or with as many as are significant.
pub fn factor(value: f64) -> String {
    match value.abs() {
        v if v >= 1e5 || (v > 0.0 && v < 1e-3) => format!("{value:.1e}"),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// Formats a value with about four significant digits, the precision of a noisy machine.
pub fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 1000.0 || v == v.trunc() => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(values: &[(f64, f64)]) -> Rounds {
        let mut rounds = Rounds::default();
        for (round, (ours, theirs)) in (0..).zip(values) {
            rounds.add(round, "all", "none", "delivered_pps", *theirs);
            rounds.add(round, "all", "rxsteer", "delivered_pps", *ours);
        }
        rounds
    }

    #[test]
    fn a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians() {
        let rounds = rounds(&[(10.0, 1.0), (2.0, 2.0), (9.0, 3.0), (0.0, 0.0)]);
        let case = &rounds.cases(4)[0];
        // 10, 1 and 3; the last round has no ratio.
        assert_eq!(case.ratios["delivered_pps"]["none"].median, 3.0);
        let spread = &case.modes["rxsteer"]["delivered_pps"];
        assert_eq!(
            (spread.median, spread.min, spread.max, spread.rounds.len()),
            (5.5, 0.0, 10.0, 4)
        );
    }

    #[test]
    fn a_ratio_compares_the_values_of_one_round() {
        let mut rounds = rounds(&[(1.0, 1.0), (4.0, 2.0)]);
        // Round 2 has no figure of the other mode, round 3 none of this one.
        rounds.add(2, "all", "rxsteer", "delivered_pps", 100.0);
        rounds.add(3, "all", "none", "delivered_pps", 100.0);
        assert_eq!(
            rounds.cases(4)[0].ratios["delivered_pps"]["none"].median,
            1.5
        );
    }

    #[test]
    fn a_mode_that_mostly_gave_no_figure_has_none() {
        let mut rounds = rounds(&[(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]);
        rounds.add(0, "all", "cpumap", "delivered_pps", 1.0);
        let case = &rounds.cases(3)[0];
        assert!(case.modes["cpumap"].is_empty());
        assert!(!case.ratios["delivered_pps"].contains_key("cpumap"));
    }

    #[test]
    fn an_interval_is_students_and_wider_than_the_rounds() {
        let ratio = Ratio::of(&[1.0, 1.1, 1.2, 1.3, 1.4]);
        let (low, high) = ratio.interval.unwrap();
        // t(0.995, 4) = 4.604; the logarithms have mean 0.1753 and deviation 0.1330.
        assert!((low - (0.1753f64 - 0.2738).exp()).abs() < 1e-3, "{low}");
        assert!((high - (0.1753f64 + 0.2738).exp()).abs() < 1e-3, "{high}");
        assert!(ratio.agrees(&Ratio::of(&[1.5, 1.55, 1.6, 1.6, 1.6])));
        assert!(!ratio.agrees(&Ratio::of(&[1.9, 1.95, 1.96, 1.97, 1.98])));
        assert_eq!(Ratio::of(&[1.0, 2.0]).interval, None);
        assert_eq!(Ratio::of(&[0.0, 1.0, 2.0]).interval, None);
    }
}
