// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration files of `rxsteer run`: the options of the command line by their names, and
//! `[[busy_poll]]` tables. The files' values become the defaults of the command line.

mod content;
mod keys;
mod syntax;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use self::content::Content;
use super::files;
use super::places::{located, place};
use super::run::RunArgs;
use crate::daemon::contradiction::contradictions;
use crate::daemon::mistakes::Mistakes;
use crate::daemon::options::{Options, Pin};

/// The options of these files, each of which takes precedence over those before, and of the command
/// line, which takes precedence over all; `cli` has the subcommand `run`. There may be no device.
///
/// # Errors
/// When a file can't be read; [`Mistakes`] when it contains anything but options and their values, or
/// options that contradict each other: with each line.
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
    Mistakes::none_in(found.map(|found| located(&places, &found)))?;
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
        let bytes = files::read(path)?;
        match Content::of(path, &bytes) {
            Ok(content) => all.add(content),
            Err(found) => mistakes.extend(found.into_iter().map(|(line, why)| {
                let place = place(path, line);
                format!("{place}: {why}")
            })),
        }
    }
    Mistakes::none_in(mistakes)?;
    Ok(all)
}

#[cfg(test)]
mod tests;
