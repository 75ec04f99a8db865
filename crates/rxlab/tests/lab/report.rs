// SPDX-License-Identifier: MIT OR Apache-2.0
//! The report of `bench` as page and JSON, and `bench compare`. Needs no root.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use indexmap::IndexMap;
use rxlab::bench::experiment::{detail, headline};
use rxlab::bench::report::document::SUBJECT;
use rxlab::bench::report::document::{Better, Document, Refusal, Report, Rounds};
use rxlab::bench::report::files::{Files, json};
use rxlab::bench::report::host::Host;
use rxlab::bench::report::page::page;
use rxlab::bench::report::published;
use scraper::{ElementRef, Html, Selector};

const CASES: [&str; 2] = [
    "one socket, 4096 flows; interrupt, GRO on",
    "64 connected sockets",
];

/// Modes, and their value relative to rxsteer's.
const MODES: [(&str, f64); 3] = [("none", 0.5), ("kernel-rps (others)", 1.0), (SUBJECT, 1.0)];

/// A scenario with [`CASES`] and [`MODES`]; `value` returns the value of a mode in a round.
fn report(scenario: &str, nr_rounds: u32, value: impl Fn(&str, u32) -> f64) -> Report {
    let mut rounds = Rounds::default();
    for round in 1..=nr_rounds {
        for case in CASES {
            for (mode, _) in MODES {
                rounds.add(round, case, mode, "pps", value(mode, round));
                rounds.add(round, case, mode, "us", value(mode, round) / 1e4);
                rounds.add(round, case, mode, "drops", 0.0);
            }
        }
    }
    Report {
        scenario: scenario.to_owned(),
        question: "How much?".to_owned(),
        rounds: nr_rounds,
        seconds: 0.5,
        conditions: IndexMap::from([("queue".to_owned(), "polled on CPU 0".to_owned())]),
        metrics: IndexMap::from([
            headline("pps", "Delivered", "packets/s", Better::Higher),
            headline("us", "Latency", "us", Better::Lower),
            detail("drops", "Dropped", "packets", Better::Lower),
        ]),
        cases: rounds.cases(nr_rounds),
        refused: Vec::new(),
        notes: vec!["A note.".to_owned()],
    }
}

/// Small differences between rounds.
fn steady(mode: &str, round: u32) -> f64 {
    let (_, factor) = MODES.into_iter().find(|(name, _)| *name == mode).unwrap();
    // Different per mode: with common noise, the ratios would be constant.
    let noise = f64::from((round * 7 + mode.len() as u32 * 3) % 5) * 0.01;
    1e6 * factor * (1.0 + noise)
}

fn document(scenarios: Vec<Report>) -> Document {
    Document {
        rxsteer: "0.1.0".to_owned(),
        command: "rxlab bench".to_owned(),
        unix_time: 1_700_000_000,
        stretch: None,
        host: Host {
            cpu: "Some CPU".to_owned(),
            ..Host::default()
        },
        scenarios,
    }
}

/// Parses the page without an error of the parser.
fn parsed(document: &Document) -> Html {
    let page = Html::parse_document(&page(document));
    assert!(page.errors.is_empty(), "{:?}", page.errors);
    page
}

fn select<'a>(page: &'a Html, selector: &str) -> Vec<ElementRef<'a>> {
    let selector = Selector::parse(selector).unwrap();
    page.select(&selector).collect()
}

fn text(element: ElementRef<'_>) -> String {
    let words = element.text().flat_map(str::split_whitespace);
    words.collect::<Vec<_>>().join(" ")
}

fn texts(page: &Html, selector: &str) -> Vec<String> {
    select(page, selector).into_iter().map(text).collect()
}

#[test]
fn a_parser_that_complains() {
    let page = Html::parse_document("<!DOCTYPE html><p><b>one</p><td>two</table>");
    assert!(!page.errors.is_empty());
}

#[test]
fn every_case_and_mode_is_plotted_and_judged() {
    let document = document(vec![report("flood", 5, steady)]);
    let page = parsed(&document);
    let cases = texts(&page, "article h3");
    assert_eq!(cases, CASES);
    // Two headlines per case; other metrics are in the tables only.
    let modes = texts(&page, "figure .mode");
    assert_eq!(modes.len(), 2 * CASES.len() * MODES.len());
    for (mode, _) in MODES {
        assert_eq!(
            modes.iter().filter(|name| *name == mode).count(),
            4,
            "{mode}"
        );
    }
    assert_eq!(texts(&page, "details tbody").len(), 3 * CASES.len());
    // A dot per round, and a text alternative.
    let plots = select(&page, "figure svg[role=img]");
    assert_eq!(plots.len(), modes.len());
    for plot in plots {
        assert_eq!(plot.select(&Selector::parse("circle").unwrap()).count(), 5);
        assert!(plot.attr("aria-label").unwrap().contains("rounds from"));
    }
    // Twice none's packets is better, twice its latency is worse.
    for (verdict, of) in [("better", "Delivered"), ("worse", "Latency")] {
        let judged = texts(&page, &format!(".matrix td .{verdict}"));
        assert_eq!(judged.len(), CASES.len(), "{of}");
        assert!(
            judged.iter().all(|text| text.contains(verdict)),
            "{judged:?}"
        );
    }
    assert_eq!(texts(&page, ".matrix td .same").len(), 2 * CASES.len());
    // Links lead to the cases.
    for link in select(&page, ".matrix a") {
        let id = link.attr("href").unwrap().strip_prefix('#').unwrap();
        assert_eq!(texts(&page, &format!("h3#{id}")), [text(link)]);
    }
}

#[test]
fn headings_descend_one_at_a_time() {
    let page = parsed(&document(vec![report("rr", 3, steady)]));
    let levels: Vec<u8> = select(&page, "h1, h2, h3, h4, h5, h6")
        .iter()
        .map(|heading| heading.value().name().as_bytes()[1] - b'0')
        .collect();
    assert_eq!(levels[0], 1);
    for pair in levels.windows(2) {
        assert!(pair[1] <= pair[0] + 1, "{levels:?}");
    }
}

#[test]
fn published_tables_stand_where_they_belong() {
    for (scenario, rows) in [
        ("rr", 10),
        ("rpc", 3),
        ("stream", 10),
        ("busypoll", 11),
        ("flood", 0),
    ] {
        let page = parsed(&document(vec![report(scenario, 3, steady)]));
        assert_eq!(texts(&page, "aside tbody tr").len(), rows, "{scenario}");
        assert_eq!(texts(&page, "aside").len(), published::of(scenario).count());
        for warning in texts(&page, "aside .warning") {
            assert!(warning.starts_with("Not measured here"), "{warning}");
        }
    }
}

/// External resources and active content of a page.
fn active(page: &Html) -> Vec<String> {
    let elements = select(
        page,
        "script, link, img, iframe, object, embed, base, form, [style]",
    );
    let mut found: Vec<String> = elements.iter().map(|element| element.html()).collect();
    for element in select(page, "*") {
        let attributes = element.value().attrs();
        found.extend(
            attributes
                .filter(|(name, value)| match *name {
                    "href" | "xlink:href" => !value.starts_with('#'),
                    name => name.starts_with("on") || name.starts_with("src"),
                })
                .map(|(name, value)| format!("{name}={value}")),
        );
    }
    for style in texts(page, "style") {
        let references = ["url(", "@import", "//", "image("];
        found.extend(
            references
                .into_iter()
                .filter(|what| style.contains(what))
                .map(str::to_owned),
        );
    }
    found
}

#[test]
fn nothing_is_fetched_and_nothing_runs() {
    let reports = published::PUBLISHED
        .iter()
        .map(|table| report(table.scenario, 3, steady));
    let document = document(reports.collect());
    assert_eq!(active(&parsed(&document)), Vec::<String>::new());
    // Control.
    let other = "<style>p { background: url(x) }</style><img src=x><p onclick=x><a href=/>x</a>";
    assert_eq!(active(&Html::parse_document(other)).len(), 5);
}

#[test]
fn names_are_text_and_not_markup() {
    let hostile = r#"<script>alert("1")</script>'&amp;"><img src=x onerror=y>"#;
    let mut report = report("flood", 3, steady);
    for name in [
        &mut report.scenario,
        &mut report.question,
        &mut report.notes[0],
    ] {
        hostile.clone_into(name);
    }
    report.conditions = IndexMap::from([(hostile.to_owned(), hostile.to_owned())]);
    report.metrics["pps"].title = hostile.to_owned();
    report.metrics["pps"].unit = hostile.to_owned();
    report.refused.push(Refusal {
        case: hostile.to_owned(),
        mode: hostile.to_owned(),
        round: 1,
        why: hostile.to_owned(),
    });
    let case = &mut report.cases[0];
    hostile.clone_into(&mut case.case);
    case.modes = case
        .modes
        .drain(..)
        .map(|(mode, m)| (hostile.to_owned() + &mode, m))
        .collect();
    let mut document = document(vec![report]);
    for name in [
        &mut document.command,
        &mut document.rxsteer,
        &mut document.host.kernel,
        &mut document.host.nic,
    ] {
        hostile.clone_into(name);
    }
    let page = parsed(&document);
    assert_eq!(active(&page), Vec::<String>::new());
    for (selector, at_least) in [
        ("pre", 1),
        ("dd", 3),
        ("h2", 1),
        ("h3", 2),
        ("figcaption b", 2),
        (".mode", 3),
        (".refused td", 3),
        (".note", 1),
    ] {
        let found = texts(&page, selector);
        let hostile = found.iter().filter(|text| text.contains(hostile)).count();
        assert!(hostile >= at_least, "{selector}: {found:?}");
    }
    let labels = select(&page, "svg[role=img]");
    assert!(
        labels
            .iter()
            .any(|svg| svg.attr("aria-label").unwrap().starts_with(hostile))
    );
}

/// One round, so no interval; zeros; a case with all measurements of a mode refused, and one
/// without any figure.
#[test]
fn what_is_missing_is_said_and_breaks_nothing() {
    let mut report = report("flood", 1, |mode, _| if mode == "none" { 0.0 } else { 5.0 });
    report.cases[1].modes.clear();
    report.cases[1].ratios.clear();
    for (case, mode) in [(CASES[0], "cpumap"), (CASES[1], "none")] {
        report.refused.push(Refusal {
            case: case.to_owned(),
            mode: mode.to_owned(),
            round: 1,
            why: "cpumap was not in effect".to_owned(),
        });
    }
    let empty = Report {
        scenario: "follow".to_owned(),
        cases: Vec::new(),
        metrics: IndexMap::new(),
        ..self::report("", 1, steady)
    };
    let document = document(vec![report, empty]);
    let page = parsed(&document);
    let missing: Vec<String> = texts(&page, "figure .row")
        .into_iter()
        .filter(|row| row.contains("no figure"))
        .collect();
    assert_eq!(missing, ["cpumap no figure", "cpumap no figure"]);
    assert_eq!(texts(&page, ".refused tbody tr").len(), 2);
    assert_eq!(
        texts(&page, ".matrix .unknown").len(),
        2,
        "one mode, two metrics"
    );
    assert!(texts(&page, "p").contains(&"Nothing is compared here.".to_owned()));
    for word in ["NaN", "inf"] {
        assert!(!page.root_element().html().contains(word), "{word}");
    }
}

#[test]
fn page_and_json_are_written_side_by_side() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.html");
    let files = Files::at(&path).unwrap();
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        0,
        "nothing before there is something"
    );
    for scenarios in [vec!["flood"], vec!["flood", "rr"]] {
        let reports = scenarios.iter().map(|name| report(name, 3, steady));
        let document = document(reports.collect());
        files.write(&document).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), page(&document));
        let read = rxlab::bench::report::compare::read(&folder.path().join("r.json")).unwrap();
        assert_eq!(json(&read).unwrap(), json(&document).unwrap());
    }
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        2,
        "and nothing besides"
    );
}

fn rxlab(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rxlab"))
        .args(args)
        .output()
        .unwrap()
}

/// Fails at once, before the host's requirements are checked.
#[test]
fn a_report_that_cannot_be_written_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let occupied = folder.path().join("there.html");
    fs::create_dir(&occupied).unwrap();
    fs::create_dir(folder.path().join("beside.json")).unwrap();
    for (path, why) in [
        (folder.path().join("nowhere/r.html"), "cannot write"),
        (occupied, "exists and is not a file"),
        (
            folder.path().join("beside.html"),
            "beside.json exists and is not a file",
        ),
    ] {
        let short = [
            "bench",
            "record",
            "--rounds=1",
            "--seconds=0.01",
            "--report",
        ];
        let output = rxlab(&[&short[..], &[path.to_str().unwrap()]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(why), "{stderr}");
        assert!(!stderr.contains("measurements"), "{stderr}");
    }
}

/// Exit status and output of `bench compare`.
fn compare(old: &Document, new: &Document, option: Option<&str>) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    let write = |name, document| {
        let path = folder.path().join(name);
        fs::write(&path, json(document).unwrap()).unwrap();
        path
    };
    let paths = [write("old.json", old), write("new.json", new)];
    let [old, new] = paths.each_ref().map(|path: &_| Path::to_str(path).unwrap());
    let args: Vec<&str> = ["bench", "compare", old, new]
        .into_iter()
        .chain(option)
        .collect();
    let output = rxlab(&args);
    let printed = [output.stdout, output.stderr].concat();
    (
        output.status.code().unwrap(),
        String::from_utf8(printed).unwrap(),
    )
}

#[test]
fn a_report_agrees_with_itself() {
    let document = document(vec![report("flood", 5, steady)]);
    let (status, printed) = compare(&document, &document, None);
    assert_eq!(
        printed.lines().last(),
        Some("8 ratios agree, 0 differ"),
        "{printed}"
    );
    assert_eq!(status, 0);
    assert!(
        !printed.contains("not the same") && !printed.contains("Only the"),
        "{printed}"
    );
}

#[test]
fn a_difference_is_found_and_comes_first() {
    let old = document(vec![report("flood", 5, steady), report("rr", 5, steady)]);
    let mut changed = report("rr", 5, steady);
    let ratio = &mut changed.cases[1].ratios["us"]["none"];
    ratio.median *= 1.5;
    ratio.interval = ratio.interval.map(|(low, high)| (low * 1.5, high * 1.5));
    let new = document(vec![report("flood", 5, steady), changed]);
    let (status, printed) = compare(&old, &new, None);
    assert_eq!(
        printed.lines().last(),
        Some("15 ratios agree, 1 differ"),
        "{printed}"
    );
    assert_eq!(status, 1);
    let first = printed.lines().nth(1).unwrap();
    for word in ["differs", "rr", CASES[1], "us", "none"] {
        assert!(first.contains(word), "{word}: {first}");
    }
    let (status, printed) = compare(&old, &new, Some("--json"));
    assert_eq!(status, 1);
    let printed: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(printed["ratios"][0]["agrees"], false);
    assert_eq!(printed["ratios"][0]["mode"], "none");
    assert_eq!(printed["ratios"][1]["agrees"], true);
}

#[test]
fn what_only_one_report_has_is_said_once() {
    let mut old = document(vec![report("flood", 5, steady), report("rr", 5, steady)]);
    let mut new = document(vec![report("flood", 5, steady)]);
    new.scenarios[0].cases.remove(1);
    old.scenarios[0].cases[0].ratios["us"].shift_remove("none");
    new.host.cpu = "Another CPU".to_owned();
    let (status, printed) = compare(&old, &new, None);
    assert_eq!(status, 0, "{printed}");
    let lines: Vec<&str> = printed.lines().collect();
    assert!(
        lines.contains(&"The machines are not the same: cpu."),
        "{printed}"
    );
    let only: Vec<&str> = lines
        .iter()
        .copied()
        .filter(|line| line.starts_with("Only"))
        .collect();
    assert_eq!(
        only,
        [
            format!("Only the old report has flood, {}.", CASES[1]),
            "Only the old report has rr.".to_owned(),
            format!("Only the new report has flood, {}, us, none.", CASES[0]),
        ]
    );
}

#[test]
fn nothing_in_common_is_no_agreement() {
    let document = |scenario| self::document(vec![report(scenario, 5, steady)]);
    let (status, printed) = compare(&document("flood"), &document("rr"), None);
    assert_eq!(status, 1);
    assert!(printed.contains("no ratio in common"), "{printed}");
    let output = rxlab(&["bench", "compare", "Cargo.toml", "Cargo.toml"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr.contains("Cargo.toml is no report of rxlab bench"),
        "{stderr}"
    );
}
