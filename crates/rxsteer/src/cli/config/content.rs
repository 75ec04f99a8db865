// SPDX-License-Identifier: MIT OR Apache-2.0
//! The content of configuration files.

use std::collections::BTreeMap;
use std::path::Path;

use clap::{Args, Command, FromArgMatches};
use serde::Deserialize;
use toml::de::{DeTable, DeValue, ValueDeserializer};
use toml::{Spanned, Value};

use super::keys::Keys;
use super::syntax::{Mistake, mistake, text};
use crate::busy_poll::rule::Rule;
use crate::cli::places::{Places, line_of, place};
use crate::cli::run::RunArgs;
use crate::daemon::options::device_name;

/// Keys besides options.
const TABLES: [&str; 2] = ["devices", "busy_poll"];

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
        let table = DeTable::parse(text).map_err(|e| vec![mistake(text, &e)])?;
        let keys = Keys::of(RunArgs::augment_args(Command::new("run")), &TABLES);
        let (mut content, mut mistakes) = (Self::default(), Vec::new());
        for (key, value) in table.into_inner() {
            let (name, line) = (key.get_ref().as_ref(), line_of(text, key.span().start));
            let added = match name {
                "busy_poll" => rules(text, line, value).map(|rules| content.busy_poll = rules),
                _ => self::value(text, value).and_then(|value| {
                    let added = match name {
                        "devices" => devices(&value).map(|names| content.devices = Some(names)),
                        _ => keys.values(name, &value).map(|(id, values)| {
                            content.defaults.insert(id, values);
                        }),
                    };
                    added.map_err(|why| vec![(line, why)])
                }),
            };
            mistakes.extend(added.err().unwrap_or_default());
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

/// A value without places.
fn value(text: &str, value: Spanned<DeValue<'_>>) -> Result<Value, Vec<Mistake>> {
    Value::deserialize(ValueDeserializer::from(value)).map_err(|e| vec![mistake(text, &e)])
}

/// The rules of `busy_poll`, a key in this line.
fn rules(text: &str, line: usize, value: Spanned<DeValue<'_>>) -> Result<Vec<Rule>, Vec<Mistake>> {
    let no_tables = || {
        let why = "busy_poll: write each rule as a table: a line [[busy_poll]], then a line for each of \
                   its keys, as usecs = 50";
        Err(vec![(line, why.to_owned())])
    };
    let DeValue::Array(tables) = value.into_inner() else {
        return no_tables();
    };
    let keys = Keys::of(Rule::augment_args(Command::new("poll")), &[]);
    let (mut rules, mut mistakes) = (Vec::new(), Vec::new());
    for table in tables {
        let line = line_of(text, table.span().start);
        let DeValue::Table(table) = table.into_inner() else {
            return no_tables();
        };
        match rule(text, line, &keys, table) {
            Ok(rule) => rules.push(rule),
            Err(found) => mistakes.extend(found),
        }
    }
    let named = |(line, why)| (line, format!("[[busy_poll]]: {why}"));
    match &mistakes[..] {
        [] => Ok(rules),
        _ => Err(mistakes.into_iter().map(named).collect()),
    }
}

/// The rule of a table in this line.
fn rule(text: &str, line: usize, keys: &Keys, table: DeTable<'_>) -> Result<Rule, Vec<Mistake>> {
    let (mut given, mut names, mut mistakes) = (Vec::new(), Vec::new(), Vec::new());
    for (key, value) in table {
        let (name, line) = (key.get_ref().to_string(), line_of(text, key.span().start));
        let arguments = self::value(text, value).and_then(|value| {
            let arguments = keys.arguments(&name, &value);
            arguments.map_err(|why| vec![(line, why)])
        });
        match arguments {
            Ok(arguments) => given.extend(arguments),
            Err(found) => mistakes.extend(found),
        }
        names.push(name);
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    mistakes.extend(keys.missing(&names).map(|why| (line, why)));
    if !mistakes.is_empty() {
        return Err(mistakes);
    }
    let whole = |why: String| vec![(line, why)];
    let matches = keys.matches(given).map_err(|e| whole(e.to_string()))?;
    let rule = Rule::from_arg_matches(&matches).map_err(|e| whole(e.to_string()))?;
    match rule.objection() {
        None => Ok(rule),
        Some(objection) => Err(whole(objection)),
    }
}
