// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line: one file per subcommand.

pub mod bench;
pub mod demo;
mod lab;
pub mod reports;
pub mod serve;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};
use rxsteer::cli::man;
use rxsteer::host::{asked, flow_entries, guardian};

/// Traffic for rxsteer, in network namespaces of its own, and what it shows.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// One per thing that rxlab does.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// See it: floods without steering, with the kernel's steering and with rxsteer
    Demo(demo::DemoArgs),
    /// Measure, on this machine and in namespaces of its own
    Bench(Box<bench::BenchArgs>),
    /// Child process of a measurement, which puts back what rxsteer's softirq mode changed
    #[command(hide = true)]
    PutBackAsked,
    /// Child process of a measurement, which puts the size of the kernel's table of flows back
    #[command(hide = true)]
    PutBackFlowEntries,
    /// Write the man pages and completions
    #[command(hide = true)]
    Man(man::ManArgs),
}

impl Command {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// The reason, with a remedy where there is one.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Self::Demo(args) => args.run(),
            Self::Bench(args) => args.run(),
            Self::PutBackAsked => guardian::put_back(asked::put_back).map(|()| ExitCode::SUCCESS),
            Self::PutBackFlowEntries => flow_entries::put_back().map(|()| ExitCode::SUCCESS),
            Self::Man(args) => args.run(Cli::command()),
        }
    }
}
