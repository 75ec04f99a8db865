// SPDX-License-Identifier: MIT OR Apache-2.0
//! The configuration file of `rxsteer run`: the options of the command line by their names, and
//! `[[busy_poll]]` tables. The file's values become the defaults of the command line.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, Args, Command, FromArgMatches};
use serde::Deserialize;
use toml::{Spanned, Value};

use super::run::RunArgs;
use crate::busy_poll::rule::Rule;
use crate::daemon::options::Options;

/// Content of a file besides options.
#[derive(Debug, Deserialize)]
struct Tables {
    #[serde(default)]
    devices: Vec<String>,
    #[serde(default)]
    busy_poll: Vec<Spanned<Rule>>,
}

/// The keys of [`Tables`].
const TABLES: [&str; 2] = ["devices", "busy_poll"];

/// Similarity from which an unknown key is taken for a mistyped one, as in clap.
const SIMILAR: f64 = 0.7;

/// The options of this file, and of the command line, which takes precedence; `cli` has the
/// subcommand `run`.
///
/// # Errors
/// When the file can't be read, or contains anything but options and their values: with each line.
pub fn with_file(
    path: &Path,
    cli: Command,
    command_line: impl Iterator<Item = OsString>,
) -> Result<Options> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let (tables, defaults) = read(&text).map_err(|mistakes| {
        let lines = mistakes
            .iter()
            .map(|(line, why)| format!("{}:{line}: {why}", path.display()));
        anyhow!(lines.collect::<Vec<_>>().join("\n"))
    })?;
    let command = cli.mut_subcommand("run", |run| {
        defaults.into_iter().fold(run, |run, (id, values)| {
            run.mut_arg(id, |arg| arg.default_values(values))
        })
    });
    let matches = command.try_get_matches_from(command_line)?;
    let run = matches.subcommand_matches("run").context("no `run`")?;
    let mut options = RunArgs::from_arg_matches(run)?.options();
    if options.devices.is_empty() {
        options.devices = tables.devices;
    }
    if options.devices.is_empty() {
        bail!(
            "{}: no device: write devices = [\"eth0\"], or name one on the command line",
            path.display()
        );
    }
    let rules = tables.busy_poll.into_iter();
    options.busy_poll = rules.map(Spanned::into_inner).collect();
    Ok(options)
}

/// A mistake, after its line.
type Mistake = (usize, String);

/// Values by the argument's id.
type Defaults = Vec<(String, Vec<String>)>;

/// All mistakes are returned, except those after one in the syntax or in the tables.
fn read(text: &str) -> Result<(Tables, Defaults), Vec<Mistake>> {
    let line = |span: Range<usize>| line_of(text, span.start);
    let toml = |e: toml::de::Error| (e.span().map_or(1, line), e.message().to_owned());
    let keys: BTreeMap<Spanned<String>, Value> = toml::from_str(text).map_err(|e| vec![toml(e)])?;
    let command = RunArgs::augment_args(Command::new("run").no_binary_name(true));
    let (mut defaults, mut mistakes) = (Defaults::new(), Vec::new());
    for (key, value) in &keys {
        let name = key.get_ref().as_str();
        if TABLES.contains(&name) {
            continue;
        }
        match default(&command, name, value) {
            // A flag that is false. An empty list replaces the default.
            Ok((_, values)) if values.is_empty() && !value.is_array() => {}
            Ok(default) => defaults.push(default),
            Err(why) => mistakes.push((line(key.span()), why)),
        }
    }
    let tables = toml::from_str(text).map_err(toml);
    if let Ok(Tables { busy_poll, .. }) = &tables {
        mistakes.extend(busy_poll.iter().filter_map(|rule| {
            let objection = rule.get_ref().objection()?;
            Some((line(rule.span()), format!("[[busy_poll]]: {objection}")))
        }));
    }
    match tables {
        Ok(tables) if mistakes.is_empty() => Ok((tables, defaults)),
        tables => {
            mistakes.extend(tables.err());
            mistakes.sort();
            Err(mistakes)
        }
    }
}

/// The argument's id and the values of a key.
fn default(command: &Command, name: &str, value: &Value) -> Result<(String, Vec<String>), String> {
    let arg = argument(command, name)?;
    let values = values(arg, name, value)?;
    check(command, arg, name, &values)?;
    Ok((arg.get_id().to_string(), values))
}

/// The number of the line with this offset, from 1.
fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
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
    keys.sort_by(|a, b| {
        let [a, b] = [a, b].map(|key| strsim::jaro_winkler(key, name));
        b.total_cmp(&a)
    });
    Err(match keys.first() {
        Some(nearest) if strsim::jaro_winkler(nearest, name) > SIMILAR => {
            format!("unknown key {name:?}: did you mean {nearest:?}?")
        }
        _ => format!("unknown key {name:?}; there are {}", keys.join(", ")),
    })
}

/// A key's values as on the command line; none for a flag that is false.
fn values(arg: &Arg, name: &str, value: &Value) -> Result<Vec<String>, String> {
    let flag = !arg.get_action().takes_values();
    Ok(match value {
        Value::Boolean(true) if flag => vec!["true".to_owned()],
        Value::Boolean(false) if flag => Vec::new(),
        _ if flag => return Err(format!("{name}: true or false is expected")),
        Value::String(text) => vec![text.clone()],
        Value::Integer(number) => vec![number.to_string()],
        Value::Array(all) => {
            let each = all.iter().map(|value| values(arg, name, value));
            each.collect::<Result<Vec<_>, _>>()?.concat()
        }
        _ => return Err(format!("{name}: a text or a number is expected")),
    })
}

/// Checks the values of an option. The error is clap's message, without the usage of the command
/// line.
fn check(command: &Command, arg: &Arg, name: &str, values: &[String]) -> Result<(), String> {
    if !arg.get_action().takes_values() {
        return Ok(());
    }
    let given = values.iter().map(|value| format!("--{name}={value}"));
    let given = given.chain(["--config=FILE".to_owned()]);
    let Err(error) = command.clone().try_get_matches_from(given) else {
        return Ok(());
    };
    let text = error.to_string();
    let message = text.trim_start_matches("error: ");
    let message = message.split("\n\nUsage").next().unwrap_or_default();
    Err(message.split("\n\n").next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::policy::Policy;

    fn read(text: &str, given: &[&str]) -> Result<Options> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(&file, text)?;
        let line = [&["rxsteer", "run", "--config=FILE"], given].concat();
        let run = RunArgs::augment_args(Command::new("run"));
        let cli = Command::new("rxsteer").subcommand(run);
        with_file(file.path(), cli, line.iter().map(OsString::from))
    }

    #[test]
    fn the_command_line_takes_precedence() {
        let text = "
            devices = [\"eth0\", \"eth1\"]
            policy = \"rfs\"
            backlog = 100
            dry-run = true
            ignore-unconnected = false
            follow-nat = true
            tunnels = [\"gre\", \"vxlan\"]
            queue = [\"eth0:0=1-1\", \"eth1:0=0-0\"]
            [[busy_poll]]
            comm = \"nginx\"
            usecs = 50
            [[busy_poll]]
            port = 53
            usecs = 20
            adaptive = true
        ";
        let options = read(text, &[]).unwrap();
        assert_eq!(options.devices, ["eth0", "eth1"]);
        assert_eq!(options.policy, Policy::RFS);
        assert_eq!((options.backlog, options.dry_run), (Some(100), true));
        assert!(!options.ignore_unconnected && options.follow_nat);
        assert_eq!((options.queues.len(), options.tunnels.len()), (2, 2));
        let [nginx, port] = &options.busy_poll[..] else {
            panic!("{:?}", options.busy_poll);
        };
        assert_eq!((nginx.comm.as_deref(), nginx.usecs), (Some("nginx"), 50));
        assert_eq!((port.port, port.adaptive), (Some(53), true));

        let line = ["eth2", "--policy", "rps", "--backlog=7", "--queue=0=2"];
        let options = read(text, &line).unwrap();
        assert_eq!(options.devices, ["eth2"]);
        assert_eq!((options.policy, options.backlog), (Policy::RPS, Some(7)));
        assert_eq!(options.queues.len(), 1);
        assert!(options.dry_run);
    }

    #[test]
    fn a_list_replaces_the_default() {
        let ports = |text: &str, given: &[&str]| {
            let options = read(&format!("devices = [\"eth0\"]\n{text}"), given);
            options.unwrap().inline_ports
        };
        assert_eq!(ports("", &[]), [123, 319]);
        assert_eq!(ports("inline-ports = [319, 320]", &[]), [319, 320]);
        assert_eq!(ports("inline-ports = []", &[]), [0; 0]);
        assert_eq!(ports("inline-ports = []", &["--inline-ports=1,2"]), [1, 2]);
        assert_eq!(ports("", &["--inline-ports=0"]), [0]);
    }

    #[test]
    fn the_default_policy_depends_on_the_hash() {
        let device = "devices = [\"eth0\"]\n";
        let policy = |text: &str| read(&format!("{device}{text}"), &[]).unwrap().policy;
        assert_eq!(policy(""), Policy::ADAPTIVE);
        let by_hash = Policy::ADAPTIVE.without_following();
        assert_eq!(policy("hash = \"device\""), by_hash);
        assert_eq!(Options::new(["eth0"]).policy, Policy::ADAPTIVE);
        assert_eq!(policy("hash = \"device\"\npolicy = \"off\""), Policy::OFF);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, line, why) in [
            ("\npolcy = \"rfs\"", ":2: ", "did you mean \"policy\"?"),
            ("rps_cpus = \"3\"", ":1: ", "did you mean \"rps-cpus\"?"),
            ("xyz = 3", ":1: ", "there are "),
            ("# first\npolicy = \"fast\"", ":2: ", "fast"),
            ("policy = {}", ":1: ", "policy: a text"),
            ("policy = false", ":1: ", "policy: a text"),
            ("dry-run = 3", ":1: ", "true or false"),
            ("backlog = 0", ":1: ", "1..=16368"),
            ("config = \"FILE\"", ":1: ", "another one"),
            ("devices = \"eth0\"", ":1: ", "sequence"),
            ("", ": ", "no device"),
            (
                "devices = [\"eth0\"]\n[[busy_poll]]\nusecs = 50",
                ":2: ",
                "no sockets selected",
            ),
            (
                "devices = [\"eth0\"]\n[[busy_poll]]\npid = 1",
                ":2: ",
                "usecs",
            ),
            (
                "devices = [\"eth0\"]\n[[busy_poll]]\npid = 1\nusecs = 5\nbudget = 3",
                ":5: ",
                "budget",
            ),
            ("[busy", ":1: ", "]"),
        ] {
            let error = format!("{:#}", read(text, &[]).map(|_| ()).unwrap_err());
            assert!(error.contains(why), "{text:?}: {error}");
            assert!(error.contains(line), "{text:?}: {error}");
        }
    }

    #[test]
    fn all_mistakes_are_named_in_the_order_of_lines() {
        let text = "
            policy = \"fast\"
            backlog = 0
            devics = [\"eth0\"]
            dry-run = true
            [[busy_poll]]
            usecs = 50
            [[busy_poll]]
            port = 53
            usecs = 50
            [[busy_poll]]
            exe = \"nginx\"
            usecs = 50
        ";
        let error = read(text, &[]).unwrap_err().to_string();
        let lines: Vec<&str> = error.lines().collect();
        let expected = [
            ":2: invalid value 'fast'",
            ":3: invalid value '0'",
            ":4: unknown key",
            ":6: [[busy_poll]]: no sockets",
            ":11: [[busy_poll]]: nginx",
        ];
        assert_eq!(lines.len(), expected.len(), "{error}");
        for (line, part) in lines.iter().zip(expected) {
            assert!(line.contains(part), "{error}");
        }
    }
}
