// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where configuration files have their keys, for messages.

use std::collections::BTreeMap;
use std::path::Path;

use crate::daemon::contradiction::Contradiction;

/// File and line by key.
pub(super) type Places = BTreeMap<String, String>;

/// A line of a file, as compilers name it.
pub(super) fn place(path: &Path, line: usize) -> String {
    format!("{}:{line}", path.display())
}

/// The number of the line with this offset, from 1.
pub(super) fn line_of(text: &str, offset: usize) -> usize {
    let before = text.bytes().take(offset);
    before.filter(|byte| *byte == b'\n').count() + 1
}

/// A contradiction after the place of its first key that is in a file, with the places of its others.
pub(super) fn located(places: &Places, found: &Contradiction) -> String {
    let place = |key: &&'static str| Some((*key, places.get(*key)?));
    let mut keys = found.keys.iter().filter_map(place);
    let Some((first, place)) = keys.next() else {
        return found.why.clone();
    };
    let others = keys.map(|(key, place)| format!(", with {key} ({place})"));
    format!(
        "{place}: {first}{}: {}",
        others.collect::<String>(),
        found.why
    )
}
