// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer run` in a thread of this process. The kernel detaches its programs with this process at
//! the latest.

use std::os::fd::{AsFd, OwnedFd};
use std::process;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nix::fcntl::OFlag;

use super::asked::Asked;
use crate::api::client;
use crate::api::flows::{Flows, LIMIT_MAX, Query};
use crate::api::status::Status;
use crate::daemon;
use crate::daemon::options::{Options, Tunnel};
use crate::daemon::told::Told;

/// Limit on the start. An emulated machine takes 20 s to load the programs.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Time between two looks whether it has started.
const LOOK: Duration = Duration::from_millis(20);

/// See the module's documentation. It ends on drop.
pub(super) struct Run {
    /// Closing it ends the run.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Run {
    /// Starts in the calling thread's network namespace, and returns once the programs count. In a
    /// dry run they decide, and move nothing.
    ///
    /// # Errors
    /// As [`daemon::run`]; when the pause fails.
    pub(super) fn start(
        devices: &[String],
        asked: &Asked<'_>,
        tunnels: &[Tunnel],
        dry_run: bool,
    ) -> Result<Self> {
        let options = Options {
            dry_run,
            mode: asked.mode,
            rps_cpus: asked.cpus.clone(),
            tunnels: tunnels.to_vec(),
            ..Options::new(devices.iter().cloned())
        };
        let (wait, stop) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let thread = std::thread::Builder::new().name("run".to_owned());
        let thread = thread.spawn(move || daemon::run(&options, &Told::to_stop(wait.as_fd())))?;
        let mut this = Self {
            stop: Some(stop),
            thread: Some(thread),
        };
        let start = Instant::now();
        while !client::status().is_ok_and(|status| status.pid == process::id()) {
            if this.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                this.end()?;
                bail!("the run has ended by itself");
            }
            if start.elapsed() > TIMEOUT {
                bail!("the run has not started within {TIMEOUT:?}");
            }
            (asked.pause)(LOOK)?;
        }
        Ok(this)
    }

    /// Its counters.
    ///
    /// # Errors
    /// When it does not answer.
    pub(super) fn status(&self) -> Result<Status> {
        client::status()
    }

    /// The flows with the most packets.
    ///
    /// # Errors
    /// When it does not answer.
    pub(super) fn flows(&self) -> Result<Flows> {
        client::flows(Query {
            limit: LIMIT_MAX,
            ..Query::default()
        })
    }

    /// Detaches everything.
    ///
    /// # Errors
    /// The error with which the run ended.
    pub(super) fn end(&mut self) -> Result<()> {
        drop(self.stop.take());
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(ended)) => ended,
            Some(Err(_)) => bail!("the run has panicked: this is a defect of rxsteer"),
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            tracing::warn!("{e:#}");
        }
    }
}
