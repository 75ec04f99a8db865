// SPDX-License-Identifier: MIT OR Apache-2.0
//! This host with a device of its own, and the peer that puts the load on it.

use anyhow::Result;
use indexmap::IndexMap;
use rxsteer::host::device::Device;

use crate::bench::experiment::On;
use crate::bench::peer::server::Peer;
use crate::bench::setup::mode::{Active, Way};
use crate::bench::setup::testbed::Masks;
use crate::lab::link::End;

/// What a [`Testbed`](super::testbed::Testbed) is in the lab.
pub struct Pair {
    /// The device under test.
    pub end: End,
    /// Connected from the device's address.
    pub peer: Peer,
    device: Device,
    masks: Masks,
}

impl Pair {
    /// Opens the device and connects to the peer. Nothing is changed yet.
    ///
    /// # Errors
    /// When there is no such device, it is down, without an address or somebody else's program on it;
    /// when the peer is not there or of another version; when this host has a single CPU.
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

    /// The CPUs to choose from.
    pub fn masks(&self) -> &Masks {
        &self.masks
    }

    /// What shapes all figures of a scenario.
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

    /// What should be known before.
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

    /// Switches a way to steer on.
    ///
    /// # Errors
    /// When it can't be, with the reason.
    pub fn start(&self, way: Way) -> Result<Active<'_>> {
        Active::start(&self.end, way.mode, self.masks.of(way))
    }
}
