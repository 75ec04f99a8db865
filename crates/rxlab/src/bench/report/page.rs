// SPDX-License-Identifier: MIT OR Apache-2.0
//! The report as one HTML file without scripts and without external resources.

use std::time::{Duration, UNIX_EPOCH};

use indexmap::{IndexMap, IndexSet};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::bench::report::document::{
    Better, CONFIDENCE, Case, Document, Metric, Modes, Ratio, Refusal, Report, SUBJECT, Spread,
    Verdict, factor,
};
use crate::bench::report::host::binary;
use crate::bench::report::plot::{Axis, figure};
use crate::bench::report::published::{self, Published};

pub fn page(document: &Document) -> String {
    let began = UNIX_EPOCH + Duration::from_secs(document.unix_time);
    let began = humantime::format_rfc3339_seconds(began).to_string();
    let header = html! {
        p { "Measured " time datetime=(began) { (began) } " with rxsteer " (document.rxsteer) ":" }
        pre { code { (document.command) } }
    };
    let main = html! {
        section { (summary(&document.scenarios)) }
        section { (machine(document)) }
        @for (n, report) in document.scenarios.iter().enumerate() {
            section .scenario { (scenario(n, report)) }
        }
    };
    shell(&format!("rxlab bench, {began}"), &header, &main)
}

/// A complete page around these parts, with the style embedded.
pub(in crate::bench) fn shell(title: &str, header: &Markup, main: &Markup) -> String {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(include_str!("page.css"))) }
            }
            body {
                header {
                    h1 { "rxlab bench" }
                    (header)
                }
                main { (main) }
            }
        }
    }
    .into_string()
}

/// Anchor of a scenario, or of one of its cases.
fn anchor(scenario: usize, case: Option<usize>) -> String {
    match case {
        Some(case) => format!("s{scenario}-{case}"),
        None => format!("s{scenario}"),
    }
}

/// Headline ratios of all scenarios, with links to the details.
fn summary(scenarios: &[Report]) -> Markup {
    html! {
        h2 { "Summary" }
        p {
            "How many times as much as with another mode it is with " b { (SUBJECT) }
            ": the median of the rounds' ratios. The modes are measured in turn in every round. "
            "It is called better or worse where the ratio's " (confidence()) " interval leaves 1 out."
        }
        ul .legend {
            @for verdict in [Verdict::Better, Verdict::Worse, Verdict::Same, Verdict::Unknown] {
                li { span class=(class(verdict)) { (mark(verdict)) } " " (meaning(verdict)) }
            }
        }
        @for (n, report) in scenarios.iter().enumerate() {
            h3 { a href={ "#" (anchor(n, None)) } { (report.scenario) } }
            p { (report.question) }
            (matrix(n, report))
        }
    }
}

/// Ratios: cases, or metrics of each case, by modes.
fn matrix(n: usize, report: &Report) -> Markup {
    let metrics: Vec<(&String, &Metric)> = headlines(report)
        .filter(|(name, _)| {
            report
                .cases
                .iter()
                .any(|case| case.ratios.contains_key(*name))
        })
        .collect();
    let modes: IndexSet<&String> = report
        .cases
        .iter()
        .flat_map(|case| {
            metrics
                .iter()
                .filter_map(|(name, _)| case.ratios.get(*name))
        })
        .flat_map(IndexMap::keys)
        .collect();
    let link =
        |c: usize, case: &Case| html! { a href={ "#" (anchor(n, Some(c))) } { (case.case) } };
    html! {
        @if modes.is_empty() {
            p .plain { "Nothing is compared here." }
        } @else {
            table .matrix {
                @if let [(_, metric)] = &metrics[..] { caption { (metric.title) } }
                thead {
                    tr {
                        th scope="col" { (SUBJECT) " over" }
                        @for mode in &modes { th scope="col" { (mode) } }
                    }
                }
                @for (c, case) in report.cases.iter().enumerate() {
                    tbody {
                        @if metrics.len() > 1 {
                            tr { th colspan=(modes.len() + 1) scope="rowgroup" { (link(c, case)) } }
                        }
                        @for (name, metric) in &metrics {
                            tr {
                                th scope="row" {
                                    @if metrics.len() > 1 { (metric.title) } @else { (link(c, case)) }
                                }
                                @for mode in &modes {
                                    @match of(&case.ratios, name, mode) {
                                        Some(ratio) => td data-over={ "over " (mode) } { (short(ratio, metric.better)) },
                                        None => td .none {},
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn headlines(report: &Report) -> impl Iterator<Item = (&String, &Metric)> {
    report.metrics.iter().filter(|(_, metric)| metric.headline)
}

fn machine(document: &Document) -> Markup {
    let host = &document.host;
    let counted = |n: u32, what: &str| {
        (n > 0).then(|| format!("{n} {what}{}", if n == 1 { "" } else { "s" }))
    };
    let cpus = [
        Some(host.cpu.clone()).filter(|cpu| !cpu.is_empty()),
        counted(host.cpus, "CPU"),
        counted(host.threads_per_core, "thread").map(|threads| threads + " per core"),
        counted(host.numa_nodes, "NUMA node"),
    ];
    let idle = host
        .idle_governor
        .iter()
        .map(|governor| format!("governor {governor}"));
    let facts = [
        ("Processor", cpus.into_iter().flatten().collect()),
        ("Caches", host.caches.clone()),
        (
            "Memory",
            (host.memory > 0)
                .then(|| binary(host.memory))
                .into_iter()
                .collect(),
        ),
        ("Guest of", host.hypervisor.clone().into_iter().collect()),
        ("Emulated", host.emulated.clone().into_iter().collect()),
        (
            "A second of it took",
            document
                .stretch
                .map(|s| format!("{s:.0} s"))
                .into_iter()
                .collect(),
        ),
        ("Kernel", vec![host.kernel.clone()]),
        ("Kernel options", host.kernel_options.clone()),
        (
            "Tick",
            host.hz.map(|hz| format!("{hz} Hz")).into_iter().collect(),
        ),
        (
            "Frequency governor",
            host.governor.clone().into_iter().collect(),
        ),
        (
            "Idle states, exit latency",
            host.idle_states.iter().cloned().chain(idle).collect(),
        ),
        ("Device", vec![host.nic.clone()]),
    ];
    html! {
        h2 { "The machine" }
        (definitions(facts.iter().map(|(name, facts): &(_, Vec<String>)| (*name, facts.join("; ")))))
    }
}

/// Leaves out empty facts.
fn definitions<'a>(facts: impl Iterator<Item = (&'a str, String)>) -> Markup {
    html! {
        dl {
            @for (name, fact) in facts.filter(|(_, fact)| !fact.is_empty()) {
                dt { (name) }
                dd { (fact) }
            }
        }
    }
}

fn scenario(n: usize, report: &Report) -> Markup {
    html! {
        h2 id=(anchor(n, None)) { (report.scenario) }
        p .question { (report.question) }
        p {
            (report.rounds) @if report.rounds == 1 { " round" } @else { " rounds" }
            ", " (report.seconds) " s each measurement."
        }
        (definitions(report.conditions.iter().map(|(name, value)| (name.as_str(), value.clone()))))
        @for note in &report.notes { p .note { (note) } }
        @for (c, case) in report.cases.iter().enumerate() {
            article { (self::case(&anchor(n, Some(c)), case, report)) }
        }
        @if !report.refused.is_empty() { (refused(&report.refused)) }
        @for table in published::of(&report.scenario) { (aside(table)) }
    }
}

fn case(id: &str, case: &Case, report: &Report) -> Markup {
    // Includes modes with refused measurements only.
    let refused = report
        .refused
        .iter()
        .filter(|refusal| refusal.case == case.case);
    let modes: IndexSet<&str> = case
        .modes
        .keys()
        .chain(refused.map(|refusal| &refusal.mode))
        .map(String::as_str)
        .collect();
    let measured = |name: &str| {
        case.modes
            .values()
            .any(|metrics| metrics.contains_key(name))
    };
    html! {
        h3 id=(id) { (case.case) }
        @for (name, metric) in headlines(report).filter(|(name, _)| measured(name)) {
            (plot(case, &modes, name, metric))
        }
        details {
            summary { "All figures" }
            (table(case, &report.metrics))
        }
    }
}

/// Value of a metric in a mode.
fn of<'a, T>(modes: &'a Modes<T>, outer: &str, inner: &str) -> Option<&'a T> {
    modes.get(outer)?.get(inner)
}

fn plot(case: &Case, modes: &IndexSet<&str>, name: &str, metric: &Metric) -> Markup {
    let rows = case.modes.values().filter_map(|metrics| metrics.get(name));
    let axis = Axis::of(rows);
    let subject = of(&case.modes, SUBJECT, name).map(|spread| spread.median);
    let unit = unit(&metric.unit);
    html! {
        figure {
            figcaption {
                b { (metric.title) } @if !unit.is_empty() { ", " (unit) }
                span .plain {
                    (direction(metric.better))
                    @if axis.logarithmic { "; logarithmic, since the modes are so far apart" }
                }
            }
            div .row .head aria-hidden="true" {
                span { "mode" }
                span { "every round, and the median" }
                span .number { "median" }
                span { @if case.ratios.contains_key(name) { (SUBJECT) " is (" (confidence()) " interval)" } }
            }
            @for mode in modes {
                div .row .subject[*mode == SUBJECT] {
                    span .mode { (mode) }
                    @match of(&case.modes, mode, name) {
                        Some(spread) => {
                            (axis.row(spread, subject, &said(mode, spread, metric)))
                            span .number { (figure(spread.median, &metric.unit)) }
                        },
                        None => {
                            span .plain { "no figure" }
                            span {}
                        },
                    }
                    @match of(&case.ratios, name, mode) {
                        Some(ratio) => span .ratio { (long(ratio, metric.better)) },
                        None => span .ratio {},
                    }
                }
            }
            div .row .axis { span {} (axis.numbers(&metric.unit)) }
        }
    }
}

/// Text alternative of a plot's row.
fn said(mode: &str, spread: &Spread, metric: &Metric) -> String {
    let figure = |value| figure(value, &metric.unit);
    format!(
        "{mode}: {} {} {}, rounds from {} to {}",
        metric.title,
        figure(spread.median),
        unit(&metric.unit),
        figure(spread.min),
        figure(spread.max)
    )
}

/// All metrics of a case.
fn table(case: &Case, metrics: &IndexMap<String, Metric>) -> Markup {
    let rows = |name: &str| -> Vec<(&String, &Spread)> {
        let modes = case.modes.iter();
        modes
            .filter_map(|(mode, metrics)| Some((mode, metrics.get(name)?)))
            .collect()
    };
    html! {
        table .figures {
            thead {
                tr {
                    th scope="col" { "mode" }
                    th scope="col" .number { "median" }
                    th scope="col" .number { "lowest" }
                    th scope="col" .number { "highest" }
                    th scope="col" { (SUBJECT) " is" }
                }
            }
            @for (name, metric) in metrics {
                @let rows = rows(name);
                @if !rows.is_empty() {
                    tbody {
                        tr {
                            th colspan="5" scope="rowgroup" {
                                (metric.title) @if !unit(&metric.unit).is_empty() { ", " (unit(&metric.unit)) }
                                span .plain { (direction(metric.better)) }
                            }
                        }
                        @for (mode, spread) in rows {
                            tr .subject[mode == SUBJECT] {
                                th scope="row" { (mode) }
                                @for value in [spread.median, spread.min, spread.max] {
                                    td .number { (figure(value, &metric.unit)) }
                                }
                                td {
                                    @if let Some(ratio) = of(&case.ratios, name, mode) {
                                        (long(ratio, metric.better))
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn refused(refused: &[Refusal]) -> Markup {
    html! {
        h3 { "No figure" }
        p { "Measurements that did not measure what they claim. A mode with too few others has no figure at all." }
        table .refused {
            thead {
                tr {
                    th scope="col" { "case" }
                    th scope="col" { "mode" }
                    th scope="col" .number { "round" }
                    th scope="col" { "why" }
                }
            }
            tbody {
                @for refusal in refused {
                    tr {
                        td { (refusal.case) }
                        td { (refusal.mode) }
                        td .number { (refusal.round) }
                        td { (refusal.why) }
                    }
                }
            }
        }
    }
}

fn aside(published: &Published) -> Markup {
    html! {
        aside {
            h3 { "Published: " (published.source) }
            p .warning {
                "Not measured here: another machine, another kernel, another year. To be seen beside our "
                (published.figure) ", not to be compared number by number."
            }
            p {
                (published.author) @if let Some(date) = published.date { ", " (date) }
                ". " (published.test)
                @if let Some(machine) = published.machine { " Measured on " (machine) "." }
            }
            div .wide {
                table .figures {
                    thead {
                        tr { @for column in published.columns { th scope="col" { (column) } } }
                    }
                    tbody {
                        @for row in published.rows {
                            tr {
                                @for (n, cell) in row.iter().enumerate() {
                                    @if n == 0 { th scope="row" { (cell) } }
                                    @else { td .number { (cell) } }
                                }
                            }
                        }
                    }
                }
            }
            @if let Some(note) = published.note { p .note { (note) } }
        }
    }
}

/// Unit as displayed; empty for counts.
fn unit(unit: &str) -> &str {
    match unit {
        "1" => "",
        "us" => "µs",
        unit => unit,
    }
}

fn confidence() -> String {
    format!("{:.0} %", 100.0 * CONFIDENCE)
}

fn direction(better: Better) -> &'static str {
    match better {
        Better::Higher => "more is better",
        Better::Lower => "less is better",
        Better::Neither => "explains the others",
    }
}

fn mark(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Better => "▲",
        Verdict::Worse => "▼",
        Verdict::Same => "○",
        Verdict::Unknown => "?",
    }
}

fn meaning(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Better => "rxsteer is better",
        Verdict::Worse => "rxsteer is worse",
        Verdict::Same => "not distinguishable",
        Verdict::Unknown => "no interval: too few rounds, or zeros",
    }
}

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Better => "better",
        Verdict::Worse => "worse",
        Verdict::Same => "same",
        Verdict::Unknown => "unknown",
    }
}

/// Ratio with interval.
fn long(ratio: &Ratio, better: Better) -> Markup {
    judged(ratio, better, &ratio.to_string())
}

/// Ratio only.
fn short(ratio: &Ratio, better: Better) -> Markup {
    judged(ratio, better, &format!("× {}", factor(ratio.median)))
}

fn judged(ratio: &Ratio, better: Better, text: &str) -> Markup {
    let verdict = ratio.verdict(better);
    html! {
        span class=(class(verdict)) {
            span aria-hidden="true" { (mark(verdict)) " " } (text)
            span .spoken { ", " (meaning(verdict)) }
        }
    }
}
