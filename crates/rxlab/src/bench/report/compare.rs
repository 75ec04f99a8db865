// SPDX-License-Identifier: MIT OR Apache-2.0
//! `bench compare`: whether two reports of one machine agree.

use std::collections::HashSet;
use std::fmt::Write;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use indexmap::{IndexMap, IndexSet};
use rxsteer::cli::table::table;
use serde::Serialize;

use crate::bench::report::document::{Document, Ratio};

/// Comparison of two reports.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Names of the report's facts about the machine that differ.
    pub host: Vec<String>,
    /// Ratios in both reports; those that differ come first.
    pub ratios: Vec<Compared>,
    /// Scenarios, cases, metrics or modes with ratios in the old report only.
    pub only_old: IndexSet<String>,
    /// The same for the new report.
    pub only_new: IndexSet<String>,
}

#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Compared {
    pub scenario: String,
    pub case: String,
    pub metric: String,
    pub mode: String,
    pub old: Ratio,
    pub new: Ratio,
    /// Whether the intervals overlap. A ratio without an interval agrees if the other contains it.
    pub agrees: bool,
}

/// Scenario, case, metric, mode.
type Name<'a> = [&'a str; 4];

fn ratios(document: &Document) -> IndexMap<Name<'_>, Ratio> {
    let mut ratios = IndexMap::new();
    for report in &document.scenarios {
        for case in &report.cases {
            for (metric, modes) in &case.ratios {
                for (mode, ratio) in modes {
                    ratios.insert([&*report.scenario, &*case.case, &**metric, &**mode], *ratio);
                }
            }
        }
    }
    ratios
}

/// Names in `these` without a counterpart in `others`, shortened to the first part that is missing.
fn missing(
    these: &IndexMap<Name<'_>, Ratio>,
    others: &IndexMap<Name<'_>, Ratio>,
) -> IndexSet<String> {
    let known: HashSet<&[&str]> = others
        .keys()
        .flat_map(|name| (1..=name.len()).map(|n| &name[..n]))
        .collect();
    these
        .keys()
        .filter_map(|name| {
            (1..=name.len())
                .map(|n| &name[..n])
                .find(|part| !known.contains(part))
        })
        .map(|part| part.join(", "))
        .collect()
}

/// Names of facts about the machine that differ.
fn differences(old: &Document, new: &Document) -> Result<Vec<String>> {
    let facts = |document: &Document| serde_json::to_value(&document.host);
    let (old, new) = (facts(old)?, facts(new)?);
    let names = old.as_object().into_iter().flat_map(|facts| facts.keys());
    Ok(names
        .filter(|name| old[*name] != new[*name])
        .cloned()
        .collect())
}

impl Comparison {
    /// Compares the ratios of two reports.
    ///
    /// # Errors
    /// When they have no ratio in common.
    pub fn of(old: &Document, new: &Document) -> Result<Self> {
        let host = differences(old, new)?;
        let (old, new) = (ratios(old), ratios(new));
        let mut both: Vec<Compared> = old
            .iter()
            .filter_map(|(name, ratio)| {
                let [scenario, case, metric, mode] = name.map(str::to_owned);
                let new = *new.get(name)?;
                Some(Compared {
                    scenario,
                    case,
                    metric,
                    mode,
                    old: *ratio,
                    new,
                    agrees: ratio.agrees(&new),
                })
            })
            .collect();
        ensure!(!both.is_empty(), "the reports have no ratio in common");
        // A stable sort keeps the order of measurement.
        both.sort_by_key(|ratio| ratio.agrees);
        Ok(Self {
            host,
            ratios: both,
            only_old: missing(&old, &new),
            only_new: missing(&new, &old),
        })
    }

    pub fn nr_differ(&self) -> usize {
        self.ratios.iter().filter(|ratio| !ratio.agrees).count()
    }

    /// The comparison as text; ends with a newline.
    pub fn render(&self) -> String {
        let mut out = String::new();
        if !self.host.is_empty() {
            let _ = writeln!(
                out,
                "The machines are not the same: {}.\n",
                self.host.join(", ")
            );
        }
        let mut table = table(["", "scenario", "case", "metric", "over", "old", "new"]);
        for ratio in &self.ratios {
            table.add_row([
                if ratio.agrees { "agrees" } else { "differs" },
                &ratio.scenario,
                &ratio.case,
                &ratio.metric,
                &ratio.mode,
                &ratio.old.to_string(),
                &ratio.new.to_string(),
            ]);
        }
        let _ = writeln!(out, "{}\n", table.trim_fmt());
        for (which, only) in [("old", &self.only_old), ("new", &self.only_new)] {
            for what in only {
                let _ = writeln!(out, "Only the {which} report has {what}.");
            }
        }
        let without = self
            .ratios
            .iter()
            .filter(|ratio| ratio.old.interval.is_none() || ratio.new.interval.is_none())
            .count();
        if without > 0 {
            let _ = writeln!(
                out,
                "{without} have no interval (fewer than three rounds, or zeros): only their medians count."
            );
        }
        let differ = self.nr_differ();
        let _ = writeln!(
            out,
            "{} ratios agree, {differ} differ",
            self.ratios.len() - differ
        );
        out
    }
}

/// Reads a report that `--json` printed or `--report` wrote.
///
/// # Errors
/// When it can't be read, or is no report.
pub fn read(path: &Path) -> Result<Document> {
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    serde_json::from_reader(BufReader::new(file))
        .with_context(|| format!("{} is no report of rxlab bench", path.display()))
}
