// SPDX-License-Identifier: MIT OR Apache-2.0
//! A child process that restores what this process has changed, also after SIGKILL. It reads the
//! changes line by line from its standard input; end of file starts the restore.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SigSet, Signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The child process. Dropping this restores everything.
#[derive(Debug)]
pub struct Guardian(Child);

impl Guardian {
    /// Starts this program with the hidden `command`. It holds `lock` until all is restored.
    ///
    /// # Errors
    /// When the process can't be started.
    pub fn start(command: &str, lock: Option<File>) -> Result<Self> {
        Self::spawn(Command::new("/proc/self/exe").arg(command), lock)
    }

    /// Starts another program that restores at the end of its standard input.
    pub(super) fn spawn(command: &mut Command, lock: Option<File>) -> Result<Self> {
        let guardian = command
            .stdin(Stdio::piped())
            // The child doesn't write to its standard output; it only keeps the lock open.
            .stdout(lock.map_or_else(Stdio::null, Stdio::from))
            // Its own process group, so that a terminal's Ctrl-C doesn't reach it.
            .process_group(0)
            .spawn()
            .context("no process to put back what is changed")?;
        Ok(Self(guardian))
    }

    /// Reports a change to the child. Call this before the change is made.
    ///
    /// # Errors
    /// When the child has ended: the change must not be made then.
    pub fn tell(&mut self, what: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        let pipe = self.0.stdin.as_mut().context("all is put back already")?;
        pipe.write_all(&line)
            .context("the process that puts back what is changed has ended")
    }

    /// Restores everything and waits for the child to end.
    ///
    /// # Errors
    /// When something could not be restored; the child has logged what.
    pub fn end(&mut self) -> Result<()> {
        if self.0.stdin.take().is_none() {
            return Ok(());
        }
        let status = self.0.wait()?;
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
