// SPDX-License-Identifier: MIT OR Apache-2.0
//! rxsteer as a process that can be killed, with options that only the lab may set.

use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SigSet, Signal};
use rxlab::lab::netns::Netns;
use rxsteer::api::status::Queue;
use rxsteer::cli::{Command, program, run::RunArgs};
use rxsteer::daemon::options::{Mode, Options};
use rxsteer::daemon::takedown::Bounds;
use rxsteer::datapath::backlogs::LIMIT_MAX;
use serde::{Deserialize, Serialize};

use crate::helpers::process::{Ended, Rxsteer, accounts};

/// Names the variable with the [`Start`] of such a process.
const START: &str = "RXSTEER_TEST_START";

/// Options of a start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    pub device: String,
    pub policy: String,
    pub rps_cpus: String,
    /// Most backlogs.
    pub backlogs: usize,
    pub unguarded: bool,
}

impl Start {
    /// In a process that [`Life::start`] has started: runs rxsteer and does not return.
    pub fn run_if_told() -> Result<()> {
        let Ok(start) = std::env::var(START) else {
            return Ok(());
        };
        let start: Self = serde_json::from_str(&start)?;
        let command = Command::Run(Box::new(start.run()?));
        let ended = program::main(command.log_level(), || command.run());
        std::process::exit(i32::from(ended != ExitCode::SUCCESS))
    }

    fn run(&self) -> Result<RunArgs> {
        let options = Options {
            rps_cpus: self.rps_cpus.parse()?,
            mode: Mode::Native,
            // Backlogs with room for all that waits, so that little is dropped.
            backlog: Some(LIMIT_MAX),
            flow_limit: 0,
            bounds: Bounds {
                backlogs: self.backlogs,
                ..Bounds::default()
            },
            unguarded: self.unguarded,
            ..Options::new([self.device.as_str()])
        };
        let policy = self.policy.parse().map_err(anyhow::Error::msg)?;
        Ok(RunArgs {
            options,
            policy: Some(policy),
            config: None,
        })
    }
}

/// A running rxsteer.
pub struct Life {
    pub rxsteer: Rxsteer,
    unguarded: bool,
}

impl Life {
    /// Starts this test program again, as rxsteer; `test` calls [`Start::run_if_told`] first.
    pub fn start(netns: &Netns, test: &str, start: &Start) -> Result<Self> {
        let mut command = netns.command(std::env::current_exe()?)?;
        command.args(["--exact", "--nocapture", "--include-ignored", test]);
        command.env(START, serde_json::to_string(start)?);
        command.stdin(std::process::Stdio::null());
        command.stdout(std::process::Stdio::null());
        // SAFETY: system calls only. The test program has threads when rxsteer begins, and these
        // must not take its signals.
        unsafe {
            command.pre_exec(|| {
                let mut stop = SigSet::empty();
                stop.add(Signal::SIGTERM);
                Ok(stop.thread_block()?)
            });
        }
        let rxsteer = Rxsteer::spawn(netns, command, true)?;
        let rxsteer = rxsteer.map_err(|ended| anyhow::anyhow!("{ended:?}"))?;
        let unguarded = start.unguarded;
        Ok(Self { rxsteer, unguarded })
    }

    /// The queues, of the only device.
    pub fn queues(&self) -> Result<Vec<Queue>> {
        let mut status = self.rxsteer.status()?;
        let device = status.devices.pop().context("it steers a device")?;
        Ok(device.queues)
    }

    /// Ends it as SIGTERM does. Returns the frames that it has not delivered since its start.
    pub fn stop(self) -> Result<u64> {
        let unguarded = self.unguarded;
        let ended = self.rxsteer.stop(Signal::SIGTERM)?;
        in_order(&ended, unguarded)
    }
}

/// Checks an orderly end, and that the accounts in the log close. Returns the frames that were
/// dropped or lost.
fn in_order(ended: &Ended, unguarded: bool) -> Result<u64> {
    ensure!(ended.code == Some(0), "not an orderly end: {ended:?}");
    ensure!(
        unguarded || !ended.log.contains("overtake"),
        "frames were left behind: {ended:?}"
    );
    let accounts = accounts(&ended.log)?;
    ensure!(!accounts.is_empty(), "no account: {ended:?}");
    let missing = accounts.iter().map(|a| a.dropped + a.shed + a.lost);
    Ok(missing.sum())
}
