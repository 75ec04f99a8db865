// SPDX-License-Identifier: MIT OR Apache-2.0
//! Limits on dependencies of folders (docs/architecture.md), cycles of files, and lines per file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Folders of `src/` and the folders that each may use. `rxsteer` stands for that crate.
const RXSTEER: &[(&str, &[&str])] = &[
    ("bpf", &[]),
    ("host", &[]),
    ("datapath", &["bpf", "host", "types"]),
    ("api", &["datapath", "host", "types"]),
    ("busy_poll", &["api", "bpf", "host", "types"]),
    ("napi", &["busy_poll", "host"]),
    ("metrics", &["api", "datapath"]),
    (
        "daemon",
        &["api", "busy_poll", "datapath", "host", "metrics", "types"],
    ),
    (
        "cli",
        &[
            "api",
            "busy_poll",
            "daemon",
            "datapath",
            "host",
            "napi",
            "types",
        ],
    ),
    ("main", &["rxsteer::cli"]),
];
const RXLAB: &[(&str, &[&str])] = &[
    ("lab", &["lab_skel", "rxsteer::host"]),
    ("bench", &["lab", "lab_skel", "rxsteer"]),
    ("demo", &["bench", "rxsteer"]),
    ("testing", &["bench", "lab", "probe_skel", "rxsteer"]),
    ("cli", &["bench", "demo", "lab", "rxsteer"]),
    ("main", &["rxlab", "rxsteer::cli"]),
];

/// Source code of a crate by module (`datapath::tables`), without comments.
type Files = BTreeMap<String, String>;

fn source(krate: &str) -> Files {
    fn read(folder: &Path, root: &Path, files: &mut Files) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                read(&path, root, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                files.insert(module(path.strip_prefix(root).unwrap()), code(&text));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(krate)
        .join("src");
    let mut files = Files::new();
    read(&root, &root, &mut files);
    files
}

/// `datapath/tables.rs` is `datapath::tables`, `datapath/mod.rs` is `datapath`.
fn module(path: &Path) -> String {
    let path: PathBuf = path.with_extension("");
    let names: Vec<_> = path.iter().map(|name| name.to_str().unwrap()).collect();
    match names.split_last() {
        Some((&"mod", parents)) => parents.join("::"),
        _ => names.join("::"),
    }
}

fn code(text: &str) -> String {
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The paths in a file below `root`, split into parts; a group in braces gives several.
fn paths(code: &str, root: &str) -> BTreeSet<Vec<String>> {
    let mut found = BTreeSet::new();
    let start = format!("{root}::");
    for (at, _) in code.match_indices(&start) {
        let before = code[..at].chars().next_back();
        if before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != ':' && c != '$') {
            expand(&code[at + start.len()..], &[], &mut found);
        }
    }
    found
}

/// Parses a path or a group of paths at the start of a text; returns the rest.
fn expand<'a>(mut text: &'a str, prefix: &[String], found: &mut BTreeSet<Vec<String>>) -> &'a str {
    let mut path = prefix.to_vec();
    loop {
        if let Some(group) = text.strip_prefix('{') {
            text = group;
            loop {
                text = text.trim_start_matches([' ', '\n', ',']);
                match text.strip_prefix('}') {
                    Some(rest) => return rest,
                    None if text.is_empty() => return text,
                    None => text = expand(text, &path, found),
                }
            }
        }
        let end = text
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(text.len());
        if end == 0 {
            // A glob or no path: skip one character, so that the loop ends.
            found.insert(path);
            return text.get(1..).unwrap_or_default();
        }
        path.push(text[..end].to_owned());
        text = &text[end..];
        match text.strip_prefix("::") {
            Some(rest) => text = rest,
            None => {
                found.insert(path);
                return text.strip_prefix(" as ").map_or(text, |renamed| {
                    renamed.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_')
                });
            }
        }
    }
}

/// Uses that the rules don't allow, in words.
fn violations(krate: &str, rules: &[(&str, &[&str])], files: &Files) -> Vec<String> {
    let mut found = Vec::new();
    for (module, code) in files.iter().filter(|(module, _)| *module != "lib") {
        let folder = module.split("::").next().unwrap();
        let Some((_, may)) = rules.iter().find(|(name, _)| *name == folder) else {
            found.push(format!("{krate}: {folder} has no rule"));
            continue;
        };
        let own = paths(code, "crate")
            .into_iter()
            .map(|path| path[..1].to_vec());
        let foreign = ["rxsteer", "rxlab"].into_iter().flat_map(|root| {
            let paths = paths(code, root).into_iter();
            paths.map(move |path| vec![root.to_owned(), path[0].clone()])
        });
        for path in own.chain(foreign).collect::<BTreeSet<_>>() {
            let whole = path.join("::");
            if path != [folder] && !may.iter().any(|may| whole == *may || path[0] == *may) {
                found.push(format!("{krate}: {module} may not use {whole}"));
            }
        }
    }
    found
}

/// Files that depend on themselves through others.
fn circles(files: &Files) -> Vec<String> {
    let modules: BTreeSet<&str> = files.keys().map(String::as_str).collect();
    let resolve = |path: &[String]| {
        let lengths = (1..=path.len()).rev();
        let mut names = lengths.map(|length| path[..length].join("::"));
        names.find_map(|name| modules.get(name.as_str()).copied())
    };
    let uses = |module: &str, code: &str| {
        let own: Vec<String> = module.split("::").map(str::to_owned).collect();
        // Unit tests may use more than their file.
        let code = code.split("#[cfg(test)]").next().unwrap();
        let mut paths = paths(code, "crate");
        let parent = &own[..own.len() - 1];
        for (root, base) in [("super", parent), ("self", &own[..])] {
            for path in self::paths(code, root) {
                paths.insert([base, &path[..]].concat());
            }
        }
        // A folder's mod.rs names its submodules without a prefix.
        let inside = modules.iter().filter_map(|other| {
            let name = other.strip_prefix(module)?.strip_prefix("::")?;
            (!name.contains("::")).then_some(name)
        });
        for name in inside {
            for path in self::paths(code, name) {
                paths.insert([&own[..], &[name.to_owned()], &path[..]].concat());
            }
        }
        let used = paths.iter().filter_map(|path| resolve(path));
        used.filter(|used| *used != module).collect::<BTreeSet<_>>()
    };
    let edges: BTreeMap<&str, BTreeSet<&str>> = files
        .iter()
        .map(|(module, code)| (module.as_str(), uses(module, code)))
        .collect();
    let reaches_itself = |start: &str| {
        let mut reached = BTreeSet::new();
        let mut next: Vec<&str> = edges[start].iter().copied().collect();
        while let Some(module) = next.pop() {
            if reached.insert(module) {
                next.extend(&edges[module]);
            }
        }
        reached.contains(start)
    };
    let circles = modules.iter().filter(|module| reaches_itself(module));
    circles.map(|module| (*module).to_owned()).collect()
}

#[test]
fn each_folder_uses_what_it_may() {
    for (krate, rules) in [("rxsteer", RXSTEER), ("rxlab", RXLAB)] {
        let files = source(krate);
        assert!(files.len() > 30, "{} files of {krate} found", files.len());
        assert_eq!(violations(krate, rules, &files), [""; 0]);
        // Control: one forbidden line, in any position.
        for line in [
            "use crate::daemon::options::Options;",
            "use crate::{\n    cpumask,\n    daemon::{options, steering},\n};",
            "fn f() { crate::daemon::run(); }",
        ] {
            let mut files = source("rxsteer");
            files.get_mut("host::caps").unwrap().push_str(line);
            let found = violations("rxsteer", RXSTEER, &files);
            assert!(
                found.contains(&"rxsteer: host::caps may not use daemon".to_owned()),
                "{line}: {found:?}"
            );
        }
    }
}

#[test]
fn no_files_use_each_other_in_a_circle() {
    for krate in ["rxsteer", "rxlab"] {
        assert_eq!(circles(&source(krate)), [""; 0], "{krate}");
    }
    // Control: one line closes a cycle.
    let mut files = source("rxsteer");
    let tables = files.get_mut("datapath::tables").unwrap();
    tables.insert_str(0, "use super::loaded::Datapath;\n");
    let found = circles(&files);
    for module in ["datapath::tables", "datapath::loaded"] {
        assert!(found.contains(&module.to_owned()), "{found:?}");
    }
}

/// Limit of lines per source file.
const LONGEST: usize = 600;

#[test]
fn no_file_is_long() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut folders = vec![
        root.join("crates"),
        root.join("scripts"),
        root.join("model"),
    ];
    let (mut long, mut nr_files) = (Vec::new(), 0);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                // Fixtures grow with the number of packets.
                if !path.ends_with("fixtures") {
                    folders.push(path);
                }
                continue;
            }
            let nr_lines = fs::read_to_string(&path).unwrap().lines().count();
            nr_files += 1;
            if nr_lines > LONGEST {
                long.push(format!("{}: {nr_lines} lines", path.display()));
            }
        }
    }
    assert!(nr_files > 150, "{nr_files} files found");
    assert!(long.is_empty(), "longer than {LONGEST} lines: {long:#?}");
}

/// Lines of C that stand where they may not: programs and maps in headers other than maps.h,
/// helpers and kernel reads in core/.
fn misplaced(path: &Path, text: &str) -> Vec<String> {
    let header = path.extension().is_some_and(|extension| extension == "h");
    let core = path.parent().is_some_and(|folder| folder.ends_with("core"));
    let may_not = |line: &str| {
        (header && !path.ends_with("maps.h") && line.contains("SEC("))
            || (core && (line.contains("bpf_") || line.contains("BPF_")))
    };
    let lines = text.lines().filter(|line| may_not(line));
    lines
        .map(|line| format!("{}: {line}", path.display()))
        .collect()
}

#[test]
fn programs_and_maps_are_where_they_are_looked_for() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
    let mut nr_files = 0;
    for folder in [root.clone(), root.join("core"), root.join("native")] {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                let text = fs::read_to_string(&path).unwrap();
                assert_eq!(misplaced(&path, &text), [""; 0]);
                nr_files += 1;
            }
        }
    }
    assert!(nr_files > 20, "{nr_files} files found");
    // The control.
    for (path, line) in [
        ("bpf/cpu.h", "SEC(\"tp_btf/napi_poll\")"),
        ("bpf/core/steer.h", "now = bpf_ktime_get_ns();"),
        ("bpf/core/steer.h", "b = BPF_CORE_READ(task, pid);"),
    ] {
        assert_eq!(misplaced(Path::new(path), line).len(), 1, "{path}");
    }
    assert!(misplaced(Path::new("bpf/maps.h"), "} cpus SEC(\".maps\");").is_empty());
}
