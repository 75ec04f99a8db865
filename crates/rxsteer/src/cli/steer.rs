// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer run`: from its options to the end.

use std::os::fd::AsFd;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Command;
use nix::sys::signal::Signal;

use super::program::{signals, stop_signals};
use super::run::RunArgs;
use super::source::Source;
use crate::daemon;
use crate::daemon::panics;
use crate::daemon::told::{Configuration, Told};
use crate::host::{descriptors, privileges};

/// Steers until a stop signal or a panic; `cli` has the subcommand `run`. SIGHUP lets files be read
/// again; it is a stop signal if there are none.
pub(super) fn run(args: RunArgs, cli: &Command) -> Result<ExitCode> {
    privileges::keep_needed()?;
    descriptors::allow_most();
    let source = Source::of(args);
    let options = source.read(cli.clone())?;
    let (stop, hangup) = match source.is_command_line() {
        true => (stop_signals()?, None),
        false => (
            signals(&[Signal::SIGINT, Signal::SIGTERM])?,
            Some(signals(&[Signal::SIGHUP])?),
        ),
    };
    let read = || source.read(cli.clone());
    let told = Told {
        stop: stop.as_fd(),
        configuration: hangup.as_ref().map(|hangup| Configuration {
            hangup,
            read: &read,
        }),
    };
    panics::request_the_stop();
    let ended = daemon::run(&options, &told);
    if let Some(panic) = panics::first() {
        bail!("{panic}: this is a defect of rxsteer, which has stopped as on SIGTERM");
    }
    ended.map(|()| ExitCode::SUCCESS)
}
