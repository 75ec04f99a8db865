// SPDX-License-Identifier: MIT OR Apache-2.0
//! A setting of the host, changed for as long as the lab needs it and put back whatever happens.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// A file in /proc/sys or /sys. Dropped, it holds again what it held before; should this process
/// be killed, a child that waits for nothing else writes it.
pub struct Setting {
    path: String,
    before: String,
    guardian: Child,
}

impl Setting {
    /// Nothing changes yet.
    ///
    /// # Errors
    /// When the host has no such setting.
    pub fn keep(path: &str) -> Result<Self> {
        let before = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
        let before = before.trim().to_owned();
        // Its standard input ends when the last who could write to it has: that is this process.
        let guardian = Command::new("sh")
            .args(["-c", r#"trap "" INT TERM HUP; read -r _; echo "$1" >"$0""#])
            .args([path, before.as_str()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // Away from a terminal's Ctrl-C.
            .process_group(0)
            .spawn()
            .with_context(|| format!("nobody to put {path} back: is there no sh?"))?;
        Ok(Self {
            path: path.to_owned(),
            before,
            guardian,
        })
    }

    /// Changes it; returns when the kernel has done so.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set(&self, value: &str) -> Result<()> {
        fs::write(&self.path, value)
            .with_context(|| format!("cannot write {value} to {}", self.path))
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Err(error) = self.set(&self.before) {
            tracing::warn!("{error:#}");
        }
        drop(self.guardian.stdin.take());
        let _ = self.guardian.wait();
    }
}
