// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer check`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Args, Command};

use super::source::no_device;
use super::{config, example, files};

/// Options of `rxsteer check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The file to check; without it, all files that `rxsteer run` reads without DEVICE and --config
    #[arg(conflicts_with = "example")]
    pub file: Option<PathBuf>,

    /// Print a file with all keys, as comments with their meaning, and check nothing
    #[arg(long)]
    pub example: bool,
}

impl CheckArgs {
    /// Checks; `cli` has the subcommand `run`.
    pub(super) fn run(self, cli: Command) -> Result<ExitCode> {
        if self.example {
            print!("{}", example::text());
            return Ok(ExitCode::SUCCESS);
        }
        let files = match &self.file {
            Some(file) => vec![file.clone()],
            None => files::configured()?,
        };
        ensure!(!files.is_empty(), "there is no {}", files::places());
        let options = config::read(&files, cli, ["rxsteer", "run"].map(OsString::from))?;
        // A single file may be a drop-in, or be used with devices on the command line.
        if self.file.is_none() && options.devices.is_empty() {
            return Err(no_device(&files[0]).into());
        }
        for file in files {
            println!("{}: ok", file.display());
        }
        Ok(ExitCode::SUCCESS)
    }
}
