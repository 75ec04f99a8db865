// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the programs of this project do alike: log, be stopped, print an answer.

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::{Context, Result};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use nix::sys::signalfd::SignalFd;
use serde::Serialize;
use tracing_subscriber::filter::LevelFilter;

/// Runs a command and logs why it failed. RXSTEER_LOG in the environment replaces the level. Exit
/// status: the command's, 1 when it failed, 2 when there is no such level.
pub fn main(level: LevelFilter, command: impl FnOnce() -> Result<ExitCode>) -> ExitCode {
    let level = match std::env::var("RXSTEER_LOG").map(|level| level.parse()) {
        Ok(Ok(level)) => level,
        Err(_) => level,
        Ok(Err(_)) => {
            eprintln!("RXSTEER_LOG is off, error, warn, info, debug or trace");
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        // Colours are for a terminal, not for a journal or a file.
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
    match command() {
        Ok(status) => status,
        Err(e) => {
            for line in format!("{e:#}").lines() {
                tracing::error!("{line}");
            }
            ExitCode::FAILURE
        }
    }
}

/// SIGINT, SIGTERM and SIGHUP as a file descriptor; they no longer end the process by themselves.
pub fn stop_signals() -> Result<SignalFd> {
    let mut stop = SigSet::empty();
    stop.add(Signal::SIGINT);
    stop.add(Signal::SIGTERM);
    stop.add(Signal::SIGHUP);
    stop.thread_block().context("blocking the stop signals")?;
    SignalFd::new(&stop).context("waiting for signals")
}

/// Who reads may stop reading: `rxsteer status --interval 1 | head`.
pub fn end_with_the_reader() -> Result<()> {
    // SAFETY: restores the default, which runs no code of ours.
    unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }?;
    Ok(())
}

/// As JSON on one line, or as text.
pub fn print_answer<T: Serialize>(json: bool, answer: &T, render: fn(&T) -> String) -> Result<()> {
    match json {
        true => println!("{}", serde_json::to_string(answer)?),
        false => print!("{}", render(answer)),
    }
    Ok(())
}
