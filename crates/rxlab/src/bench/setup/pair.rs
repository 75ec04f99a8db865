// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device of this host, and the peer that generates its load.

use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use indexmap::IndexMap;
use rxsteer::host::device::Device;

use crate::bench::experiment::{DeviceKind, On};
use crate::bench::peer::server::Peer;
use crate::bench::setup::local::Local;
use crate::bench::setup::mode::{Active, Way};
use crate::bench::setup::testbed::Masks;
use crate::lab::link::End;

/// Counterpart of the lab's [`Testbed`](super::testbed::Testbed).
pub struct Pair {
    /// The device under test.
    pub end: End,
    peer: SocketAddr,
    device: Device,
    masks: Masks,
    /// The device and the peer, if they are the lab's.
    local: Option<Local>,
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
            peer: Peer::connect(&end, on.peer)?.address(),
            masks: Masks::of_device(&device)?,
            end,
            device,
            local: None,
        })
    }

    /// Makes a device of this kind, and its peer on this machine.
    ///
    /// # Errors
    /// When the kernel does not know the kind; this host has a single CPU.
    pub fn in_the_lab(kind: DeviceKind) -> Result<Self> {
        let masks = Masks::host()?;
        let local = Local::new(kind, &masks)?;
        let end = local.dut.run(|| End::of_host(&local.name))?;
        Ok(Self {
            peer: local.peer,
            device: local.dut.run(|| Device::open(&local.name))?,
            end,
            masks,
            local: Some(local),
        })
    }

    /// Whether the peer's CPUs are this machine's.
    pub fn is_local(&self) -> bool {
        self.local.is_some()
    }

    /// Connects to the peer, from the device's address: for one measurement, since a peer serves one
    /// connection at a time, and several scenarios may have the same peer.
    ///
    /// # Errors
    /// As [`Peer::connect`].
    pub fn peer(&self) -> Result<Peer> {
        Peer::connect(&self.end, self.peer)
    }

    /// The local address to which the peer sends.
    ///
    /// # Errors
    /// The device has no address of the peer's family.
    pub fn address(&self) -> Result<IpAddr> {
        self.end.address_towards(self.peer.ip())
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
            ("peer".to_owned(), self.peer.to_string()),
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
