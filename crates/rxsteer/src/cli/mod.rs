// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line: a file for each subcommand, with its options, its request and its output.

pub mod advise;
pub mod check;
pub mod config;
pub mod detach;
pub mod doctor;
pub mod endpoints;
pub mod example;
pub mod explain;
mod files;
pub mod flows;
mod log;
pub mod man;
pub mod mode;
pub mod napi;
mod pinned;
mod places;
pub mod poll;
pub mod program;
pub mod reload;
pub mod run;
pub mod set;
mod source;
pub mod status;
mod steer;
pub mod table;
mod top;
pub mod value;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;

use crate::busy_poll::undo;
use crate::host::{asked, flow_entries, guardian, offloads};
use crate::napi::settings;

/// Receive steering for Linux: decides on which CPU each received packet is processed.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Steer the packets that devices receive, until stopped
    Run(Box<run::RunArgs>),
    /// Show what a running rxsteer does, and how much of it
    Status(status::StatusArgs),
    /// Show the flows of a running rxsteer: where they are, and where they want to be
    Flows(flows::FlowsArgs),
    /// Show rates, backlogs and the busiest flows of a running rxsteer, again and again
    Top(top::TopArgs),
    /// Say why a flow is on the CPU where it is
    Explain(explain::ExplainArgs),
    /// Change what a running rxsteer does: CPUs, policy, sizes of tables
    Set(set::SetArgs),
    /// Let a running rxsteer read its configuration again and apply it: all of it, or nothing
    Reload(reload::ReloadArgs),
    /// End steering that `run --pin` has left: return every flow to its polling CPU, detach, unpin
    Detach(detach::DetachArgs),
    /// Let the sockets of applications poll their device's queue, until stopped
    Poll(poll::PollArgs),
    /// Child process of `poll`, which restores the settings if `poll` is killed
    #[command(hide = true)]
    PutBack,
    /// Show the NAPI instances of devices and the sockets that are on them, or set them until
    /// stopped
    Napi(napi::NapiArgs),
    /// Child process of `napi`, which restores the settings if `napi` is killed
    #[command(hide = true)]
    PutBackNapi,
    /// Child process of `run`, which puts back what `--prepare` changed
    #[command(hide = true)]
    PutBackOffloads,
    /// Child process of `run`, which puts back what softirq mode changed
    #[command(hide = true)]
    PutBackAsked,
    /// Child process of `run`, which puts the size of the kernel's table of flows back
    #[command(hide = true)]
    PutBackFlowEntries,
    /// Say whether steering would help, by how much, and with which command, from what the host does for
    /// some seconds. Changes nothing
    Advise(advise::AdviseArgs),
    /// Say what stands in the way on this host and its devices, and what the settings of NAPI
    /// instances amount to. Exit status: 1 if something does, of the host or of a device that is
    /// named
    Doctor(doctor::DoctorArgs),
    /// Check configuration files, without privileges and without a look at the host. Exit status: 2 if
    /// there are mistakes
    Check(check::CheckArgs),
    /// Use a configuration with a name, or show it
    Mode(mode::ModeArgs),
    /// Write the man pages and completions
    #[command(hide = true)]
    Man(man::ManArgs),
}

impl Command {
    /// Default log level: `run`, `poll` and `napi` with settings log their progress; the other
    /// commands print their output.
    pub fn log_level(&self) -> LevelFilter {
        match self {
            Self::Run(_)
            | Self::Poll(_)
            | Self::PutBackOffloads
            | Self::PutBackAsked
            | Self::PutBackFlowEntries => LevelFilter::INFO,
            Self::Napi(args) if args.set.is_some() => LevelFilter::INFO,
            _ => LevelFilter::ERROR,
        }
    }

    /// Runs the subcommand.
    ///
    /// # Errors
    /// With the reason and the remedy.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Self::Run(args) => steer::run(*args, &Cli::command()),
            Self::Reload(args) => args.run(),
            Self::Status(args) => args.run(),
            Self::Flows(args) => args.run(),
            Self::Top(args) => args.run(),
            Self::Explain(args) => args.run(),
            Self::Set(args) => args.run(),
            Self::Detach(args) => args.run(),
            Self::Poll(args) => args.run(),
            Self::Napi(args) => args.run(),
            Self::Advise(args) => args.run(),
            Self::Doctor(args) => args.run(),
            Self::Check(args) => args.run(Cli::command()),
            Self::Mode(args) => args.run(),
            Self::Man(args) => args.run(Cli::command()),
            Self::PutBack => guardian::put_back(undo::put_back).map(|()| ExitCode::SUCCESS),
            Self::PutBackNapi => guardian::put_back(settings::put_back).map(|()| ExitCode::SUCCESS),
            Self::PutBackOffloads => {
                guardian::put_back(offloads::put_back).map(|()| ExitCode::SUCCESS)
            }
            Self::PutBackAsked => guardian::put_back(asked::put_back).map(|()| ExitCode::SUCCESS),
            Self::PutBackFlowEntries => flow_entries::put_back().map(|()| ExitCode::SUCCESS),
        }
    }
}
