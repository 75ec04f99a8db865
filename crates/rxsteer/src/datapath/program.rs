// SPDX-License-Identifier: MIT OR Apache-2.0
//! The objects, and the XDP program of a device.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use libbpf_rs::MapCore;
use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};

use super::config::{Config, DeviceConfig};
use super::load;
use super::tables::{self, Tables};
use crate::host::caps;
use crate::host::device::XdpMode;
use crate::host::xdp;
use crate::rx::types::rodata;
use crate::rx::{OpenRxSkel, RxSkel, RxSkelBuilder};

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

    /// Attaches its program in the place of the one that is attached, if there is one and the device
    /// is still there.
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

pub(super) fn open() -> Result<OpenRxSkel<'static>> {
    // The skeleton borrows the object's memory for as long as it lives; there is one per device
    // and process, so it is given away rather than tied into a self-referential struct.
    let object = Box::leak(Box::new(MaybeUninit::uninit()));
    Ok(RxSkelBuilder::default().open(object)?)
}

/// Sets the constants that all devices share; returns them for the rest.
pub(super) fn set_constants<'a>(
    open: &'a mut OpenRxSkel<'_>,
    config: &Config,
    nr_cpus: u32,
    tables: &Tables,
) -> &'a mut rodata {
    let rodata = open
        .maps
        .rodata_data
        .as_deref_mut()
        .expect("the object has constants");
    rodata.nr_cpus = nr_cpus;
    rodata.backlog_limit = config.backlog_limit.into();
    rodata.flow_limit = config.flow_limit * load::WHOLE / 100;
    rodata.flow_tunnels = config.tunnels;
    rodata.flow_secret = config.secret;
    rodata.flow_shift = tables.flow_shift();
    rodata.sock_flow_mask = tables.sock_flow_mask();
    rodata.sock_flow_cpu_mask = tables::cpu_mask(nr_cpus);
    rodata.dry_run = config.dry_run;
    rodata.unguarded = config.unguarded;
    rodata
}

pub(super) fn load_device(
    shared: &RxSkel<'_>,
    tables: &Tables,
    config: &Config,
    nr_cpus: u32,
    queue_base: u32,
    device: &DeviceConfig,
) -> Result<DeviceSkel> {
    let mut open = open()?;
    let rodata = set_constants(&mut open, config, nr_cpus, tables);
    rodata.queue_base = queue_base;
    rodata.nr_rx_queues = device.nr_rx_queues;
    rodata.ifindex = device.ifindex;
    rodata.generic = device.mode == XdpMode::Generic;
    // Drivers refuse a jumbo MTU without frags. For generic mode the kernel, since 6.9, copies an
    // skb with too little headroom for XDP, and all skbs of several pieces, for programs that
    // declare them; the copy lacks its mac_len (skb_pp_cow_data() in net/core/skbuff.c), by which
    // cpu_map_generic_redirect() finds the network header: every redirected copy would be dropped
    // as corrupt. For other programs the skb is made fit in place, whatever its length.
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
    for mut map in open.open_object_mut().maps_mut() {
        // Constants are the device's own, the tables their owner's; every other map is shared.
        if let Some(same) = shared.object().maps().find(|m| m.name() == map.name())
            && !map.name().to_string_lossy().contains(".rodata")
        {
            map.reuse_fd(same.as_fd())?;
        }
    }
    tables.lend_to(&mut open)?;
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
