// SPDX-License-Identifier: MIT OR Apache-2.0
//! The configuration file of `rxsteer run`: the options of the command line by their names, and
//! `[[busy_poll]]` tables.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::{Args, Command, FromArgMatches};
use serde::Deserialize;
use toml::{Table, Value};

use crate::busy_poll::rule::Rule;
use crate::cli::run::RunArgs;
use crate::daemon::options::Options;

/// What a file can say.
#[derive(Debug, Deserialize)]
struct File {
    /// Network devices.
    #[serde(default)]
    devices: Vec<String>,
    /// Whose sockets poll.
    #[serde(default)]
    busy_poll: Vec<Rule>,
    /// Options, as after `--`.
    #[serde(flatten)]
    options: Table,
}

/// The options of the command line, and below them those of the file that it names.
///
/// # Errors
/// When the file can't be read, or says something that is not an option, or not one's value.
pub fn with_file(args: RunArgs) -> Result<Options> {
    let Some(path) = args.config.clone() else {
        return Ok(args.into());
    };
    let given = std::env::args_os().skip_while(|arg| arg != "run").skip(1);
    merged(&path, given).with_context(|| format!("{}", path.display()))
}

/// The file's options first, then those that were given: the latter hold.
fn merged(path: &Path, given: impl Iterator<Item = OsString>) -> Result<Options> {
    let text = fs::read_to_string(path)?;
    let file: File = toml::from_str(&text)?;
    let mut from_file = Vec::new();
    for (name, value) in &file.options {
        from_file.extend(arguments(name, value)?);
    }
    let command = || {
        RunArgs::augment_args(Command::new("run"))
            .no_binary_name(true)
            .args_override_self(true)
    };
    // First alone: a mistake in it is the file's.
    let mut alone = from_file.clone();
    alone.push(OsString::from_iter([
        OsStr::new("--config="),
        path.as_os_str(),
    ]));
    command().try_get_matches_from(&alone).map_err(plain)?;
    let given: Vec<_> = given.collect();
    let matches = command().try_get_matches_from([from_file, given].concat())?;
    let mut args = RunArgs::from_arg_matches(&matches)?;
    if args.devices.is_empty() {
        args.devices = file.devices;
    }
    if args.devices.is_empty() {
        bail!("no device: write devices = [\"eth0\"], or name one on the command line");
    }
    for rule in &file.busy_poll {
        if let Some(objection) = rule.objection() {
            bail!("[[busy_poll]]: {objection}");
        }
    }
    Ok(Options {
        busy_poll: file.busy_poll,
        ..args.into()
    })
}

/// An option as on the command line.
fn arguments(name: &str, value: &Value) -> Result<Vec<OsString>> {
    let option = |value: &str| format!("--{name}={value}").into();
    if name == "config" {
        bail!("config: a file can't name another one");
    }
    Ok(match value {
        Value::Boolean(true) => vec![format!("--{name}").into()],
        Value::Boolean(false) => Vec::new(),
        Value::String(text) => vec![option(text)],
        Value::Integer(number) => vec![option(&number.to_string())],
        Value::Array(values) => {
            let each = values.iter().map(|value| arguments(name, value));
            each.collect::<Result<Vec<_>>>()?.concat()
        }
        _ => bail!("{name}: a text, a number, true or false is expected"),
    })
}

/// The message without the usage of the command line, which is not meant.
fn plain(error: clap::Error) -> anyhow::Error {
    let text = error.to_string();
    let message = text.split("\n\nUsage").next().unwrap_or_default();
    let message = message.trim_start_matches("error: ").trim();
    anyhow::anyhow!("{}", message.split("\n\n").next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::policy::Policy;

    fn read(text: &str, given: &[&str]) -> Result<Options> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(&file, text)?;
        let given = [&["--config=FILE"], given].concat();
        merged(file.path(), given.iter().map(Into::into))
    }

    #[test]
    fn options_of_the_file_hold_unless_others_are_given() {
        let text = "
            devices = [\"eth0\", \"eth1\"]
            policy = \"rfs\"
            backlog = 100
            dry-run = true
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
        assert_eq!(options.queues.len(), 2);
        let [nginx, port] = &options.busy_poll[..] else {
            panic!("{:?}", options.busy_poll);
        };
        assert_eq!((nginx.comm.as_deref(), nginx.usecs), (Some("nginx"), 50));
        assert_eq!((port.port, port.adaptive), (Some(53), true));

        let options = read(text, &["eth2", "--policy", "rps", "--backlog=7"]).unwrap();
        assert_eq!(options.devices, ["eth2"]);
        assert_eq!((options.policy, options.backlog), (Policy::RPS, Some(7)));
        assert!(options.dry_run);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, why) in [
            ("polcy = \"rfs\"", "polcy"),
            ("policy = \"fast\"", "fast"),
            ("policy = {}", "policy: a text"),
            ("config = \"FILE\"", "another one"),
            ("devices = \"eth0\"", "devices"),
            ("", "no device"),
            (
                "devices = [\"eth0\"]\n[[busy_poll]]\nusecs = 50",
                "whose sockets?",
            ),
            ("devices = [\"eth0\"]\n[[busy_poll]]\npid = 1", "usecs"),
            (
                "devices = [\"eth0\"]\n[[busy_poll]]\npid = 1\nusecs = 5\nbudget = 3",
                "budget",
            ),
            ("[busy", "TOML"),
        ] {
            let error = format!("{:#}", read(text, &[]).map(|_| ()).unwrap_err());
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }
}
