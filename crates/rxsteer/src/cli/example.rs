// SPDX-License-Identifier: MIT OR Apache-2.0
//! An example of a configuration file: every key as a comment, with the texts of `--help`.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Args, Command};
use toml::Value;

use super::run::RunArgs;
use crate::busy_poll::rule::Rule;
use crate::datapath::policy::Policy;

/// Columns of a line.
const WIDTH: usize = 100;

const HEAD: &str = "\
# Configuration of `rxsteer run`: every key with its default, or with an example where there is
# none. Remove the # before a key to set it. `rxsteer check FILE` checks a file.
";

const RULES: &str = "\
# Sockets that poll their device's queue while rxsteer runs: a table for each rule, with the options
# of `rxsteer poll`. All conditions of a rule must hold. Tables come after all other keys.
#[[busy_poll]]
";

/// The text; the lines of keys begin with # and no space.
pub fn text() -> String {
    let mut text = HEAD.to_owned();
    let run = RunArgs::augment_args(Command::new("run"));
    let is_key = |arg: &&Arg| arg.get_id() != "config";
    for arg in run.get_arguments().filter(is_key) {
        add(&mut text, arg);
    }
    let _ = write!(text, "\n{RULES}");
    let poll = Rule::augment_args(Command::new("poll"));
    for arg in poll.get_arguments() {
        add(&mut text, arg);
    }
    text
}

/// Adds a key with its meaning.
fn add(text: &mut String, arg: &Arg) {
    let help = arg.get_long_help().or(arg.get_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    text.push('\n');
    for (number, paragraph) in help.split("\n\n").enumerate() {
        if number > 0 {
            text.push_str("#\n");
        }
        comment(text, "# ", paragraph);
    }
    let takes_values = arg.get_action().takes_values();
    for value in arg.get_possible_values().iter().filter(|_| takes_values) {
        if let Some(help) = value.get_help() {
            comment(text, "#   ", &format!("{}: {help}", value.get_name()));
        }
    }
    let _ = writeln!(text, "#{}", line(arg));
}

/// An option's key with its default, or with an example.
pub(super) fn line(arg: &Arg) -> String {
    let key = arg.get_long().unwrap_or(arg.get_id().as_str());
    format!("{key} = {}", value(key, arg))
}

/// Adds a paragraph, broken into lines.
fn comment(text: &mut String, start: &str, paragraph: &str) {
    let mut line = String::new();
    for word in paragraph.split_whitespace() {
        if !line.is_empty() && start.len() + line.len() + 1 + word.len() > WIDTH {
            let _ = writeln!(text, "{start}{line}");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    let _ = writeln!(text, "{start}{line}");
}

/// The default, or an example.
fn value(key: &str, arg: &Arg) -> Value {
    if !arg.get_action().takes_values() {
        return Value::Boolean(false);
    }
    let defaults = arg.get_default_values().iter();
    let mut values: Vec<_> = defaults
        .map(|value| value.to_string_lossy().into_owned())
        .collect();
    if values.is_empty() {
        values = example(key).into_iter().collect();
    }
    // As in TOML: numbers and truth values without quotes.
    let typed = |text: String| match (text.parse(), text.parse()) {
        (Ok(number), _) => Value::Integer(number),
        (_, Ok(truth)) => Value::Boolean(truth),
        _ => Value::String(text),
    };
    let mut values = values.into_iter().map(typed);
    match arg.get_action() {
        ArgAction::Append => Value::Array(values.collect()),
        _ => values.next().unwrap_or(Value::String(String::new())),
    }
}

/// Values of keys without a fixed default.
fn example(key: &str) -> Option<String> {
    let value = match key {
        "devices" => "eth0",
        "queue" => "eth0:0=0-3",
        "backlog" => "1000",
        "metrics" => "127.0.0.1:14779",
        "pin" => "true",
        "tunnels" => "vxlan",
        "policy" => return Some(Policy::default().to_string()),
        "pid" => "1234",
        "comm" => "nginx",
        "exe" => "/usr/sbin/nginx",
        "cgroup" => "/system.slice/nginx.service",
        "port" => "443",
        "user" => "root",
        "usecs" => "50",
        _ => return None,
    };
    Some(value.to_owned())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::super::config;
    use super::*;

    /// The text with every key.
    fn uncommented() -> String {
        let text = text();
        let lines = text.lines().map(|line| match line.strip_prefix('#') {
            Some(key) if !key.is_empty() && !key.starts_with(' ') => key,
            _ => line,
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn every_key_is_accepted() {
        let keys: toml::Table = toml::from_str(&uncommented()).unwrap();
        let run = RunArgs::augment_args(Command::new("run"));
        // `busy_poll` instead of `config`.
        assert_eq!(keys.len(), run.get_arguments().count());
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            let cli = Command::new("rxsteer").subcommand(run.clone());
            let line = ["rxsteer", "run"].map(OsString::from);
            config::read(&[file.path().to_owned()], cli, line)
        };
        let options = read(&uncommented()).unwrap();
        assert_eq!(options.devices, ["eth0"]);
        assert_eq!((options.backlog, options.busy_poll.len()), (Some(1000), 1));
        // With comments alone nothing is set.
        assert!(read(&text()).unwrap().devices.is_empty());
        // The control.
        assert!(read(&uncommented().replace("usecs", "usec")).is_err());
    }

    #[test]
    fn lines_are_short() {
        for line in text().lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
        }
    }
}
