// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `rxsteer` command. Exit status: 0 done, 1 failed, 2 a mistake in the command line
//! or the configuration.

use std::process::ExitCode;

use clap::Parser;
use rxsteer::cli::{Cli, program};

fn main() -> ExitCode {
    let command = Cli::parse().command;
    program::main(command.log_level(), || command.run())
}
