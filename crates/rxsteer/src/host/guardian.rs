// SPDX-License-Identifier: MIT OR Apache-2.0
//! A child process that restores what this process has changed, also after SIGKILL. It reads the
//! changes line by line from its standard input; end of file starts the restore.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SigSet, Signal};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::warn;

use super::record::{self, Record};

/// The child process. Dropping this restores everything.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
    record: Option<Record>,
}

impl Guardian {
    /// Starts this program with the hidden `command`. It holds `lock` until all is restored.
    ///
    /// # Errors
    /// When the process can't be started.
    pub fn start(command: &str, lock: Option<File>) -> Result<Self> {
        Self::spawn(&mut hidden(command), lock, None)
    }

    /// The same, with a record of `what` is changed, in words, for the case that the child is killed
    /// too.
    ///
    /// # Errors
    /// When the process can't be started.
    pub fn recorded(command: &str, lock: Option<File>, what: &str) -> Result<Self> {
        Self::spawn(&mut hidden(command), lock, record(Some(command), what))
    }

    /// Starts the child of a process that was killed again, with the lines that it was told.
    ///
    /// # Errors
    /// When the process can't be started.
    pub(super) fn again(command: &str, lines: &str, record: Record) -> Result<Self> {
        let mut this = Self::spawn(&mut hidden(command), None, Some(record))?;
        let pipe = this.child.stdin.as_mut().context("it is piped")?;
        pipe.write_all(lines.as_bytes())?;
        Ok(this)
    }

    /// Starts another program that restores at the end of its standard input, and then removes the
    /// record.
    pub(super) fn spawn(
        command: &mut Command,
        lock: Option<File>,
        record: Option<Record>,
    ) -> Result<Self> {
        if let Some(record) = &record {
            record.give(command);
        }
        let child = command
            .stdin(Stdio::piped())
            // The child doesn't write to its standard output; it only keeps the lock open.
            .stdout(lock.map_or_else(Stdio::null, Stdio::from))
            // Its own process group, so that a terminal's Ctrl-C doesn't reach it.
            .process_group(0)
            .spawn();
        if let (Err(_), Some(record)) = (&child, &record) {
            record.discard();
        }
        let child = child.context("no process to put back what is changed")?;
        Ok(Self { child, record })
    }

    /// Reports a change to the child. Call this before the change is made.
    ///
    /// # Errors
    /// When the child has ended: the change must not be made then.
    pub fn tell(&mut self, what: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        if let Some(record) = &mut self.record {
            record.add(&line)?;
        }
        let pipe = self
            .child
            .stdin
            .as_mut()
            .context("all is put back already")?;
        pipe.write_all(&line)
            .context("the process that puts back what is changed has ended")
    }

    /// Restores everything and waits for the child to end.
    ///
    /// # Errors
    /// When something could not be restored; the child has logged what.
    pub fn end(&mut self) -> Result<()> {
        if self.child.stdin.take().is_none() {
            return Ok(());
        }
        let status = self.child.wait()?;
        ensure!(status.success(), "not all is as it was ({status})");
        Ok(())
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            tracing::error!("{e:#}");
        }
    }
}

/// The program that has the hidden commands, if it is not this one.
static PROGRAM: OnceLock<&str> = OnceLock::new();

/// For programs without hidden commands: the path of one that has them. The first call counts.
pub fn run_by(program: &'static str) {
    PROGRAM.get_or_init(|| program);
}

fn hidden(command: &str) -> Command {
    let mut program = Command::new(PROGRAM.get().unwrap_or(&"/proc/self/exe"));
    program.arg(command);
    program
}

/// A record of what is going to be changed; `None` if there can be none, which is logged.
pub(super) fn record(command: Option<&str>, what: &str) -> Option<Record> {
    let record = Record::new(command, what);
    record
        .inspect_err(|e| {
            warn!("{what}: stays if this process and its child are both killed: {e:#}")
        })
        .ok()
}

/// Runs in the child: restores by `undo`, and removes the record.
///
/// # Errors
/// When something could not be restored.
pub fn put_back(undo: impl FnOnce() -> Result<()>) -> Result<()> {
    undo()?;
    record::done()
}

/// Runs in the child, with signals blocked: passes each change to `keep` until end of file.
///
/// # Errors
/// When standard input can't be read.
pub fn told<T: DeserializeOwned>(mut keep: impl FnMut(T)) -> Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block()?;
    for line in io::stdin().lock().lines() {
        // A killed parent may leave a partial line; that change was not made.
        if let Ok(what) = serde_json::from_str(&line?) {
            keep(what);
        }
    }
    Ok(())
}
