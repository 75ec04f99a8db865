// SPDX-License-Identifier: MIT OR Apache-2.0
//! `bench columns`: several reports side by side, one column each, such as one per number of CPUs.

use std::fmt::Write;

use indexmap::{IndexMap, IndexSet};
use serde::Serialize;

use crate::bench::report::document::Better;
use crate::bench::report::document::{Case, Document, Metric, Ratio, SUBJECT, factor};

/// Modes to compare with, and their short names. A mode with several masks counts once, with its
/// best mask.
const MODES: [(&str, &str); 4] = [
    ("none", "none"),
    ("kernel-rps", "RPS"),
    ("kernel-rfs", "RFS"),
    ("cpumap", "cpumap"),
];

/// Reports side by side.
#[derive(Debug, Serialize)]
pub struct Columns {
    /// Place of each report: `8 CPUs, emulated`.
    pub columns: Vec<String>,
    /// In the order of the first report with each row.
    pub rows: Vec<Row>,
}

/// A headline metric of a case.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Row {
    pub scenario: String,
    pub case: String,
    pub metric: String,
    pub unit: String,
    /// One per column; None if the report lacks the row.
    pub cells: Vec<Option<Cell>>,
}

#[derive(Debug, Serialize)]
pub struct Cell {
    /// rxsteer's median; None if it gave no figure.
    pub value: Option<f64>,
    /// Ratios over the other modes, each with its best mask.
    pub over: IndexMap<&'static str, Ratio>,
}

impl Columns {
    /// Of reports, in the order given.
    pub fn of(documents: &[Document]) -> Self {
        let mut names: IndexSet<(&str, &str, &str)> = IndexSet::new();
        for report in documents.iter().flat_map(|document| &document.scenarios) {
            let headlines = || report.metrics.iter().filter(|(_, m)| m.headline);
            for case in &report.cases {
                for (metric, _) in headlines().filter(|(m, _)| is_measured(case, m)) {
                    names.insert((&report.scenario, &case.case, metric));
                }
            }
        }
        let rows = names.iter().map(|&(scenario, case, metric)| {
            let found: Vec<_> = documents
                .iter()
                .map(|document| find(document, scenario, case, metric))
                .collect();
            let described = found.iter().flatten().next().map(|(metric, _)| *metric);
            Row {
                scenario: scenario.to_owned(),
                case: case.to_owned(),
                metric: described.map_or_else(String::new, |m| m.title.clone()),
                unit: described.map_or_else(String::new, |m| m.unit.clone()),
                cells: found
                    .into_iter()
                    .map(|found| found.map(|(described, case)| cell(case, metric, described)))
                    .collect(),
            }
        });
        Self {
            columns: documents.iter().map(name).collect(),
            rows: rows.collect(),
        }
    }

    /// A table in GitHub's Markdown; ends with a newline.
    pub fn render(&self) -> String {
        let mut out = format!(
            "| Scenario, case | Figure | {} |\n|---|---|{}\n",
            self.columns.join(" | "),
            "---|".repeat(self.columns.len())
        );
        for row in &self.rows {
            let cells: Vec<String> = row.texts().collect();
            let _ = writeln!(
                out,
                "| `{}` {} | {}, {} | {} |",
                row.scenario,
                row.case,
                row.metric,
                row.unit,
                cells.join(" | ")
            );
        }
        let _ = writeln!(out, "\n{}", note());
        out
    }
}

/// Legend of the cells.
fn note() -> String {
    format!(
        "Each cell: what {SUBJECT} reached (median of the rounds), and in brackets how many times as much \
         as with another mode, which counts over the mask that served it best; \"-\" where a mode gave no \
         figure."
    )
}

fn is_measured(case: &Case, metric: &str) -> bool {
    case.modes.values().any(|mode| mode.contains_key(metric))
}

fn find<'a>(
    document: &'a Document,
    scenario: &str,
    case: &str,
    metric: &str,
) -> Option<(&'a Metric, &'a Case)> {
    let mut reports = document.scenarios.iter();
    let report = reports.find(|report| report.scenario == scenario)?;
    let case = report.cases.iter().find(|found| found.case == case)?;
    is_measured(case, metric).then_some((report.metrics.get(metric)?, case))
}

impl Row {
    fn texts(&self) -> impl Iterator<Item = String> {
        self.cells.iter().map(|cell| text(cell, &self.unit))
    }
}

/// Place of a report.
fn name(document: &Document) -> String {
    let cpus = document.host.cpus;
    let how = match &document.host.emulated {
        Some(_) => "emulated",
        None => "real",
    };
    format!("{cpus} CPUs, {how}")
}

fn cell(case: &Case, metric: &str, described: &Metric) -> Cell {
    let value = |mode: &str| Some(case.modes.get(mode)?.get(metric)?.median);
    let mut over = IndexMap::new();
    for (mode, short) in MODES {
        // Matches `kernel-rps (all)` and `kernel-rps (others)`.
        let masks = case.modes.keys().filter(|name| {
            name.strip_prefix(mode)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(" ("))
        });
        let best = masks
            .filter_map(|name| Some((name, value(name)?)))
            .max_by(|(_, a), (_, b)| match described.better {
                Better::Lower => b.total_cmp(a),
                Better::Higher | Better::Neither => a.total_cmp(b),
            });
        let ratio = best.and_then(|(name, _)| case.ratios.get(metric)?.get(name));
        over.extend(ratio.map(|ratio| (short, *ratio)));
    }
    Cell {
        value: value(SUBJECT),
        over,
    }
}

fn text(cell: &Option<Cell>, unit: &str) -> String {
    let Some(cell) = cell else {
        return String::new();
    };
    let value = cell
        .value
        .map_or("-".to_owned(), |value| figure(value, unit));
    let over: Vec<String> = cell
        .over
        .iter()
        .map(|(mode, ratio)| format!("{mode} × {}", factor(ratio.median)))
        .collect();
    match over.is_empty() {
        true => value,
        false => format!("{value} ({})", over.join(", ")),
    }
}

/// Formats a value with three significant digits, and with a prefix if the unit can take one.
fn figure(value: f64, unit: &str) -> String {
    const PREFIXES: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let prefixed = !matches!(unit, "ns" | "us" | "ms" | "s" | "%");
    // Values that round up to 1000 take the next prefix.
    let fits = |(scale, _): &(f64, &str)| prefixed && value.abs() >= 0.9995 * scale;
    match PREFIXES.into_iter().find(fits) {
        Some((scale, prefix)) => format!("{} {prefix}", significant(value / scale)),
        None => significant(value),
    }
}

fn significant(value: f64) -> String {
    let decimals = match value.abs() {
        v if v == v.trunc() => 0,
        // Values that round up to another digit before the point have one less after it.
        v => (2 - (1.0005 * v).log10().floor() as i32).clamp(0, 6),
    };
    let text = format!("{value:.*}", decimals as usize);
    if decimals > 0 || value < 1e4 {
        return text;
    }
    let thousands = text
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(String::from_utf8_lossy);
    // Narrow no-break space.
    thousands.collect::<Vec<_>>().join("\u{202f}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::experiment::headline;
    use crate::bench::report::document::{Report, Rounds};
    use crate::bench::report::host::Host;

    /// A report with one case and one value per mode.
    fn document(cpus: u32, case: &str, better: Better, modes: &[(&str, f64)]) -> Document {
        let mut rounds = Rounds::default();
        for (mode, value) in modes {
            rounds.add(0, case, mode, "pps", *value);
        }
        let report = Report {
            scenario: "flood".to_owned(),
            question: "How much?".to_owned(),
            rounds: 1,
            seconds: 0.5,
            conditions: IndexMap::new(),
            metrics: IndexMap::from([headline("pps", "Delivered", "packets/s", better)]),
            cases: rounds.cases(1),
            refused: Vec::new(),
            notes: Vec::new(),
        };
        let emulated = (cpus > 2).then(|| "QEMU".to_owned());
        Document {
            host: Host {
                cpus,
                emulated,
                ..Host::default()
            },
            scenarios: vec![report],
            ..Document::begin()
        }
    }

    #[test]
    fn a_column_for_each_report_and_a_cell_for_what_it_has() {
        let modes = [
            ("none", 1e6),
            ("kernel-rps (all)", 4e6),
            ("kernel-rps (others)", 5e5),
            (SUBJECT, 2e6),
        ];
        let two = document(2, "one", Better::Higher, &modes);
        let eight = document(8, "other", Better::Higher, &[(SUBJECT, 12_000.0)]);
        let columns = Columns::of(&[two, eight]);
        assert_eq!(columns.columns, ["2 CPUs, real", "8 CPUs, emulated"]);
        let texts: Vec<Vec<String>> = columns
            .rows
            .iter()
            .map(|row| row.texts().collect())
            .collect();
        // Compared with the better mask of kernel RPS.
        assert_eq!(texts[0], ["2 M (none × 2.00, RPS × 0.50)", ""]);
        assert_eq!(texts[1], ["", "12 k"]);
    }

    #[test]
    fn of_what_is_better_low_the_best_mask_is_the_lowest() {
        let modes = [
            ("kernel-rps (all)", 4.0),
            ("kernel-rps (others)", 1.0),
            (SUBJECT, 2.0),
        ];
        let lower = Columns::of(&[document(2, "one", Better::Lower, &modes)]);
        assert_eq!(text(&lower.rows[0].cells[0], "packets/s"), "2 (RPS × 2.00)");
    }

    #[test]
    fn figures_have_three_digits_and_a_prefix_where_the_unit_has_none() {
        for (value, unit, text) in [
            (1_391_234.0, "packets/s", "1.39 M"),
            (579_999.0, "packets/s", "580 k"),
            (999_900.0, "packets/s", "1.00 M"),
            (12_345.6, "us", "12\u{202f}346"),
            (1_234_567.0, "us", "1\u{202f}234\u{202f}567"),
            (9.996, "us", "10.0"),
            (99.94, "%", "99.9"),
            (5.1818, "ns", "5.18"),
            (0.0123, "s", "0.0123"),
            (0.0, "1", "0"),
            (12.0, "packets", "12"),
            (-2_500.0, "1/s", "-2.50 k"),
        ] {
            assert_eq!(figure(value, unit), text);
        }
    }
}
