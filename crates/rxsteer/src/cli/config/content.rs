// SPDX-License-Identifier: MIT OR Apache-2.0
//! The content of configuration files.

use std::collections::BTreeMap;
use std::path::Path;

use clap::{Args, Command, FromArgMatches};
use serde::Deserialize;
use toml::{Spanned, Value};

use super::keys::Keys;
use super::syntax::{Mistake, mistake, text};
use crate::busy_poll::rule::Rule;
use crate::cli::places::{Places, line_of, place};
use crate::cli::run::RunArgs;
use crate::daemon::options::device_name;

/// A table with the places of its keys.
type Table = BTreeMap<Spanned<String>, Value>;

/// Keys besides options.
const TABLES: [&str; 2] = ["devices", "busy_poll"];

/// The tables of `busy_poll`.
#[derive(Deserialize)]
struct Rules {
    #[serde(default)]
    busy_poll: Vec<Spanned<Table>>,
}

/// Content of files.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub(super) devices: Option<Vec<String>>,
    pub(super) busy_poll: Vec<Rule>,
    /// Values by the argument's id.
    pub(super) defaults: BTreeMap<String, Vec<String>>,
    pub(super) places: Places,
}

impl Content {
    /// What a file has.
    ///
    /// # Errors
    /// All mistakes in the order of their lines, except those after one in the syntax.
    pub(super) fn of(path: &Path, bytes: &[u8]) -> Result<Self, Vec<Mistake>> {
        let text = text(bytes).map_err(|mistake| vec![mistake])?;
        let table: Table = toml::from_str(text).map_err(|e| vec![mistake(text, &e)])?;
        let keys = Keys::of(RunArgs::augment_args(Command::new("run")), &TABLES);
        let (mut content, mut mistakes) = (Self::default(), Vec::new());
        for (key, value) in &table {
            let (name, line) = (key.get_ref().as_str(), line_of(text, key.span().start));
            let added = match name {
                "devices" => devices(value).map(|devices| content.devices = Some(devices)),
                "busy_poll" => match rules(text) {
                    Ok(rules) => {
                        content.busy_poll = rules;
                        Ok(())
                    }
                    Err(found) => {
                        mistakes
                            .extend(found.into_iter().map(|(at, why)| (at.unwrap_or(line), why)));
                        Ok(())
                    }
                },
                _ => keys.values(name, value).map(|(id, values)| {
                    content.defaults.insert(id, values);
                }),
            };
            mistakes.extend(added.err().map(|why| (line, why)));
            content.places.insert(name.to_owned(), place(path, line));
        }
        mistakes.sort();
        match &mistakes[..] {
            [] => Ok(content),
            _ => Err(mistakes),
        }
    }

    /// Adds a later file: its keys replace those before, its rules are added to them.
    pub(super) fn add(&mut self, later: Self) {
        self.devices = later.devices.or(self.devices.take());
        self.busy_poll.extend(later.busy_poll);
        self.defaults.extend(later.defaults);
        self.places.extend(later.places);
    }
}

/// The value of `devices`. As with options that are lists, one name needs no brackets.
fn devices(value: &Value) -> Result<Vec<String>, String> {
    let names = match value {
        Value::Array(names) => names.iter().map(Value::as_str).collect(),
        one => one.as_str().map(|name| vec![name]),
    };
    let names: Option<Vec<&str>> = names;
    let names = names.ok_or("devices: write names in quotes, as devices = [\"eth0\", \"eth1\"]")?;
    let checked = names
        .into_iter()
        .map(|name| device_name(name).map_err(|why| format!("devices: {name:?}: {why}")));
    checked.collect()
}

/// The rules of a text, or mistakes after their lines; without a line: of the key `busy_poll`.
fn rules(text: &str) -> Result<Vec<Rule>, Vec<(Option<usize>, String)>> {
    let tables: Result<Rules, _> = toml::from_str(text);
    let Ok(Rules { busy_poll }) = tables else {
        let why = "busy_poll: write each rule as a table: a line [[busy_poll]], then a line for each of \
                   its keys, as usecs = 50";
        return Err(vec![(None, why.to_owned())]);
    };
    let keys = Keys::of(Rule::augment_args(Command::new("poll")), &[]);
    let (mut rules, mut mistakes) = (Vec::new(), Vec::new());
    for table in &busy_poll {
        let line = |start| Some(line_of(text, start));
        match rule(&keys, table.get_ref()) {
            Ok(rule) => rules.push(rule),
            Err(found) => mistakes.extend(found.into_iter().map(|(at, why)| {
                let start = at.unwrap_or(table.span().start);
                (line(start), format!("[[busy_poll]]: {why}"))
            })),
        }
    }
    match &mistakes[..] {
        [] => Ok(rules),
        _ => Err(mistakes),
    }
}

/// The rule of a table, or mistakes after the place of their key; without a place: of the table.
fn rule(keys: &Keys, table: &Table) -> Result<Rule, Vec<(Option<usize>, String)>> {
    let (mut given, mut mistakes) = (Vec::new(), Vec::new());
    for (key, value) in table {
        match keys.arguments(key.get_ref(), value) {
            Ok(arguments) => given.extend(arguments),
            Err(why) => mistakes.push((Some(key.span().start), why)),
        }
    }
    let names: Vec<&str> = table.keys().map(|key| key.get_ref().as_str()).collect();
    mistakes.extend(keys.missing(&names).map(|why| (None, why)));
    if !mistakes.is_empty() {
        return Err(mistakes);
    }
    let whole = |why: String| vec![(None, why)];
    let matches = keys.matches(given).map_err(|e| whole(e.to_string()))?;
    let rule = Rule::from_arg_matches(&matches).map_err(|e| whole(e.to_string()))?;
    match rule.objection() {
        None => Ok(rule),
        Some(objection) => Err(whole(objection)),
    }
}
