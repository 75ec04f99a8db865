// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared code of this project's programs: logging, stop signals, output.

use std::process::ExitCode;

use anyhow::{Context, Result};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use nix::sys::signalfd::SignalFd;
use serde::Serialize;
use tracing_subscriber::filter::LevelFilter;

use super::log;
use crate::api::line::printable_message;
use crate::daemon::mistakes::Mistakes;

/// Exit status for mistakes in the command line, the configuration or the environment, as clap has it for
/// the first. The unit (dist/rxsteer.service) does not start rxsteer again then.
const MISTAKE: u8 = 2;

/// Runs a command and logs why it failed. RXSTEER_LOG in the environment replaces the level. Exit
/// status: the command's, [`MISTAKE`], or 1 if it failed for another reason.
pub fn main(level: LevelFilter, command: impl FnOnce() -> Result<ExitCode>) -> ExitCode {
    let level = match std::env::var("RXSTEER_LOG").map(|level| level.parse()) {
        Ok(Ok(level)) => level,
        Err(_) => level,
        Ok(Err(_)) => {
            eprintln!("RXSTEER_LOG is off, error, warn, info, debug or trace");
            return ExitCode::from(MISTAKE);
        }
    };
    log::start(level);
    match command() {
        Ok(status) => status,
        Err(e) => match e.downcast::<clap::Error>() {
            Ok(usage) => usage.exit(),
            Err(e) => {
                for line in format!("{e:#}").lines() {
                    tracing::error!("{line}");
                }
                match e.is::<Mistakes>() {
                    true => ExitCode::from(MISTAKE),
                    false => ExitCode::FAILURE,
                }
            }
        },
    }
}

/// SIGINT, SIGTERM and SIGHUP as a file descriptor; they no longer end the process by themselves.
pub fn stop_signals() -> Result<SignalFd> {
    signals(&[Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP])
}

/// These signals as a file descriptor; they are blocked in this thread, and in those that it starts.
pub fn signals(signals: &[Signal]) -> Result<SignalFd> {
    let signals: SigSet = signals.iter().copied().collect();
    signals.thread_block().context("blocking the signals")?;
    SignalFd::new(&signals).context("waiting for signals")
}

/// Restores the default action of SIGPIPE: the program ends when its reader does (`| head`).
pub fn end_with_the_reader() -> Result<()> {
    // SAFETY: the default action runs no code of this process.
    unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }?;
    Ok(())
}

/// Prints an answer as JSON on one line, or as text, in which names that others have chosen can do
/// nothing to a terminal.
pub fn print_answer<T: Serialize>(json: bool, answer: &T, render: fn(&T) -> String) -> Result<()> {
    match json {
        true => println!("{}", serde_json::to_string(answer)?),
        false => print!("{}", printable_message(&render(answer))),
    }
    Ok(())
}
