// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device of this host, and the peer that generates its load.

use anyhow::Result;
use indexmap::IndexMap;
use rxsteer::host::device::Device;

use crate::bench::experiment::On;
use crate::bench::peer::server::Peer;
use crate::bench::setup::mode::{Active, Way};
use crate::bench::setup::testbed::Masks;
use crate::lab::link::End;

/// Counterpart of the lab's [`Testbed`](super::testbed::Testbed).
pub struct Pair {
    /// The device under test.
    pub end: End,
    /// Connected from the device's address.
    pub peer: Peer,
    device: Device,
    masks: Masks,
}

impl Pair {
    /// Opens the device and connects to the peer, without changing anything.
    ///
    /// # Errors
    /// The device does not exist, is down, has no address or has an XDP program; the peer is absent
    /// or of another version; this host has a single CPU.
    pub fn meet(on: &On) -> Result<Self> {
        let device = Device::open(&on.device)?;
        device.without_xdp()?;
        let end = End::of_host(&on.device)?;
        Ok(Self {
            peer: Peer::connect(&end, on.peer)?,
            masks: Masks::of_device(&device)?,
            end,
            device,
        })
    }

    pub fn masks(&self) -> &Masks {
        &self.masks
    }

    /// Conditions that apply to all figures of a scenario.
    pub fn conditions(&self) -> IndexMap<String, String> {
        let polling = match self.masks.polling.is_empty() {
            true => "CPUs that are not known".to_owned(),
            false => format!("CPUs {}", self.masks.polling),
        };
        let Device {
            name,
            driver,
            rx_queues,
            ..
        } = &self.device;
        let queues = format!("{rx_queues} of {name} ({driver}), polled on {polling}");
        IndexMap::from([
            ("queues".to_owned(), queues),
            ("masks".to_owned(), self.masks.to_string()),
            ("peer".to_owned(), self.peer.address().to_string()),
        ])
    }

    /// Remarks for the reader of the figures.
    pub fn notes(&self) -> Vec<String> {
        let files = &self.device.kernel_rps;
        let kept = || {
            format!(
                "Kernel RPS is on for {} ({}). It is off while this runs, except in its own modes, and \
                 afterwards as it was.",
                self.end.name,
                files.join(", ")
            )
        };
        (!files.is_empty()).then(kept).into_iter().collect()
    }

    /// Switches a mode on.
    ///
    /// # Errors
    /// When it can't be switched on.
    pub fn start(&self, way: Way) -> Result<Active<'_>> {
        Active::start(&self.end, way.mode, self.masks.of(way))
    }
}
