// SPDX-License-Identifier: MIT OR Apache-2.0
//! The README is short, and the links in the documents have targets.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn documents() -> Vec<PathBuf> {
    let mut documents = vec![];
    for folder in ["", "docs", "docs/manual"] {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                documents.push(path);
            }
        }
    }
    documents
}

/// Lines outside of blocks of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let fence = line.starts_with("```");
        is_code ^= fence;
        !is_code && !fence
    })
}

/// GitHub's anchors of the headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter_map(|line| line.strip_prefix('#'));
    let anchor = |heading: &str| {
        let title = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// Targets of `[…](…)`.
fn links(text: &str) -> Vec<String> {
    let text = prose(text).collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for (at, _) in text.match_indices("](") {
        let rest = &text[at + 2..];
        found.push(rest[..rest.find(')').unwrap()].to_owned());
    }
    found
}

/// Broken links, in words.
fn broken(document: &Path, text: &str) -> Vec<String> {
    let own = links(text).into_iter().filter(|link| !link.contains("://"));
    let broken = own.filter(|link| {
        let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = match path {
            "" => document.to_owned(),
            _ => document.parent().unwrap().join(path),
        };
        match fs::read_to_string(&target) {
            Err(_) => !target.is_dir(),
            Ok(text) => !anchor.is_empty() && !anchors(&text).contains(anchor),
        }
    });
    broken
        .map(|link| format!("{}: {link}", document.display()))
        .collect()
}

#[test]
fn links_lead_somewhere() {
    let documents = documents();
    assert!(documents.len() > 20, "{documents:?}");
    let mut nr_links = 0;
    let mut found = Vec::new();
    for document in documents {
        let text = fs::read_to_string(&document).unwrap();
        nr_links += links(&text).len();
        found.extend(broken(&document, &text));
    }
    assert!(nr_links > 60, "{nr_links} links found");
    assert!(found.is_empty(), "{found:#?}");
    // The control.
    let readme = root().join("README.md");
    for (link, nr) in [
        ("docs/order.md", 0),
        ("docs/odrer.md", 1),
        ("docs/order.md#no-such", 1),
    ] {
        assert_eq!(
            broken(&readme, &format!("[order]({link})")).len(),
            nr,
            "{link}"
        );
    }
}

#[test]
fn the_readme_is_short() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    assert!(
        readme.lines().count() < 150,
        "{} lines",
        readme.lines().count()
    );
}
