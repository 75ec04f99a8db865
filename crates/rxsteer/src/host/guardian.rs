// SPDX-License-Identifier: MIT OR Apache-2.0
//! A child that puts back what this process has changed, when this process has ended, killed or not:
//! its standard input ends then. Until that it is told, line by line, what there is to put back.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SigSet, Signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The child. When this is dropped, it puts everything back.
pub struct Guardian(Child);

impl Guardian {
    /// Starts it: this program, with a hidden command. It may hold a lock until all is put back.
    ///
    /// # Errors
    /// When no process can be made.
    pub fn start(command: &str, lock: Option<File>) -> Result<Self> {
        let guardian = Command::new("/proc/self/exe")
            .arg(command)
            .stdin(Stdio::piped())
            // An output that it does not use.
            .stdout(lock.map_or_else(Stdio::null, Stdio::from))
            // Away from a terminal's Ctrl-C.
            .process_group(0)
            .spawn()
            .context("nobody to put back what is changed")?;
        Ok(Self(guardian))
    }

    /// Tells it of a change that is about to be made.
    ///
    /// # Errors
    /// When it has ended: then the change must not be made.
    pub fn tell(&mut self, what: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        let pipe = self.0.stdin.as_mut().context("all is put back already")?;
        pipe.write_all(&line)
            .context("the process that puts back what is changed has ended")
    }

    /// Returns when all is as it was.
    ///
    /// # Errors
    /// When something could not be put back; it has been said what.
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

/// In the child: hands each thing that it is told to `keep`, and returns when nobody is left who could
/// tell more.
///
/// # Errors
/// When its input can't be read.
pub fn told<T: DeserializeOwned>(mut keep: impl FnMut(T)) -> Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block()?;
    for line in io::stdin().lock().lines() {
        // Who is killed may leave half a line: of a change that was not made.
        if let Ok(what) = serde_json::from_str(&line?) {
            keep(what);
        }
    }
    Ok(())
}
