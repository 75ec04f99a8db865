// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration files of `rxsteer run`: the options of the command line by their names, and
//! `[[busy_poll]]` tables. The files' values become the defaults of the command line.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use serde::Deserialize;
use toml::{Spanned, Value};

use super::places::{Places, line_of, located, place};
use super::run::RunArgs;
use crate::busy_poll::rule::Rule;
use crate::daemon::contradiction::contradictions;
use crate::daemon::options::{Options, Pin};

/// Content of a file besides options.
#[derive(Debug, Deserialize)]
struct Tables {
    devices: Option<Vec<String>>,
    #[serde(default)]
    busy_poll: Vec<Spanned<Rule>>,
}

/// The keys of [`Tables`].
const TABLES: [&str; 2] = ["devices", "busy_poll"];

/// The keys of each `[[busy_poll]]` table.
#[derive(Deserialize)]
struct RuleKeys {
    #[serde(default)]
    busy_poll: Vec<BTreeMap<Spanned<String>, Value>>,
}

/// Similarity from which an unknown key is taken for a mistyped one, as in clap.
const SIMILAR: f64 = 0.7;

/// Content of files.
#[derive(Debug, Default)]
struct Content {
    devices: Option<Vec<String>>,
    busy_poll: Vec<Rule>,
    defaults: Defaults,
    places: Places,
}

impl Content {
    /// Adds a later file: its keys replace those before, its rules are added to them.
    fn add(&mut self, later: Self) {
        self.devices = later.devices.or(self.devices.take());
        self.busy_poll.extend(later.busy_poll);
        self.defaults.extend(later.defaults);
        self.places.extend(later.places);
    }
}

/// The options of these files, each of which takes precedence over those before, and of the command
/// line, which takes precedence over all; `cli` has the subcommand `run`. There may be no device.
///
/// # Errors
/// When a file can't be read, or contains anything but options and their values, or options that
/// contradict each other: with each line.
pub fn read(
    files: &[PathBuf],
    cli: Command,
    command_line: impl IntoIterator<Item = OsString>,
) -> Result<Options> {
    let content = content(files)?;
    let command = cli.mut_subcommand("run", |run| {
        content.defaults.into_iter().fold(run, |run, (id, values)| {
            run.mut_arg(id, |arg| arg.default_values(values))
        })
    });
    let matches = command.try_get_matches_from(command_line)?;
    let run = matches.subcommand_matches("run").context("no `run`")?;
    let mut options = RunArgs::from_arg_matches(run)?.options();
    if options.devices.is_empty() {
        options.devices = content.devices.unwrap_or_default();
    }
    options.busy_poll = content.busy_poll;
    let mut places = content.places;
    places.retain(|key, _| !is_on_command_line(run, key));
    let found = contradictions(&options).into_iter();
    let found: Vec<_> = found.map(|found| located(&places, &found)).collect();
    ensure!(found.is_empty(), found.join("\n"));
    Ok(options)
}

/// The `pin` of these files.
///
/// # Errors
/// As [`read`], but for contradictions.
pub(super) fn pin(files: &[PathBuf]) -> Result<Option<Pin>> {
    let content = content(files)?;
    let text = content
        .defaults
        .get("pin")
        .and_then(|values| values.first());
    let pin = text.map(|text| text.parse().map_err(anyhow::Error::msg));
    pin.transpose()
}

fn is_on_command_line(run: &ArgMatches, key: &str) -> bool {
    let command = RunArgs::augment_args(Command::new("run"));
    let named = |arg: &&Arg| arg.get_long().unwrap_or(arg.get_id().as_str()) == key;
    let arg = command.get_arguments().find(named);
    arg.is_some_and(|arg| run.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine))
}

/// What these files have together.
fn content(files: &[PathBuf]) -> Result<Content> {
    let (mut all, mut mistakes) = (Content::default(), Vec::new());
    for path in files {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        match content_of(path, &text) {
            Ok(content) => all.add(content),
            Err(found) => mistakes.extend(found.into_iter().map(|(line, why)| {
                let place = place(path, line);
                format!("{place}: {why}")
            })),
        }
    }
    match &mistakes[..] {
        [] => Ok(all),
        _ => bail!(mistakes.join("\n")),
    }
}

/// A mistake, after its line.
type Mistake = (usize, String);

/// Values by the argument's id.
type Defaults = BTreeMap<String, Vec<String>>;

/// All mistakes are returned, except those after one in the syntax or in the tables.
fn content_of(path: &Path, text: &str) -> Result<Content, Vec<Mistake>> {
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

/// The argument's id and the values of a key.
fn default(command: &Command, name: &str, value: &Value) -> Result<(String, Vec<String>), String> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::options::Pin;
    use crate::datapath::policy::Policy;

    /// The options of files with these texts.
    fn read_all(texts: &[&str], given: &[&str]) -> Result<Options> {
        let folder = tempfile::tempdir()?;
        let file = |(number, text): (usize, &&str)| {
            let path = folder.path().join(number.to_string());
            fs::write(&path, text)?;
            Ok(path)
        };
        let files: Vec<PathBuf> = texts.iter().enumerate().map(file).collect::<Result<_>>()?;
        let line = [&["rxsteer", "run"], given].concat();
        let run = RunArgs::augment_args(Command::new("run"));
        let cli = Command::new("rxsteer").subcommand(run);
        super::read(&files, cli, line.iter().map(OsString::from))
    }

    fn read(text: &str, given: &[&str]) -> Result<Options> {
        read_all(&[text], given)
    }

    #[test]
    fn keys_of_later_files_replace_those_of_earlier_ones() {
        let vendor = "
            devices = [\"eth0\"]
            policy = \"rfs\"
            dry-run = true
            tunnels = [\"gre\", \"vxlan\"]
            flow-limit = 5
            [[busy_poll]]
            comm = \"nginx\"
            usecs = 50
        ";
        let own = "
            devices = [\"eth1\"]
            policy = \"rps\"
            dry-run = false
            tunnels = []
            [[busy_poll]]
            port = 53
            usecs = 20
        ";
        let options = read_all(&[vendor, "", own], &[]).unwrap();
        assert_eq!(
            (&options.devices[..], options.policy),
            (&["eth1".to_owned()][..], Policy::RPS)
        );
        assert_eq!((options.dry_run, options.tunnels.len()), (false, 0));
        assert_eq!((options.flow_limit, options.busy_poll.len()), (5, 2));
        // The control: the order decides.
        let options = read_all(&[own, vendor], &[]).unwrap();
        assert_eq!(
            (&options.devices[..], options.policy),
            (&["eth0".to_owned()][..], Policy::RFS)
        );
        assert!(options.dry_run);
        // Mistakes of all files are named.
        let error = read_all(&["x-y-z = 1", vendor, "\npolcy = 1"], &[])
            .unwrap_err()
            .to_string();
        let lines: Vec<&str> = error.lines().collect();
        let [first, second] = lines[..] else {
            panic!("{error}")
        };
        assert!(
            first.contains("/0:1: ") && second.contains("/2:2: "),
            "{error}"
        );
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
            metrics = \"[::1]:9\"
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
        assert_eq!(options.metrics, "[::1]:9".parse().ok());
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
        let options = read(text, &["--metrics"]).unwrap();
        assert_eq!(options.metrics, "127.0.0.1:14779".parse().ok());
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
    fn values_that_may_be_left_out() {
        let pin = |text: &str, given: &[&str]| read(text, given).unwrap().pin;
        let folder = Some(Pin::Folder("/sys/fs/bpf/x".into()));
        assert_eq!(pin("", &[]), None);
        assert_eq!(pin("pin = false", &[]), None);
        assert_eq!(pin("pin = true", &[]), Some(Pin::Default));
        assert_eq!(pin("pin = \"/sys/fs/bpf/x\"", &[]), folder);
        assert_eq!(pin("pin = true", &["--pin=/sys/fs/bpf/x"]), folder);
        assert_eq!(pin("", &["--pin"]), Some(Pin::Default));
        let metrics = |text: &str, given: &[&str]| read(text, given).unwrap().metrics;
        let default = "127.0.0.1:14779".parse().ok();
        assert_eq!(metrics("metrics = true", &[]), default);
        assert_eq!(metrics("", &["--metrics"]), default);
        assert_eq!(metrics("metrics = false", &[]), None);
        let later = |later| read_all(&["metrics = true\npin = true", later], &[]).unwrap();
        let options = later("metrics = false\npin = false");
        assert_eq!((options.metrics, options.pin), (None, None));
        assert_eq!(later("").metrics, default);
        for (wrong, why) in [
            ("pin = \"x\"", "whole path"),
            ("pin = 3", "whole path"),
            ("pin = {}", "pin: true, false or a text is expected"),
            (
                "metrics = 1.5",
                "metrics: true, false or a text is expected",
            ),
            ("metrics = \"x\"", "metrics"),
            // The control: no other option takes a truth value.
            ("backlog = true", "backlog: a text or a number is expected"),
        ] {
            let error = format!("{:#}", read(wrong, &[]).unwrap_err());
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }

    #[test]
    fn contradictions_are_named_with_their_lines() {
        let error = |texts: &[&str], given: &[&str]| {
            let error = read_all(texts, given).map(|_| ()).unwrap_err();
            format!("{error:#}")
        };
        let text = error(&["devices = [\"eth0\"]\npin = true\n\nprepare = true"], &[]);
        assert!(text.contains("/0:4: prepare, with pin ("), "{text}");
        assert!(
            text.contains("/0:2): --prepare puts settings back"),
            "{text}"
        );
        let text = error(&["pin = true", "\nmode = \"skb\"\nhash = \"device\""], &[]);
        let lines: Vec<&str> = text.lines().collect();
        let [hash, mode] = lines[..] else {
            panic!("{text}")
        };
        assert!(
            hash.contains("/1:3: hash, with pin (") && hash.contains("/0:1): "),
            "{text}"
        );
        assert!(
            mode.contains("/1:2: mode, with pin (") && mode.contains("/0:1): "),
            "{text}"
        );
        // What the command line gives has no place, and may end a contradiction.
        let text = error(&["\npin = true"], &["--prepare"]);
        assert!(
            text.contains("/0:2: pin: --prepare puts settings back"),
            "{text}"
        );
        let text = error(&[""], &["--pin", "--prepare"]);
        assert!(text.starts_with("--prepare puts settings back"), "{text}");
        let options = read("pin = true\nmode = \"skb\"", &["--mode=native"]).unwrap();
        assert_eq!(options.pin, Some(Pin::Default));
        // The controls.
        read("pin = true", &[]).unwrap();
        read("prepare = true\npin = false", &[]).unwrap();
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
            ("mode = \"nativ\"", ":1: ", "did you mean \"native\"?"),
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
            (
                "[[busy_poll]]\npid = 1\nusec = 5",
                ":3: ",
                "[[busy_poll]]: unknown key \"usec\": did you mean \"usecs\"?",
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
