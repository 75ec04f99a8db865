// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices that are to be steered and are not: they are gone, a start anew has refused them, or they
//! have become ports of a bond. They are steered when they can be, by a start anew.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use tracing::{info, warn};

use super::bonds::{ports, with_ports};
use super::options::Options;
use super::plan::{Named, Steered, mode_for};
use crate::host::device::{self, Device};

/// Time until a device is tried again that a start anew has refused: the other devices lose time.
const AGAIN: Duration = Duration::from_secs(60);

/// See the module's documentation.
pub(super) struct Absent {
    options: Options,
    by_name: BTreeMap<String, Entry>,
}

struct Entry {
    /// In a sentence.
    why: String,
    /// No device has the name, or another one than the one that was steered.
    gone: bool,
    /// Index of the device that had the name at the last look.
    seen: Option<u32>,
    /// No start anew for this device before.
    after: Instant,
}

impl Entry {
    fn gone(name: &str) -> Self {
        Self {
            why: format!("{name} is gone: a device of this name will be steered when it is there"),
            gone: true,
            seen: None,
            after: Instant::now(),
        }
    }
}

impl Absent {
    pub(super) fn new(options: &Options) -> Self {
        Self {
            options: options.clone(),
            by_name: BTreeMap::new(),
        }
    }

    /// A start anew, or the kernel, has refused the device of this name. It may also be gone.
    pub(super) fn refuse(&mut self, name: &str, why: &str) {
        if device::names().is_ok_and(|names| !names.iter().any(|known| known == name)) {
            self.by_name.insert(name.to_owned(), Entry::gone(name));
            return;
        }
        let entry = Entry {
            why: format!("{name} is not steered: {why}"),
            gone: false,
            seen: None,
            after: Instant::now() + AGAIN,
        };
        let before = self.by_name.insert(name.to_owned(), entry);
        self.log_change(name, before.as_ref().map(|entry| &entry.why[..]));
    }

    /// The device of this name is steered now.
    pub(super) fn attached(&mut self, name: &str) {
        if self.by_name.remove(name).is_some() {
            info!(device = %name, "{name} is steered again");
        }
    }

    /// Why no device of this name is steered, in a sentence.
    pub(super) fn why(&self, name: &str) -> Option<&str> {
        self.by_name.get(name).map(|entry| &entry.why[..])
    }

    /// Whether the device is there, and no program could be attached to it.
    pub(super) fn is_refused(&self, name: &str) -> bool {
        self.by_name.get(name).is_some_and(|entry| !entry.gone)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// Looks for devices that have gone since the last look; returns their places in `devices`.
    pub(super) fn gone(&mut self, devices: &[Steered]) -> Vec<usize> {
        let mut gone = Vec::new();
        for (index, Steered { device, .. }) in devices.iter().enumerate() {
            let name = &device.name;
            let known = self.by_name.get(name).is_some_and(|entry| entry.gone);
            // If the kernel can't be asked, as without descriptors, nothing is known.
            if known || !device.is_gone().unwrap_or(false) {
                continue;
            }
            let entry = Entry::gone(name);
            warn!(device = %name, "{}", entry.why);
            self.by_name.insert(name.clone(), entry);
            gone.push(index);
        }
        gone
    }

    /// Looks at the ports of bonds, after a start or later: those that are neither `steered` nor known are
    /// to be steered. Returns whether a steered one has left its bond.
    pub(super) fn look_at_ports(&mut self, steered: &[&Steered]) -> bool {
        let ports: Vec<String> = ports(&self.options.devices).collect();
        let left = self.port_left(&ports, steered);
        for port in ports {
            let is_steered = steered.iter().any(|steered| steered.device.name == port);
            if is_steered || self.by_name.contains_key(&port) {
                continue;
            }
            info!(device = %port, "{port} has become the port of a bond");
            let entry = Entry {
                why: format!("{port} has become the port of a bond, and is not steered yet"),
                gone: false,
                seen: None,
                after: Instant::now(),
            };
            self.by_name.insert(port, entry);
        }
        left
    }

    /// Whether one of the `steered` devices has been a port, and is none of these now. A bond without ports
    /// keeps its last one, since nothing would be left to steer.
    fn port_left(&self, ports: &[String], steered: &[&Steered]) -> bool {
        let is_wanted = |Steered { device, named, .. }: &Steered| {
            let mut wanted = ports.iter().chain(&self.options.devices);
            *named == Named::Pattern || wanted.any(|name| *name == device.name)
        };
        let (remain, left): (Vec<&Steered>, Vec<&Steered>) =
            steered.iter().partition(|s| is_wanted(s));
        if remain.is_empty() {
            return false;
        }
        for name in left.iter().map(|s| &s.device.name) {
            info!(device = %name, "{name} has left its bond: starting anew without it");
        }
        !left.is_empty()
    }

    /// Looks for devices of these names that a start anew can steer. They are new ones, or were
    /// refused. A device is examined at the second look that sees it: others set it up first.
    /// A start anew is one of the `steered` devices too.
    pub(super) fn back(&mut self, steered: &[&Steered]) -> bool {
        if self.by_name.is_empty() {
            return false;
        }
        let wanted = [
            with_ports(&self.options.devices),
            self.options.devices.clone(),
        ]
        .concat();
        let (mut back, names) = (false, self.by_name.keys().cloned().collect::<Vec<_>>());
        for name in names {
            let entry = self.by_name.get_mut(&name).expect("its key was listed");
            let now = match if_nametoindex(name.as_str()) {
                Err(Errno::ENODEV) if !entry.gone => {
                    *entry = Entry::gone(&name);
                    continue;
                }
                now => now.ok(),
            };
            let settled = std::mem::replace(&mut entry.seen, now) == now && now.is_some();
            if !settled || !wanted.contains(&name) || Instant::now() < entry.after {
                continue;
            }
            match self.examine(&name, steered) {
                Ok(()) => {
                    info!(device = %name, "{name} can be steered now: starting anew");
                    back = true;
                }
                Err(e) => self.obstructed(&name, &format!("{e:#}")),
            }
        }
        back
    }

    /// Whether a start could steer the device and the others.
    fn examine(&self, name: &str, steered: &[&Steered]) -> Result<()> {
        for name in with_ports(&[name.to_owned()]) {
            let device = Device::open(&name)?;
            device.unobstructed(mode_for(&device, &self.options))?;
        }
        steered
            .iter()
            .try_for_each(|steered| steered.unobstructed())
    }

    fn obstructed(&mut self, name: &str, why: &str) {
        let why = format!("{name} is there, and can't be steered: {why}");
        let entry = self.by_name.get_mut(name).expect("its key was listed");
        let before = std::mem::replace(&mut entry.why, why);
        self.log_change(name, Some(&before));
    }

    fn log_change(&self, name: &str, before: Option<&str>) {
        let why = self.why(name);
        if why != before {
            warn!(device = %name, "{}", why.unwrap_or_default());
        }
    }
}
