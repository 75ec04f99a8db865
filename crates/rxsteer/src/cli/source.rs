// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the options of `rxsteer run` come from. Files can be read again.

use std::path::PathBuf;

use anyhow::Result;
use clap::Command;
use clap::error::ErrorKind;

use super::run::RunArgs;
use super::{config, files};
use crate::daemon::mistakes::Mistakes;
use crate::daemon::options::Options;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// The command line alone, which names devices.
    CommandLine(Box<Options>),
    /// `--config`, and the command line.
    File(PathBuf),
    /// The configured files, and the command line.
    Configured,
}

impl Source {
    pub(super) fn of(args: RunArgs) -> Self {
        match args.config {
            Some(file) => Self::File(file),
            None if args.options.devices.is_empty() => Self::Configured,
            None => Self::CommandLine(Box::new(args.options())),
        }
    }

    /// Whether there is no file that could be read again.
    pub(super) fn is_command_line(&self) -> bool {
        matches!(self, Self::CommandLine(_))
    }

    /// Reads the options; `cli` has the subcommand `run`.
    ///
    /// # Errors
    /// With each mistake in the files; when no device is named.
    pub(super) fn read(&self, mut cli: Command) -> Result<Options> {
        let files = match self {
            Self::CommandLine(options) => return Ok((**options).clone()),
            Self::File(file) => vec![file.clone()],
            Self::Configured => files::configured()?,
        };
        let options = config::read(&files, cli.clone(), std::env::args_os())?;
        if !options.devices.is_empty() {
            return Ok(options);
        }
        let Some(file) = files.first() else {
            cli.build();
            let run = cli.find_subcommand_mut("run").expect("the caller has it");
            let why = format!(
                "no device: name one (`rxsteer run eth0`), or write {} (`rxsteer check --example` \
                 prints one)",
                files::places()
            );
            return Err(run.error(ErrorKind::MissingRequiredArgument, why).into());
        };
        Err(no_device(file).into())
    }
}

/// The error when files name no device.
pub(super) fn no_device(file: &std::path::Path) -> Mistakes {
    let file = file.display();
    format!("{file}: no device: write devices = [\"eth0\"], or name one on the command line").into()
}
