// SPDX-License-Identifier: MIT OR Apache-2.0
//! The programs of the devices.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::skel::{OpenSkel, Skel};

use super::config::{Config, DeviceConfig};
use super::hash::Hash;
use super::hops::{Hooks, Hops};
use super::pins::{Generation, XDP};
use super::shared::{constants_of_device, lend_maps, set_constants};
use super::tables::Tables;
use crate::bpf::open;
use crate::bpf::rx_skel::RxSkelBuilder;
use crate::bpf::trace_skel::TraceSkel;
use crate::host::caps;
use crate::host::device::RxMode;
use crate::host::progress;
use crate::host::tc::TcLink;
use crate::host::xdp;

pub(super) struct Device {
    pub(super) config: DeviceConfig,
    pub(super) queue_base: u32,
    pub(super) attached: Option<Attached>,
    /// With [`Config::follow_nat`], while an XDP program is attached.
    pub(super) hashed: Option<TcLink>,
    /// `None` in softirq mode: the program is in [`Hops`].
    pub(super) loaded: Option<XdpSkel>,
}

/// Dropping it detaches the program.
pub(super) enum Attached {
    Xdp(OwnedFd),
    Softirq { _hooks: Hooks },
}

/// A device's XDP program. Its object is closed: of each of its many maps it has a descriptor, and the
/// program holds them. Fields are dropped in this order.
pub(super) struct XdpSkel {
    program: OwnedFd,
    _bound: Option<xdp::Bound>,
}

impl Device {
    /// The device's program. `hops`: as long as a device in softirq mode is steered.
    ///
    /// # Errors
    /// When the data path was not prepared for such a device.
    pub(super) fn program<'a>(&'a self, hops: Option<&'a Hops>) -> Result<BorrowedFd<'a>> {
        match (&self.loaded, hops) {
            (Some(xdp), _) => Ok(xdp.program.as_fd()),
            (None, Some(hops)) => Ok(hops.program()),
            (None, None) => bail!("softirq mode was not prepared"),
        }
    }

    pub(super) fn attach(&mut self, hops: Option<&mut Hops>, trace: &TraceSkel<'_>) -> Result<()> {
        let ifindex = self.config.ifindex;
        self.attached = Some(match self.config.mode {
            RxMode::Softirq => {
                let hops = hops.context("softirq mode was not prepared")?;
                Attached::Softirq {
                    _hooks: hops.attach(trace, ifindex, self.config.kind)?,
                }
            }
            RxMode::Native => Attached::Xdp(xdp::attach(self.program(None)?, ifindex)?),
        });
        Ok(())
    }

    /// Pins the link of the attached XDP program.
    pub(super) fn pin(&self, pins: &Generation) -> Result<()> {
        match &self.attached {
            Some(Attached::Xdp(link)) => {
                pins.pin(XDP, &self.config.ifindex.to_string(), link.as_fd())
            }
            Some(Attached::Softirq { .. }) => bail!("softirq mode is not pinned"),
            None => Ok(()),
        }
    }

    /// Replaces the attached program by the loaded one, if a program is attached and the device
    /// still exists. That of softirq mode is one for all devices ([`Hops::replace`]).
    pub(super) fn update(&mut self) -> Result<()> {
        match &self.attached {
            None | Some(Attached::Softirq { .. }) => Ok(()),
            Some(Attached::Xdp(link)) => match xdp::update(link, self.program(None)?) {
                Err(e) if e.raw_os_error() == Some(libc::ENOLINK) => Ok(()),
                other => Ok(other?),
            },
        }
    }
}

/// Loads a device's XDP program; `None` in softirq mode.
///
/// # Errors
/// When the kernel refuses it.
pub(super) fn load_device(
    trace: &TraceSkel<'_>,
    tables: &Tables,
    config: &Config,
    nr_cpus: u32,
    queue_base: u32,
    device: &DeviceConfig,
) -> Result<Option<XdpSkel>> {
    progress::made();
    if device.mode == RxMode::Softirq {
        return Ok(None);
    }
    let constants = constants_of_device(config, nr_cpus, tables.sizes(), queue_base, device);
    let mut open = open(RxSkelBuilder::default())?;
    set_constants(open.open_object_mut(), &constants)?;
    lend_maps(open.open_object_mut(), trace.object(), tables)?;
    // Drivers refuse a jumbo MTU without frags.
    let mut flags = libbpf_sys::BPF_F_XDP_HAS_FRAGS;
    let mut chosen = "rxsteer";
    if config.hash == Hash::Device {
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
        if chosen && config.hash == Hash::Device {
            prog.set_ifindex(device.ifindex);
        }
    }
    let skel = open.load().context("the kernel refused the XDP program")?;
    let bound = match config.hash == Hash::Device {
        true => Some(xdp::Bound::with(&skel.maps.rodata)?),
        false => None,
    };
    let program = match config.hash {
        Hash::Device => skel.progs.rxsteer_rx_hash.as_fd(),
        Hash::Packet | Hash::Symmetric => skel.progs.rxsteer.as_fd(),
    };
    Ok(Some(XdpSkel {
        program: program.try_clone_to_owned()?,
        _bound: bound,
    }))
}
