// SPDX-License-Identifier: MIT OR Apache-2.0
//! The report of `bench`, and `bench compare`. Needs no root.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use indexmap::IndexMap;
use rxlab::bench::experiment::{detail, headline};
use rxlab::bench::report::document::SUBJECT;
use rxlab::bench::report::document::{Better, Document, Refusal, Report, Rounds};
use rxlab::bench::report::files::{self, json};
use rxlab::bench::report::host::Host;

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
    let text = document.render();
    for (mode, case) in [("cpumap", CASES[0]), ("none", CASES[1])] {
        assert!(text.contains(mode) && text.contains(case), "{text}");
    }
    assert!(text.contains("cpumap was not in effect"), "{text}");
    for word in ["NaN", "inf"] {
        assert!(!text.contains(word), "{word}: {text}");
    }
}

#[test]
fn a_report_is_written_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.json");
    files::writable(&path).unwrap();
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        0,
        "nothing before there is something"
    );
    for scenarios in [vec!["flood"], vec!["flood", "rr"]] {
        let reports = scenarios.iter().map(|name| report(name, 3, steady));
        let document = document(reports.collect());
        files::write(&path, &json(&document).unwrap()).unwrap();
        let read = rxlab::bench::report::compare::read(&path).unwrap();
        assert_eq!(json(&read).unwrap(), json(&document).unwrap());
    }
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        1,
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
    let occupied = folder.path().join("there.json");
    fs::create_dir(&occupied).unwrap();
    for (path, why) in [
        (folder.path().join("nowhere/r.json"), "cannot write"),
        (occupied, "exists and is not a file"),
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
