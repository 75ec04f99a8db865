// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `rxlab` command. Exit status: 0 done, 1 failed, 2 wrong usage.

use std::process::ExitCode;

use clap::Parser;
use rxlab::cli::Cli;
use rxsteer::cli::program;
use tracing::level_filters::LevelFilter;

fn main() -> ExitCode {
    let command = Cli::parse().command;
    program::main(LevelFilter::ERROR, || command.run())
}
