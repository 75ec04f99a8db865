// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices that come, go or get another name while others are steered. Those that match a pattern
//! need no start anew: they share program, tables and queues.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::net::if_::if_nameindex;
use tracing::{info, warn};

use super::patterns::open;
use super::plan::{Named, Steered};
use super::steering::Steering;

/// Requests and events wait no longer than this while devices arrive by the hundred.
const LONGEST: Duration = Duration::from_millis(100);

impl Steering {
    /// Compares the devices with those that are steered, after an event. Returns whether devices are
    /// left for another call.
    ///
    /// # Errors
    /// When the devices can't be listed.
    pub(super) fn devices_changed(&mut self) -> Result<bool> {
        let start = Instant::now();
        let devices = if_nameindex().context("cannot list the network devices")?;
        let name = |name: &std::ffi::CStr| name.to_string_lossy().into_owned();
        let mut now: BTreeMap<u32, String> = devices
            .iter()
            .map(|d| (d.index(), name(d.name())))
            .collect();
        self.patterns
            .reported
            .retain(|index, name| now.get(index) == Some(name));
        for index in (0..self.devices.len()).rev() {
            let steered = &mut self.devices[index];
            let now = now.remove(&steered.device.ifindex);
            if let Some(now) = now.as_ref().filter(|now| **now != steered.device.name) {
                info!(device = %now, "{} is called {now} now", steered.device.name);
                steered.device.name.clone_from(now);
            }
            let stays = now.is_some_and(|now| self.patterns.matches(&now));
            if steered.named == Named::Pattern && !stays {
                info!(device = %steered.device.name, "{} is not steered any longer", steered.device.name);
                self.forget(index);
            }
        }
        for (ifindex, name) in now {
            let known = self.patterns.reported.contains_key(&ifindex);
            let matches = self.patterns.matches(&name);
            if known || !matches {
                continue;
            }
            if start.elapsed() > LONGEST {
                return Ok(true);
            }
            if let Err(e) = self.arrived(&name) {
                warn!(device = %name, "{name} is not steered: {e:#}");
                self.patterns.reported.insert(ifindex, name);
            }
        }
        Ok(false)
    }

    fn arrived(&mut self, name: &str) -> Result<()> {
        let device = open(name)?;
        if device.loopback {
            return Ok(());
        }
        let mut steered = Steered::by_pattern(device)?;
        let queue = self.datapath.softirq_queue();
        steered.first_queue = queue.context("softirq mode was not prepared")?;
        self.datapath.add(steered.config())?;
        self.devices.push(steered);
        self.unsteered.added();
        let index = self.devices.len() - 1;
        let attached = self.attach(index);
        match attached {
            Ok(()) => info!(device = %name, "{name} is steered in softirq mode"),
            Err(_) => self.forget(index),
        }
        attached
    }

    fn forget(&mut self, index: usize) {
        self.datapath.remove(index);
        self.devices.remove(index);
        self.unsteered.removed(index);
    }
}
