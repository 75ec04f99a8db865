// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks the models of the rule of order (`model/`) exhaustively, and each model without one of
//! its guards: an overtaken packet, or a flow that never moves, must be found then.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rxlab::testing::is_short;

/// A `.pml` file and its expected results. Flags are preprocessor macros, without `-D`.
struct Model {
    file: &'static str,
    /// Variants of kernel or load without errors.
    right: &'static [&'static [&'static str]],
    /// Those with more packets, for `make long`.
    long: &'static [&'static [&'static str]],
    /// Flags that disable a guard or ask for a state, with the variants in which that shows.
    wrong: &'static [(&'static str, &'static [&'static str])],
}

const BACKLOG: Model = Model {
    file: "backlog.pml",
    right: &[
        &["FRAMES=3", "KERNEL=601", "LOSSES"],
        &["FRAMES=3", "KERNEL=612", "LOSSES"],
        &["FRAMES=3", "KERNEL=612", "VANISH"],
        &["FRAMES=3", "KERNEL=615", "VANISH"],
    ],
    long: &[
        &["FRAMES=4", "KERNEL=601", "LOSSES"],
        &["FRAMES=4", "KERNEL=612", "LOSSES"],
        &["FRAMES=4", "KERNEL=612", "VANISH"],
        &["FRAMES=4", "KERNEL=615", "VANISH"],
    ],
    wrong: &[
        ("NO_TAKEN", &["KERNEL=615"]),
        ("NO_TAKEN_FIRST", &["KERNEL=615"]),
        ("NO_STATE", &["KERNEL=615"]),
        ("NO_IN_LOOP", &["KERNEL=612"]),
        ("NO_QTAIL", &["KERNEL=615"]),
        // With the proof "blocked", losses count as vanished frames if nothing reports them.
        ("NO_LOST", &["KERNEL=612", "LOSSES", "NO_SETTLE"]),
        ("NO_ON_RQ", &["KERNEL=612"]),
        ("NO_FLUSHED", &["KERNEL=615"]),
        ("NO_SETTLE", &["KERNEL=612", "VANISH"]),
        ("NO_GRO_EMPTY", &["KERNEL=615"]),
        ("NO_RX_LIST", &["KERNEL=615"]),
        ("NO_BEFORE", &["KERNEL=612"]),
        ("REACH_OUT", &["KERNEL=615"]),
        ("REACH_BACK", &["KERNEL=615"]),
    ],
};

const THREAD: Model = Model {
    file: "thread.pml",
    right: &[&[], &["HZ1000"], &["PROGRESS"], &["PROGRESS", "HZ1000"]],
    long: &[],
    wrong: &[
        ("NO_GRO_EMPTY", &[]),
        ("NO_RX_LIST", &[]),
        ("NO_BEFORE", &[]),
        ("NO_JIFFY", &["HZ1000"]),
        ("NO_FLUSH_COUNT", &["HZ1000"]),
        ("NO_WHOLE_FLUSH_COUNT", &["HZ1000"]),
        ("NO_GRO_OLD", &["PROGRESS", "HZ1000"]),
    ],
};

const INLINE: Model = Model {
    file: "inline.pml",
    right: &[&[]],
    long: &[],
    wrong: &[
        ("NO_CPU", &[]),
        ("NO_GRO", &[]),
        ("NO_HASH", &[]),
        ("NO_RX_LIST", &[]),
        ("NO_POLL_BEFORE", &[]),
        ("NO_BOUNDARY", &[]),
        ("NO_BUDGET", &[]),
        ("REACH_OUT", &[]),
        ("REACH_BACK", &[]),
    ],
};

const EPOCH: Model = Model {
    file: "epoch.pml",
    right: &[&[]],
    long: &[],
    wrong: &[
        ("NO_RETURN", &[]),
        ("NO_DRAIN", &[]),
        ("NO_GRACE", &[]),
        ("NO_GRACE_AFTER", &[]),
        ("NO_SETTLE", &[]),
        ("REACH_MOVE", &[]),
    ],
};

const ENTRY: Model = Model {
    file: "entry.pml",
    right: &[&["FRAMES=4"], &["FRAMES=2", "LOSSES"]],
    long: &[],
    wrong: &[
        ("NO_CLOSE", &["FRAMES=4"]),
        ("NO_DRAIN", &["FRAMES=4"]),
        ("NO_GRACE", &["FRAMES=4"]),
        ("NO_EMPTY", &["FRAMES=4"]),
        ("NO_RESET", &["FRAMES=4"]),
        ("NO_IN_LOOP_FIRST", &["FRAMES=4"]),
        ("NO_LOST_FIRST", &["FRAMES=2", "LOSSES"]),
        ("REACH_NEW", &["FRAMES=4"]),
    ],
};

const RING: Model = Model {
    file: "ring.pml",
    right: &[&[]],
    long: &[],
    wrong: &[("NO_LIMIT", &[]), ("NO_SLACK", &[])],
};

const OVERLOAD: Model = Model {
    file: "overload.pml",
    right: &[&[]],
    long: &[],
    wrong: &[("NO_SHED", &[])],
};

const ORDER: Model = Model {
    file: "order.pml",
    right: &[&[]],
    long: &[],
    wrong: &[
        ("NO_RULE", &[]),
        ("REACH_INLINE_0", &[]),
        ("REACH_INLINE_1", &[]),
        ("REACH_0_INLINE", &[]),
        ("REACH_0_1", &[]),
        ("REACH_1_INLINE", &[]),
        ("REACH_1_0", &[]),
    ],
};

const SOFTNET: Model = Model {
    file: "softnet.pml",
    right: &[
        &["FRAMES=3"],
        &["FRAMES=3", "LOSSES"],
        &["FRAMES=3", "NAPI"],
        &["FRAMES=3", "NAPI", "LOSSES"],
        &["FRAMES=3", "NAPI", "LOST"],
        &["FRAMES=2", "OTHERS=2", "SHARED", "FULL"],
        &[
            "FRAMES=2", "OTHERS=2", "SHARED", "NAPI", "POLLS=2", "NOISE=0",
        ],
        &["FRAMES=3", "DOWN"],
        &["FRAMES=3", "NAPI", "DOWN"],
        &["FRAMES=2", "NAPI", "DOWN", "LOSSES"],
        &["FRAMES=2", "OTHERS=1", "SHARED", "DOWN", "NOISE=0"],
        &[
            "FRAMES=2", "OTHERS=1", "SHARED", "NAPI", "POLLS=2", "DOWN", "NOISE=0",
        ],
    ],
    long: &[
        &["FRAMES=4"],
        &["FRAMES=4", "NAPI"],
        &["FRAMES=2", "OTHERS=2", "SHARED", "DOWN", "NOISE=0"],
        &["FRAMES=3", "DOWN", "LOSSES"],
        &[
            "FRAMES=2", "OTHERS=2", "SHARED", "NAPI", "POLLS=2", "NOISE=0", "FULL",
        ],
    ],
    wrong: &[
        ("NO_HEAD", &["FRAMES=3"]),
        ("NO_NOW", &["FRAMES=3"]),
        ("NO_LATER", &["FRAMES=3"]),
        ("NO_LATE", &["FRAMES=3", "NAPI", "LOST"]),
        ("NO_SHED", &["FRAMES=3", "NAPI", "LOST"]),
        ("NO_GRACE", &["FRAMES=3", "NAPI", "LOST"]),
        ("NO_MIXED", &["FRAMES=2", "OTHERS=2", "SHARED"]),
        ("NO_ENTERED", &["FRAMES=2", "OTHERS=2", "SHARED"]),
        ("NO_SETTLED", &["FRAMES=2", "OTHERS=2", "SHARED"]),
        ("NO_STAY", &["FRAMES=2", "OTHERS=2", "SHARED"]),
        ("NO_UNMIX_LAST", &["FRAMES=3", "OTHERS=2", "SHARED", "FULL"]),
        ("NO_DOWN", &["FRAMES=2", "NAPI", "DOWN"]),
        ("NO_HELD", &["FRAMES=2", "NAPI", "DOWN"]),
        ("NO_DISTRUST", &["FRAMES=2", "NAPI", "DOWN"]),
        ("NO_SHED_PASSED", &["FRAMES=3", "DOWN"]),
        ("REACH_OUT", &["FRAMES=3"]),
        ("REACH_BACK", &["FRAMES=3"]),
    ],
};

const ALL: [&Model; 9] = [
    &BACKLOG, &THREAD, &INLINE, &EPOCH, &ENTRY, &RING, &OVERLOAD, &ORDER, &SOFTNET,
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model")
}

/// The macros of a model's `#ifdef`s and `#ifndef`s that disable a guard or ask for a state.
fn switches(file: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(folder().join(file)).unwrap();
    text.lines()
        .filter(|line| line.starts_with("#if"))
        .flat_map(|line| line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')))
        .filter(|word| word.starts_with("NO_") || word.starts_with("REACH_"))
        .map(str::to_owned)
        .collect()
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

/// Whether spin and a C compiler are installed; reports the test as not run otherwise.
fn can_run(test: &str) -> bool {
    for program in ["spin", "cc"] {
        if !has(program) {
            rxlab::testing::not_run(test, &format!("there is no {program} here"));
            return false;
        }
    }
    true
}

/// How a model is searched.
#[derive(Clone, Copy)]
struct Search {
    /// Of the C compiler.
    optimization: &'static str,
    /// Entries of the hash table, as a power of two; each takes 8 bytes.
    entries: u32,
}

/// The largest search has 10 million states.
const WHOLE: Search = Search {
    optimization: "-O1",
    entries: 25,
};

/// An error is found early: compiling takes most of the time.
const UNTIL_AN_ERROR: Search = Search {
    optimization: "-O0",
    entries: 20,
};

/// Searches all states; returns the first error, if any.
fn check(file: &str, search: Search, flags: &[&str]) -> Option<String> {
    let folder = folder();
    let scratch = tempfile::tempdir().unwrap();
    let run = |program: &str, args: &[String]| {
        let output = Command::new(program)
            .args(args)
            .current_dir(&scratch)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "{program} {args:?}: {text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        text
    };
    let mut args = vec!["-a".to_owned()];
    args.extend(flags.iter().map(|flag| format!("-D{flag}")));
    args.push(folder.join(file).display().to_string());
    run("spin", &args);
    // MEMLIM: megabytes. COLLAPSE would halve the memory, and double the time.
    let args = format!(
        "{} -w -DSAFETY -DMEMLIM=2400 -o pan pan.c",
        search.optimization
    );
    run(
        "cc",
        &args.split(' ').map(str::to_owned).collect::<Vec<_>>(),
    );
    let pan = scratch.path().join("pan").display().to_string();
    let report = run(
        &pan,
        &["-m100000".to_owned(), format!("-w{}", search.entries)],
    );
    if report.contains("errors: 0") {
        // A truncated search proves nothing.
        for cut in ["max search depth too small", "Search not completed"] {
            assert!(!report.contains(cut), "{file} {flags:?}: {report}");
        }
        return None;
    }
    let error = report.lines().find(|line| line.starts_with("pan:1:"));
    Some(error.expect("an error is named").to_owned())
}

/// Checks the model with each of these flags, on all CPUs; returns the first error of each.
fn check_all<'a>(
    file: &str,
    search: Search,
    all: &[Vec<&'a str>],
) -> Vec<(Vec<&'a str>, Option<String>)> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut results = Vec::new();
        while let Some(flags) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            results.push((flags.clone(), check(file, search, flags)));
        }
        results
    };
    let nr_workers = thread::available_parallelism().unwrap().get();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..nr_workers).map(|_| scope.spawn(worker)).collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("its message is above"))
            .collect()
    })
}

fn holds(model: &Model) {
    if !can_run(model.file) {
        return;
    }
    let long = if is_short() { &[][..] } else { model.long };
    let all = model.right.iter().chain(long);
    let all: Vec<_> = all.map(|flags| flags.to_vec()).collect();
    for (flags, error) in check_all(model.file, WHOLE, &all) {
        assert_eq!(error, None, "{} {flags:?}", model.file);
    }
}

fn mutants_die(model: &Model) {
    if !can_run(&format!("mutants of {}", model.file)) {
        return;
    }
    let with = |(switch, flags): &(&'static str, &[&'static str])| [&[*switch], *flags].concat();
    let all: Vec<_> = model.wrong.iter().map(with).collect();
    for (flags, error) in check_all(model.file, UNTIL_AN_ERROR, &all) {
        let error = error.unwrap_or_else(|| panic!("{} {flags:?}: no error", model.file));
        // The error is a violation of the rule, not a deadlock of the model.
        assert!(error.contains("assertion violated"), "{flags:?}: {error}");
    }
}

#[test]
fn every_guard_has_its_mutant() {
    let files: BTreeSet<_> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|file| file != "stack.pml")
        .collect();
    let checked: BTreeSet<_> = ALL.iter().map(|model| model.file.to_owned()).collect();
    assert_eq!(files, checked);
    for model in ALL {
        let mutants: BTreeSet<_> = model
            .wrong
            .iter()
            .map(|(name, _)| name.to_string())
            .collect();
        assert_eq!(mutants, switches(model.file), "{}", model.file);
    }
}

macro_rules! model {
    ($model:ident, $holds:ident, $mutants:ident) => {
        #[test]
        fn $holds() {
            holds(&$model);
        }

        #[test]
        fn $mutants() {
            mutants_die(&$model);
        }
    };
}

model!(BACKLOG, leaving_a_backlog, mutants_of_leaving_a_backlog);
model!(THREAD, the_thread_s_proofs, mutants_of_the_thread_s_proofs);
model!(INLINE, leaving_inline, mutants_of_leaving_inline);
model!(EPOCH, a_new_epoch, mutants_of_a_new_epoch);
model!(ENTRY, an_entry_made_anew, mutants_of_an_entry_made_anew);
model!(RING, the_limit, mutants_of_the_limit);
model!(OVERLOAD, shedding, mutants_of_shedding);
model!(ORDER, the_rule_of_order, mutants_of_the_rule_of_order);
model!(
    SOFTNET,
    leaving_in_softirq_mode,
    mutants_of_leaving_in_softirq_mode
);
