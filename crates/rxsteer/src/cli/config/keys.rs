// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keys of configuration files: the options of the command line by their names.

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};
use toml::Value;

/// Keys besides options.
pub(super) const TABLES: [&str; 2] = ["devices", "busy_poll"];

/// Similarity from which an unknown key is taken for a mistyped one, as in clap.
const SIMILAR: f64 = 0.7;

/// The argument's id and the values of a key.
pub(super) fn default(
    command: &Command,
    name: &str,
    value: &Value,
) -> Result<(String, Vec<String>), String> {
    let arg = argument(command, name)?;
    let values = values(command, arg, name, value)?;
    check(command, arg, name, &values)?;
    Ok((arg.get_id().to_string(), values))
}

/// The option that a key names.
fn argument<'a>(command: &'a Command, name: &str) -> Result<&'a Arg, String> {
    if name == "config" {
        return Err("config: a file can't name another one".to_owned());
    }
    let long = |arg: &&'a Arg| arg.get_long().is_some_and(|long| long != "config");
    let args = || command.get_arguments().filter(long);
    if let Some(arg) = args().find(|arg| arg.get_long() == Some(name)) {
        return Ok(arg);
    }
    let mut keys: Vec<_> = args().filter_map(Arg::get_long).collect();
    keys.extend(TABLES);
    Err(unknown_key(name, &keys))
}

/// Says that there is no such key, and which one may be meant.
pub(super) fn unknown_key(name: &str, known: &[&str]) -> String {
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

/// A key's values as on the command line, and those of a flag.
fn values(command: &Command, arg: &Arg, name: &str, value: &Value) -> Result<Vec<String>, String> {
    let flag = !arg.get_action().takes_values();
    let value_may_be_left_out = arg
        .get_num_args()
        .is_some_and(|number| number.min_values() == 0);
    Ok(match value {
        Value::Boolean(value) if flag => vec![value.to_string()],
        Value::Boolean(true) if value_may_be_left_out => without_value(command, arg, name)?,
        Value::Boolean(false) if value_may_be_left_out => Vec::new(),
        _ if flag => return Err(format!("{name}: true or false is expected")),
        Value::String(text) => vec![text.clone()],
        Value::Integer(number) => vec![number.to_string()],
        Value::Array(all) => {
            let each = all.iter().map(|value| values(command, arg, name, value));
            each.collect::<Result<Vec<_>, _>>()?.concat()
        }
        _ if value_may_be_left_out => {
            return Err(format!("{name}: true, false or a text is expected"));
        }
        _ => return Err(format!("{name}: a text or a number is expected")),
    })
}

/// The values that an option has on the command line without one.
fn without_value(command: &Command, arg: &Arg, name: &str) -> Result<Vec<String>, String> {
    let given = [format!("--{name}")];
    let matches = command.clone().try_get_matches_from(given);
    let matches = matches.map_err(|e| e.to_string())?;
    let values = matches.get_raw(arg.get_id().as_str()).into_iter().flatten();
    Ok(values
        .map(|value| value.to_string_lossy().into_owned())
        .collect())
}

/// Checks the values of an option. The error is clap's message, without the usage of the command
/// line, and the word that may be meant.
fn check(command: &Command, arg: &Arg, name: &str, values: &[String]) -> Result<(), String> {
    if !arg.get_action().takes_values() {
        return Ok(());
    }
    let given = values.iter().map(|value| format!("--{name}={value}"));
    let Err(error) = command.clone().try_get_matches_from(given) else {
        return Ok(());
    };
    let text = error.to_string();
    let message = text.trim_start_matches("error: ");
    let message = message.split("\n\n").next().unwrap_or_default();
    Err(match error.get(ContextKind::SuggestedValue) {
        Some(ContextValue::String(near)) => {
            // Without the list of all words, which clap has in the second line.
            let first = message.lines().next().unwrap_or_default();
            format!("{first}: did you mean {near:?}?")
        }
        _ => message.to_owned(),
    })
}
