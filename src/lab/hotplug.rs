// SPDX-License-Identifier: MIT OR Apache-2.0
//! A CPU taken offline, and put back whatever happens.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// A CPU that may go offline. Dropped, it is online again; should this process be killed, a child
/// that waits for nothing else puts it back.
pub struct Hotplug {
    path: String,
    guardian: Child,
}

impl Hotplug {
    /// The CPU is online, and stays so for now.
    ///
    /// # Errors
    /// It can't go offline (often CPU 0), or is offline already.
    pub fn new(cpu: u32) -> Result<Self> {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        let online = fs::read_to_string(&path)
            .with_context(|| format!("CPU {cpu} cannot be taken offline here"))?;
        ensure!(online.trim() == "1", "CPU {cpu} is offline already");
        // Its standard input ends when the last who could write to it has: that is this process.
        let guardian = Command::new("sh")
            .args(["-c", r#"trap "" INT TERM HUP; read -r _; echo 1 >"$0""#])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // Away from a terminal's Ctrl-C.
            .process_group(0)
            .spawn()
            .context("nobody to put the CPU back: is there no sh?")?;
        Ok(Self { path, guardian })
    }

    /// Takes it offline, or back. Returns when it is.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set(&self, online: bool) -> Result<()> {
        fs::write(&self.path, if online { "1" } else { "0" })
            .with_context(|| format!("cannot write {}", self.path))
    }
}

impl Drop for Hotplug {
    fn drop(&mut self) {
        if let Err(error) = self.set(true) {
            tracing::warn!("{error:#}");
        }
        drop(self.guardian.stdin.take());
        let _ = self.guardian.wait();
    }
}
