// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--prepare`: what stands against native mode is changed while rxsteer runs.

use anyhow::Result;
use tracing::info;

use super::bonds::with_ports;
use super::options::{Mode, Options};
use crate::host::device::{Device, RxMode};
use crate::host::objection::Objection;
use crate::host::offloads::{TurnedOff, lock};

/// Changed settings, by device. They are put back on drop, the last device first.
#[derive(Default)]
pub(super) struct Prepared(Vec<TurnedOff>);

impl Prepared {
    /// Waits until an earlier rxsteer has put back what it changed. Then, under `--prepare`, changes
    /// the devices that native mode is possible for afterwards; a dry run changes nothing.
    ///
    /// # Errors
    /// When the kernel refuses a change; then everything is as before.
    pub(super) fn new(options: &Options) -> Result<Self> {
        let mut prepared = Self::default();
        for name in with_ports(&options.devices) {
            // Without such a device the check of the options fails, with a list of those there are.
            let Ok(lock) = lock(&name) else { continue };
            if !options.prepare {
                continue;
            }
            let device = Device::open(&name)?;
            if let Some(objection) = remaining(&device, options.mode) {
                info!("{name}: --prepare changes nothing: {}", objection.reason);
                continue;
            }
            let changes = device.preparation()?;
            if changes.is_empty() {
                info!("{name}: --prepare has nothing to change");
            } else if options.dry_run {
                for change in &changes {
                    info!("--prepare would set: {change} on -> off");
                }
            } else {
                prepared.0.push(TurnedOff::new(&changes, lock)?);
            }
        }
        Ok(prepared)
    }

    /// Puts everything back.
    ///
    /// # Errors
    /// When something is not as before; the log says what.
    pub(super) fn put_back(mut self) -> Result<()> {
        let mut outcome = Ok(());
        while let Some(changed) = self.0.pop() {
            outcome = outcome.and(changed.put_back());
        }
        outcome
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// What would still stand against native mode.
fn remaining(device: &Device, mode: Mode) -> Option<Objection> {
    let prepared = device.prepared();
    match mode {
        Mode::Auto => prepared.objection_to_native(),
        Mode::Native => {
            let mut objections = prepared.objections(RxMode::Native).into_iter();
            objections.find(|objection| objection.fatal)
        }
        Mode::Skb | Mode::Generic => Some(Objection {
            reason: "only native mode needs it".to_owned(),
            remedy: String::new(),
            fatal: false,
        }),
    }
}
