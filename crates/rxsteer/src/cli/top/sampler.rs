// SPDX-License-Identifier: MIT OR Apache-2.0
//! The thread that asks the running rxsteer: an overloaded host may take seconds to answer, in which
//! keys still work.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::model::Sample;
use crate::api::client;
use crate::api::flows::{Most, Query};
use crate::cli::pinned;

/// Flows that are asked for.
const FLOWS: usize = 1000;

/// Flows that have been idle for longer are not asked for, and at least for some intervals.
const IDLE: Duration = Duration::from_secs(10);

/// Time until the second sample, at most.
const FIRST: Duration = Duration::from_secs(1);

/// When to ask, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    pub interval: Duration,
    pub paused: bool,
    pub most: Most,
}

/// Asks once.
///
/// # Errors
/// When no rxsteer runs, it does not answer, or it does not steer the device.
pub fn sample(device: Option<&str>, pace: Pace) -> Result<Sample> {
    let so = "only a running rxsteer shows its rates";
    pinned::or_say(ask(device, pace), so)
}

fn ask(device: Option<&str>, pace: Pace) -> Result<Sample> {
    let flows = client::flows(Query {
        device: device.map(str::to_owned),
        limit: FLOWS,
        most: pace.most,
        within: Some(IDLE.max(4 * pace.interval)),
        ..Query::default()
    })?;
    Ok(Sample {
        at: Instant::now(),
        status: client::counters()?,
        flows,
    })
}

/// Asks at a pace that may change, until the sender of paces or the reader of samples is gone.
pub fn run(
    device: Option<&str>,
    mut pace: Pace,
    paces: &Receiver<Pace>,
    mut tell: impl FnMut(Result<Sample>) -> bool,
) {
    // The first rates need not wait for long.
    let mut interval = pace.interval.min(FIRST);
    loop {
        let asked = Instant::now();
        loop {
            let changed = match pace.paused {
                true => paces.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => paces.recv_timeout(interval.saturating_sub(asked.elapsed())),
            };
            match changed {
                Ok(changed) => pace = changed,
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
            interval = pace.interval;
        }
        interval = pace.interval;
        if !tell(sample(device, pace)) {
            return;
        }
    }
}
