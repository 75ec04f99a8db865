// SPDX-License-Identifier: MIT OR Apache-2.0
//! The BPF objects: the object of the tracepoints owns the maps, the others share them
//! (`bpf/maps.h`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{MapCore, Object, OpenObject};

use super::config::{Config, DeviceConfig};
use super::load;
use super::tables::{self, Tables};
use super::value::bytes_of;
use crate::bpf::open;
use crate::bpf::rx_skel::{RxSkel, RxSkelBuilder};
use crate::bpf::trace_skel::TraceSkel;
use crate::host::caps;
use crate::host::device::XdpMode;
use crate::host::xdp;
use crate::types::rx_config;

pub(super) struct Device {
    pub(super) config: DeviceConfig,
    pub(super) queue_base: u32,
    pub(super) rx_hash: bool,
    /// Dropping it detaches the program.
    pub(super) link: Option<OwnedFd>,
    pub(super) loaded: DeviceSkel,
}

/// A device's program. Fields are dropped in this order.
pub(super) struct DeviceSkel {
    skel: RxSkel<'static>,
    _bound: Option<xdp::Bound>,
}

impl Device {
    pub(super) fn program(&self) -> BorrowedFd<'_> {
        match self.rx_hash {
            true => self.loaded.skel.progs.rxsteer_rx_hash.as_fd(),
            false => self.loaded.skel.progs.rxsteer.as_fd(),
        }
    }

    /// Replaces the attached program by the loaded one, if a program is attached and the device
    /// still exists.
    pub(super) fn update(&self) -> Result<()> {
        let Some(link) = &self.link else {
            return Ok(());
        };
        match xdp::update(link, self.program()) {
            Err(e) if e.raw_os_error() == Some(libc::ENOLINK) => Ok(()),
            other => Ok(other?),
        }
    }
}

/// The constants that are the same in all objects.
pub(super) fn constants(config: &Config, nr_cpus: u32, tables: &Tables) -> rx_config {
    rx_config {
        flow_secret: config.secret,
        backlog_limit: config.backlog_limit.into(),
        nr_cpus,
        flow_limit: config.flow_limit * load::WHOLE / 100,
        flow_shift: tables.flow_shift(),
        flow_tunnels: config.tunnels,
        inline_ports: config.inline_ports,
        sock_flow_mask: tables.sock_flow_mask(),
        sock_flow_cpu_mask: tables::cpu_mask(nr_cpus),
        dry_run: config.dry_run.into(),
        unguarded: config.unguarded.into(),
        ..Default::default()
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

pub(super) fn load_device(
    trace: &TraceSkel<'_>,
    tables: &Tables,
    config: &Config,
    nr_cpus: u32,
    queue_base: u32,
    device: &DeviceConfig,
) -> Result<DeviceSkel> {
    let constants = rx_config {
        queue_base,
        nr_rx_queues: device.nr_rx_queues,
        ifindex: device.ifindex,
        generic: (device.mode == XdpMode::Generic).into(),
        ..constants(config, nr_cpus, tables)
    };
    let mut open = open(RxSkelBuilder::default())?;
    set_constants(open.open_object_mut(), &constants)?;
    lend_maps(open.open_object_mut(), trace.object(), tables)?;
    // Drivers refuse a jumbo MTU without frags. In generic mode, the kernel since 6.9 copies an skb
    // for programs that declare frags, if it has too little headroom for XDP or several fragments.
    // The copy lacks mac_len (skb_pp_cow_data() in net/core/skbuff.c), by which
    // cpu_map_generic_redirect() finds the network header: every redirected copy would be dropped
    // as corrupt. For programs without frags, the kernel changes the skb in place, whatever its
    // length.
    let mut flags = match device.mode {
        XdpMode::Native => libbpf_sys::BPF_F_XDP_HAS_FRAGS,
        XdpMode::Generic => 0,
    };
    let mut chosen = "rxsteer";
    if config.rx_hash {
        ensure!(
            caps::has_device_hash()?,
            "this kernel does not hand devices' hashes to XDP programs: `--hash device` needs Linux 6.3"
        );
        chosen = "rxsteer_rx_hash";
        flags |= libbpf_sys::BPF_F_XDP_DEV_BOUND_ONLY;
    }
    for mut prog in open.open_object_mut().progs_mut() {
        let chosen = prog.name() == chosen;
        prog.set_autoload(chosen);
        if chosen {
            prog.set_flags(flags);
        }
        if chosen && config.rx_hash {
            prog.set_ifindex(device.ifindex);
        }
    }
    let skel = open.load().context("the kernel refused the XDP program")?;
    let bound = match config.rx_hash {
        true => Some(xdp::Bound::with(&skel.maps.rodata)?),
        false => None,
    };
    Ok(DeviceSkel {
        skel,
        _bound: bound,
    })
}
