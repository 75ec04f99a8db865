// SPDX-License-Identifier: MIT OR Apache-2.0
//! The content of configuration files.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use clap::{Arg, Args, Command};
use serde::Deserialize;
use toml::{Spanned, Value};

use super::keys::{TABLES, default, unknown_key};
use crate::busy_poll::rule::Rule;
use crate::cli::places::{Places, line_of, place};
use crate::cli::run::RunArgs;

/// Content of a file besides options.
#[derive(Debug, Deserialize)]
struct Tables {
    devices: Option<Vec<String>>,
    #[serde(default)]
    busy_poll: Vec<Spanned<Rule>>,
}

/// The keys of each `[[busy_poll]]` table.
#[derive(Deserialize)]
struct RuleKeys {
    #[serde(default)]
    busy_poll: Vec<BTreeMap<Spanned<String>, Value>>,
}

/// Content of files.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub(super) devices: Option<Vec<String>>,
    pub(super) busy_poll: Vec<Rule>,
    pub(super) defaults: Defaults,
    pub(super) places: Places,
}

impl Content {
    /// Adds a later file: its keys replace those before, its rules are added to them.
    pub(super) fn add(&mut self, later: Self) {
        self.devices = later.devices.or(self.devices.take());
        self.busy_poll.extend(later.busy_poll);
        self.defaults.extend(later.defaults);
        self.places.extend(later.places);
    }
}

/// A mistake, after its line.
pub(super) type Mistake = (usize, String);

/// Values by the argument's id.
pub(super) type Defaults = BTreeMap<String, Vec<String>>;

/// What a file with this text has. All mistakes are returned, except those after one in the syntax or in
/// the tables.
pub(super) fn content_of(path: &Path, text: &str) -> Result<Content, Vec<Mistake>> {
    let line = |span: Range<usize>| line_of(text, span.start);
    let toml = |e: toml::de::Error| (e.span().map_or(1, line), e.message().to_owned());
    let keys: BTreeMap<Spanned<String>, Value> = toml::from_str(text).map_err(|e| vec![toml(e)])?;
    let command = RunArgs::augment_args(Command::new("run").no_binary_name(true));
    let (mut defaults, mut mistakes) = (Defaults::new(), Vec::new());
    let places = keys.keys().map(|key| {
        let place = place(path, line(key.span()));
        (key.get_ref().clone(), place)
    });
    let places = places.collect();
    for (key, value) in &keys {
        let name = key.get_ref().as_str();
        if TABLES.contains(&name) {
            continue;
        }
        match default(&command, name, value) {
            Ok((id, values)) => {
                defaults.insert(id, values);
            }
            Err(why) => mistakes.push((line(key.span()), why)),
        }
    }
    let unknown = unknown_rule_keys(text);
    let all_known = unknown.is_empty();
    mistakes.extend(unknown.into_iter().map(|(span, why)| (line(span), why)));
    let tables: Result<Tables, _> = toml::from_str(text).map_err(toml);
    match tables {
        Ok(tables) => {
            let rules = tables.busy_poll.into_iter().map(|rule| {
                let (span, rule) = (rule.span(), rule.into_inner());
                if let Some(objection) = rule.objection() {
                    mistakes.push((line(span), format!("[[busy_poll]]: {objection}")));
                }
                rule
            });
            let busy_poll = rules.collect();
            if mistakes.is_empty() {
                return Ok(Content {
                    devices: tables.devices,
                    busy_poll,
                    defaults,
                    places,
                });
            }
        }
        // An unknown key is an error of the tables too.
        Err(_) if !all_known => {}
        Err(mistake) => mistakes.push(mistake),
    }
    mistakes.sort();
    Err(mistakes)
}

/// Keys of `[[busy_poll]]` tables that no rule has.
fn unknown_rule_keys(text: &str) -> Vec<(Range<usize>, String)> {
    // Another mistake, which is reported for the tables.
    let Ok(RuleKeys { busy_poll }) = toml::from_str(text) else {
        return Vec::new();
    };
    let command = Rule::augment_args(Command::new("poll"));
    let known: Vec<&str> = command.get_arguments().filter_map(Arg::get_long).collect();
    let keys = busy_poll.iter().flat_map(BTreeMap::keys);
    let unknown = keys.filter(|key| !known.contains(&key.get_ref().as_str()));
    let why =
        |key: &Spanned<String>| format!("[[busy_poll]]: {}", unknown_key(key.get_ref(), &known));
    unknown.map(|key| (key.span(), why(key))).collect()
}
