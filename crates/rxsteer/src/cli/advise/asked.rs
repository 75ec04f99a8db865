// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `rxsteer advise` is to watch, and how.

use std::time::Duration;

use anyhow::Result;

use crate::daemon::options::{Mode, RpsCpus};

/// A stop signal came before the time was over.
#[derive(Debug, thiserror::Error)]
#[error("stopped before the time was over: no advice")]
pub struct Stopped;

/// What is to be watched, and how.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// How long.
    pub time: Duration,
    /// CPUs that may process packets.
    pub cpus: &'a RpsCpus,
    /// Where packets would be steered.
    pub mode: Mode,
    /// With a dry run where it is possible.
    pub attach: bool,
    /// Waits for a time; fails with [`Stopped`] if this is to stop.
    pub pause: &'a dyn Fn(Duration) -> Result<()>,
}
