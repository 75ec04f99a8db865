// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--prepare`: what stands against native mode is changed while rxsteer runs.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;

use anyhow::Result;
use tracing::{info, warn};

use super::bonds::with_ports;
use super::options::{Mode, Options};
use super::plan::rehearse;
use crate::host::device::{Device, RxMode};
use crate::host::left::put_back_left;
use crate::host::objection::Objection;
use crate::host::offloads::{TurnedOff, lock};
use crate::host::record;
use crate::host::remedy::Remedy;

/// Changed settings. They are put back on drop, the last device first.
#[derive(Default)]
pub(super) struct Prepared {
    /// By device.
    offloads: Vec<TurnedOff>,
    wish: Wish,
}

/// The options on which the changes depend.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wish {
    devices: Vec<String>,
    mode: Mode,
    prepare: bool,
    dry_run: bool,
}

impl Wish {
    fn of(options: &Options) -> Self {
        Self {
            devices: options.devices.clone(),
            mode: options.mode,
            prepare: options.prepare,
            dry_run: options.dry_run,
        }
    }
}

impl Prepared {
    /// Waits until an earlier rxsteer has put back what it changed, and checks the options and
    /// devices. Then, under `--prepare`, changes the devices that native mode is possible for
    /// afterwards; a dry run changes nothing.
    ///
    /// # Errors
    /// When a start by these options will fail, before anything is changed; when the kernel refuses a
    /// change, and then everything is as before.
    pub(super) fn new(options: &Options) -> Result<Self> {
        let mut prepared = Self::default();
        prepared.wish = Wish::of(options);
        // A device that is named beside its bond would wait for its own lock; the check refuses it.
        let mut locks = BTreeMap::new();
        for name in with_ports(&options.devices) {
            // Without such a device the check fails, with a list of those there are.
            if let Entry::Vacant(vacant) = locks.entry(name)
                && let Some(lock) = lock(vacant.key())?
            {
                vacant.insert(lock);
            }
        }
        // Those in use are not found: their devices are locked, or others than these.
        match options.dry_run {
            true => record::words().iter().for_each(|left| warn!("{left}")),
            false => put_back_left(),
        }
        // What is pinned is found at the start, and nothing is changed before.
        if options.pin.is_none() {
            rehearse(options)?;
        }
        if options.prepare {
            for (name, lock) in locks {
                prepared.change(&name, lock, options)?;
            }
        }
        Ok(prepared)
    }

    fn change(&mut self, name: &str, lock: File, options: &Options) -> Result<()> {
        let device = Device::open(name)?;
        if let Some(objection) = remaining(&device, options.mode) {
            info!("{name}: --prepare changes nothing: {}", objection.reason);
            return Ok(());
        }
        let changes = device.preparation()?;
        if changes.is_empty() {
            info!("{name}: --prepare has nothing to change");
        } else if options.dry_run {
            for change in &changes {
                info!("--prepare would set: {change} on -> off");
            }
        } else {
            self.offloads.push(TurnedOff::new(&changes, lock)?);
        }
        Ok(())
    }

    /// Whether other options have the same changes.
    pub(super) fn suits(&self, options: &Options) -> bool {
        self.wish == Wish::of(options)
    }

    /// Puts everything back.
    ///
    /// # Errors
    /// When something is not as before; the log says what.
    pub(super) fn put_back(mut self) -> Result<()> {
        let mut outcome = Ok(());
        while let Some(changed) = self.offloads.pop() {
            outcome = outcome.and(changed.put_back());
        }
        outcome
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        while self.offloads.pop().is_some() {}
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
        Mode::Softirq => Some(Objection {
            reason: "only native mode needs it".to_owned(),
            remedy: Remedy::default(),
            fatal: false,
        }),
    }
}
