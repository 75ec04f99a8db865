// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keys of configuration files: the options of the command line by their names.

use std::error::Error;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::Value;

use crate::cli::example;

/// Similarity from which an unknown key is taken for a mistyped one, as in clap.
const SIMILAR: f64 = 0.7;

/// The keys that stand for a command's options.
pub(super) struct Keys {
    command: Command,
    /// Keys besides those of options, for messages.
    others: &'static [&'static str],
}

impl Keys {
    pub(super) fn of(command: Command, others: &'static [&'static str]) -> Self {
        Self {
            command: command.no_binary_name(true),
            others,
        }
    }

    /// The argument's id and the values of a key.
    ///
    /// # Errors
    /// What is wrong with the key or its value, with what to write instead.
    pub(super) fn values(
        &self,
        name: &str,
        value: &Value,
    ) -> Result<(String, Vec<String>), String> {
        let arg = self.argument(name)?;
        let values = self.texts(arg, name, value)?;
        self.check(arg, name, &values)?;
        Ok((arg.get_id().to_string(), values))
    }

    /// The arguments of the command line that stand for a key with this value.
    ///
    /// # Errors
    /// As [`Self::values`].
    pub(super) fn arguments(&self, name: &str, value: &Value) -> Result<Vec<String>, String> {
        let (_, values) = self.values(name, value)?;
        let arg = self.argument(name)?;
        Ok(given(arg, name, &values))
    }

    /// The command with these arguments.
    ///
    /// # Errors
    /// When they don't fit together.
    pub(super) fn matches(&self, given: Vec<String>) -> clap::error::Result<ArgMatches> {
        self.command.clone().try_get_matches_from(given)
    }

    /// What to add to these keys: those that are required.
    pub(super) fn missing<'a>(&'a self, names: &'a [&str]) -> impl Iterator<Item = String> + 'a {
        let required = self.command.get_arguments().filter(|a| a.is_required_set());
        let missing = required.filter(|a| !names.contains(&a.get_long().unwrap_or_default()));
        missing.map(|arg| {
            let name = arg.get_long().unwrap_or_default();
            format!("{name} is missing: add it, as {}", example::line(arg))
        })
    }

    /// The option that a key names.
    fn argument(&self, name: &str) -> Result<&Arg, String> {
        if name == "config" {
            return Err("config: a file can't name another one".to_owned());
        }
        let long = |arg: &&Arg| arg.get_long().is_some_and(|long| long != "config");
        let args = || self.command.get_arguments().filter(long);
        if let Some(arg) = args().find(|arg| arg.get_long() == Some(name)) {
            return Ok(arg);
        }
        let mut keys: Vec<_> = args().filter_map(Arg::get_long).collect();
        keys.extend(self.others);
        Err(unknown_key(name, &keys))
    }

    /// A key's values as on the command line, and those of a flag.
    fn texts(&self, arg: &Arg, name: &str, value: &Value) -> Result<Vec<String>, String> {
        let flag = !arg.get_action().takes_values();
        let expected = |what: &str| {
            let as_in = example::line(arg);
            Err(format!("{name}: {what} is expected, as in {as_in}"))
        };
        Ok(match value {
            Value::Boolean(value) if flag => vec![value.to_string()],
            Value::Boolean(true) if may_be_left_out(arg) => self.without_value(arg, name)?,
            Value::Boolean(false) if may_be_left_out(arg) => Vec::new(),
            _ if flag => return expected("true or false"),
            Value::String(text) => vec![text.clone()],
            Value::Integer(number) => vec![number.to_string()],
            Value::Array(all) if all.len() > 1 && !is_list(arg) => return expected("one value"),
            Value::Array(all) => {
                let each = all.iter().map(|value| self.texts(arg, name, value));
                each.collect::<Result<Vec<_>, _>>()?.concat()
            }
            _ if may_be_left_out(arg) => return expected("true, false or a text"),
            _ => return expected("a text or a number"),
        })
    }

    /// The values that an option has on the command line without one.
    fn without_value(&self, arg: &Arg, name: &str) -> Result<Vec<String>, String> {
        let matches = self.matches(vec![format!("--{name}")]);
        let matches = matches.map_err(|e| e.to_string())?;
        let values = matches.get_raw(arg.get_id().as_str()).into_iter().flatten();
        Ok(values
            .map(|value| value.to_string_lossy().into_owned())
            .collect())
    }

    /// Checks the values of an option alone.
    fn check(&self, arg: &Arg, name: &str, values: &[String]) -> Result<(), String> {
        let command = self.command.clone().mut_args(|arg| arg.required(false));
        let checked = command.try_get_matches_from(given(arg, name, values));
        checked.map(|_| ()).map_err(|e| why(name, &e))
    }
}

/// The arguments for these values of an option.
fn given(arg: &Arg, name: &str, values: &[String]) -> Vec<String> {
    match arg.get_action().takes_values() {
        true => values
            .iter()
            .map(|value| format!("--{name}={value}"))
            .collect(),
        false if values == ["true"] => vec![format!("--{name}")],
        false => Vec::new(),
    }
}

/// Whether the option has any number of values.
fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// Whether the command line may have the option without a value.
fn may_be_left_out(arg: &Arg) -> bool {
    let number = arg.get_num_args();
    arg.get_action().takes_values() && number.is_some_and(|number| number.min_values() == 0)
}

/// Says that there is no such key, and which one may be meant.
fn unknown_key(name: &str, known: &[&str]) -> String {
    match nearest(name, known) {
        Some(nearest) => format!("unknown key {name:?}: did you mean {nearest:?}?"),
        None => format!("unknown key {name:?}; there are {}", known.join(", ")),
    }
}

/// The most similar word, if it is similar.
fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let similarity = |known: &&str| strsim::jaro_winkler(known, word);
    let similar = known
        .iter()
        .copied()
        .filter(|known| similarity(known) > SIMILAR);
    similar.max_by(|a, b| similarity(a).total_cmp(&similarity(b)))
}

/// What is wrong with the value of a key: the words of the option's parser, or clap's without the usage
/// of the command line, with the word that may be meant.
fn why(name: &str, error: &clap::Error) -> String {
    let value = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(value)) => value.as_str(),
        _ => "",
    };
    if let Some(why) = error.source() {
        return format!("{name}: '{value}': {why}");
    }
    let text = error.to_string();
    let message = text.trim_start_matches("error: ");
    let message = message.split("\n\n").next().unwrap_or_default();
    // A list of all values is a line of its own.
    let message = message.replace("\n  ", " ");
    match error.get(ContextKind::SuggestedValue) {
        Some(ContextValue::String(near)) => {
            let (first, _all) = message.split_once(" [possible").unwrap_or((&message, ""));
            format!("{first}: did you mean {near:?}?")
        }
        _ => message,
    }
}
