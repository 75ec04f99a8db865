// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process in a network namespace, by which others find the namespace.

use std::process::{Child, Stdio};

use anyhow::Result;

use super::netns::Netns;

/// The process, killed on drop.
pub struct Resident(Child);

impl Resident {
    /// In this namespace.
    ///
    /// # Errors
    /// No process can be started.
    pub fn start(netns: &Netns) -> Result<Self> {
        let mut sleep = netns.command("sleep")?;
        Ok(Self(sleep.arg("600").stdin(Stdio::null()).spawn()?))
    }

    /// Its id.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
