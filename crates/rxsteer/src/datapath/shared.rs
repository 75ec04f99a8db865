// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the BPF objects share: constants, and the maps of the object of the tracepoints
//! (`bpf/maps.h`).

use std::os::fd::AsFd;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, Object, OpenObject};

use super::config::{Config, DeviceConfig};
use super::hop_keys::nr_hashes;
use super::load;
use super::tables::{self, Sizes, Tables};
use super::value::bytes_of;
use crate::host::device::RxMode;
use crate::types::rx_config;

/// The constants that are the same in all objects.
pub(super) fn constants(config: &Config, nr_cpus: u32, sizes: &Sizes) -> rx_config {
    rx_config {
        flow_secret: config.secret,
        backlog_limit: config.backlog_limit.into(),
        nr_cpus,
        flow_limit: config.flow_limit * load::WHOLE / 100,
        flow_shift: sizes.flow_shift(),
        flow_options: config.flow_options(),
        inline_ports: config.inline_ports,
        sock_flow_mask: sizes.sock_flow_mask(),
        sock_flow_cpu_mask: tables::cpu_mask(nr_cpus),
        dry_run: config.dry_run.into(),
        unguarded: config.unguarded.into(),
        follow_nat: config.follow_nat.into(),
        hop_mask: nr_hashes(nr_cpus) - 1,
        ..Default::default()
    }
}

/// The constants of a device's XDP program.
pub(super) fn constants_of_device(
    config: &Config,
    nr_cpus: u32,
    sizes: &Sizes,
    queue_base: u32,
    device: &DeviceConfig,
) -> rx_config {
    rx_config {
        queue_base,
        nr_rx_queues: device.nr_rx_queues,
        ifindex: device.ifindex,
        gro: (device.mode == RxMode::Native && device.gro).into(),
        ..constants(config, nr_cpus, sizes)
    }
}

/// Sets the constants of an object that is not loaded yet.
pub(super) fn set_constants(open: &mut OpenObject, constants: &rx_config) -> Result<()> {
    let mut rodata = open
        .maps_mut()
        .find(|map| map.name().to_string_lossy().ends_with(".rodata"))
        .context("the object has no constants")?;
    Ok(rodata.set_initial_value(&bytes_of(constants))?)
}

/// Makes an object that is not loaded yet use `owner`'s maps and these tables.
pub(super) fn lend_maps(open: &mut OpenObject, owner: &Object, tables: &Tables) -> Result<()> {
    for mut map in open.maps_mut() {
        let name = map.name().to_string_lossy().into_owned();
        if let Some(table) = tables.named(&name) {
            map.reuse_fd(table)?;
        } else if let Some(own) = owner.maps().find(|own| own.name() == &*name) {
            map.reuse_fd(own.as_fd())?;
        }
    }
    Ok(())
}
