// SPDX-License-Identifier: MIT OR Apache-2.0
//! The way of skbs to other CPUs, for devices in skb mode: the carriers, the programs at them, and
//! the count of skbs that the kernel drops on the way (`bpf/carrier.bpf.c`).

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel, Skel};

use super::config::{DeviceConfig, draw};
use super::shared::{lend_maps, set_constants};
use super::tables::Tables;
use crate::bpf::carrier_skel::{CarrierSkel, CarrierSkelBuilder};
use crate::bpf::open;
use crate::bpf::trace_skel::TraceSkel;
use crate::host::carrier::Carrier;
use crate::host::device::RxMode;
use crate::host::tc::{self, TcLink};
use crate::types::rx_config;

/// See the module's documentation. Without devices in skb mode there is nothing in it.
pub(super) struct Hops {
    /// Marks skbs on their way.
    mark: u64,
    /// By whether the devices' packets lack a link layer header. Each with the program's link.
    carriers: BTreeMap<bool, (TcLink, Carrier)>,
    _loaded: Option<(Link, CarrierSkel<'static>)>,
}

impl Hops {
    /// Creates and attaches what these devices need, in the network namespace of the calling
    /// thread. `base`: the constants of all objects.
    ///
    /// # Errors
    /// When a carrier can't be created, or the kernel refuses a program.
    pub(super) fn prepare(
        trace: &TraceSkel<'_>,
        tables: &Tables,
        devices: &[DeviceConfig],
        base: &rx_config,
    ) -> Result<Self> {
        let mut hops = Self {
            mark: draw()?,
            carriers: BTreeMap::new(),
            _loaded: None,
        };
        let kinds = devices.iter().filter(|device| device.mode == RxMode::Skb);
        let kinds: Vec<bool> = kinds.map(|device| device.without_mac).collect();
        if kinds.is_empty() {
            return Ok(hops);
        }
        let mut open = open(CarrierSkelBuilder::default())?;
        let constants = rx_config {
            hop_mark: hops.mark,
            ..*base
        };
        set_constants(open.open_object_mut(), &constants)?;
        lend_maps(open.open_object_mut(), trace.object(), tables)?;
        let skel = open
            .load()
            .context("the kernel refused the programs of skb mode")?;
        for without_mac in kinds {
            if hops.carriers.contains_key(&without_mac) {
                continue;
            }
            let carrier = Carrier::create(base.nr_cpus, without_mac)?;
            let link = tc::attach(skel.progs.rxsteer_carrier.as_fd(), carrier.ifindex)?;
            hops.carriers.insert(without_mac, (link, carrier));
        }
        let drops = skel.progs.on_kfree_skb.attach_trace();
        hops._loaded = Some((drops.context("attaching on_kfree_skb")?, skel));
        Ok(hops)
    }

    /// The constants of a device's program, from those of all devices.
    ///
    /// # Errors
    /// When nothing was prepared for such a device.
    pub(super) fn constants(&self, device: &DeviceConfig, base: rx_config) -> Result<rx_config> {
        let (_, carrier) = self
            .carriers
            .get(&device.without_mac)
            .context("skb mode was not prepared")?;
        Ok(rx_config {
            skb: 1,
            carrier: carrier.ifindex,
            hop_mark: self.mark,
            without_mac: device.without_mac.into(),
            ..base
        })
    }
}
