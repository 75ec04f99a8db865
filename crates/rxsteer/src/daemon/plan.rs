// SPDX-License-Identifier: MIT OR Apache-2.0
//! Check of the options against the facts about host and devices: errors, warnings, and the CPUs of
//! each queue.

use anyhow::{Result, anyhow, bail};
use tracing::{info, warn};

use super::bonds::{self, with_ports};
use super::options::{Hash, Mode, Options, QueueCpus, RpsCpus};
use crate::datapath::backlogs::LIMIT_MAX;
use crate::datapath::{self, InlinePorts};
use crate::host::auto::AutoMask;
use crate::host::cpumask::CpuMask;
use crate::host::device::{Device, RxMode};
use crate::host::gain;
use crate::host::objection::Objection;
use crate::host::topology::Topology;

/// A device while it is steered.
pub(super) struct Steered {
    pub(super) device: Device,
    pub(super) mode: RxMode,
    /// Index of the device's queue 0, over all devices.
    pub(super) first_queue: u32,
    /// By queue.
    pub(super) cpus: Vec<QueueMask>,
}

/// The CPUs of a queue.
#[derive(Clone)]
pub(super) struct QueueMask {
    /// As configured; offline CPUs among them are not used.
    pub(super) cpus: CpuMask,
    /// The choice of `auto`, if it made one.
    pub(super) auto: Option<AutoMask>,
}

impl From<AutoMask> for QueueMask {
    fn from(auto: AutoMask) -> Self {
        Self {
            cpus: auto.cpus.clone(),
            auto: Some(auto),
        }
    }
}

impl Steered {
    /// Whether the device could be steered, were it not steered.
    ///
    /// # Errors
    /// With the reason and its remedy.
    pub(super) fn unobstructed(&self) -> Result<()> {
        let device = Device {
            xdp: None,
            ..Device::open(&self.device.name)?
        };
        unobstructed(&device, self.mode)
    }
}

/// Whether nothing fatal is against steering the device.
///
/// # Errors
/// With the reason and its remedy.
pub(super) fn unobstructed(device: &Device, mode: RxMode) -> Result<()> {
    let objections = device.objections(mode);
    match objections.into_iter().find(|objection| objection.fatal) {
        Some(objection) => bail!("{objection}"),
        None => Ok(()),
    }
}

/// A driver has refused a native program.
#[derive(Debug, thiserror::Error)]
#[error("{objection}")]
pub(super) struct Refused {
    pub(super) device: String,
    pub(super) objection: Objection,
}

/// What a start steers.
pub(super) struct Plan {
    pub(super) devices: Vec<Steered>,
    /// Devices that a start anew leaves out: name, and reasons with their remedies.
    pub(super) refused: Vec<(String, String)>,
}

/// The devices that the options name, with the CPUs of each queue.
///
/// # Errors
/// With all reasons and their remedies, if devices can't be steered; if one lacks a queue. Not if
/// this is a start anew.
pub(super) fn plan(options: &Options) -> Result<Plan> {
    let mut devices: Vec<Steered> = Vec::new();
    let mut refused = Vec::new();
    bonds::say(&options.devices);
    for name in &with_ports(&options.devices) {
        let last = devices.last();
        let first_queue = last.map_or(0, |d| d.first_queue + d.device.rx_queues);
        let known = |new: &Steered| {
            devices
                .iter()
                .any(|d| d.device.ifindex == new.device.ifindex)
        };
        match examine(name, first_queue, options) {
            Ok(new) if known(&new) => {
                refused.push((name.clone(), format!("{name} is named twice")))
            }
            Ok(new) => devices.push(new),
            Err(e) => refused.push((name.clone(), format!("{e:#}"))),
        }
    }
    if !refused.is_empty() && !options.anew {
        let obstacles: Vec<_> = refused.into_iter().map(|(_, why)| why).collect();
        bail!(obstacles.join("\n"));
    }
    for wish in &options.queues {
        match wished(&devices, wish) {
            Ok((index, cpus)) => devices[index].cpus[wish.queue as usize] = cpus,
            // The device, the queue or the CPU may be gone since the first start.
            Err(_) if options.anew => {}
            Err(e) => return Err(e),
        }
    }
    for steered in &devices {
        if let Some(words) = nothing_to_gain(steered) {
            info!("{words}");
        }
    }
    Ok(Plan { devices, refused })
}

fn wished(devices: &[Steered], wish: &QueueCpus) -> Result<(usize, QueueMask)> {
    let index = find(devices, wish.device.as_deref())?;
    let mask = cpus_of(&devices[index].device, wish.queue, &wish.cpus)?;
    Ok((index, mask))
}

/// [`Topology::nothing_to_gain`] with the device's masks.
fn nothing_to_gain(steered: &Steered) -> Option<String> {
    let topology = Topology::host();
    let device = &steered.device;
    let queue = |(queue, mask): (u32, &QueueMask)| gain::Queue {
        interrupt_cpu: device.interrupt_cpu(&topology, queue),
        cpus: mask.cpus.clone(),
    };
    let queues: Vec<_> = (0..).zip(&steered.cpus).map(queue).collect();
    topology.nothing_to_gain(&device.name, &queues)
}

/// A device that can be steered, and the CPUs of its queues.
fn examine(name: &str, first_queue: u32, options: &Options) -> Result<Steered> {
    let mut device = Device::open(name)?;
    let least_queues = options.least_queues.get(name).copied().unwrap_or(0);
    device.rx_queues = device.rx_queues.max(least_queues);
    let mode = match options.mode {
        Mode::Auto if options.refused.contains(name) => RxMode::Skb,
        wish => mode_for(&device, wish),
    };
    if options.mode == Mode::Auto && !options.refused.contains(name) {
        say_why(&device);
    }
    check(&device, mode)?;
    if mode == RxMode::Skb {
        // A CPU that receives is a queue.
        device.rx_queues = Topology::host().nr_cpu_ids()?;
    }
    let queues = 0..device.rx_queues;
    let cpus = queues.map(|queue| cpus_of(&device, queue, &options.rps_cpus));
    Ok(Steered {
        cpus: cpus.collect::<Result<_>>()?,
        device,
        mode,
        first_queue,
    })
}

/// The names of the devices.
pub(super) fn names(devices: &[Steered]) -> Vec<String> {
    devices.iter().map(|d| d.device.name.clone()).collect()
}

/// Index of the device with that name; without a name, of the only device.
pub(super) fn find(devices: &[Steered], name: Option<&str>) -> Result<usize> {
    let names = names(devices);
    match name {
        Some(name) => names
            .iter()
            .position(|known| known == name)
            .ok_or_else(|| anyhow!("{name} is not steered; steered: {}", names.join(", "))),
        None if devices.len() == 1 => Ok(0),
        None => bail!(
            "say which device the queue belongs to, DEVICE:QUEUE=CPUS; one of {}",
            names.join(", ")
        ),
    }
}

/// The CPUs of a queue; at least one of them is online.
pub(super) fn cpus_of(device: &Device, queue: u32, wish: &RpsCpus) -> Result<QueueMask> {
    if queue >= device.rx_queues {
        bail!(
            "{} has no receive queue {queue}: {}",
            device.name,
            match device.rx_queues {
                1 => "its only queue is 0".to_owned(),
                n => format!("its queues are 0 to {}", n - 1),
            }
        );
    }
    let topology = Topology::host();
    let mask = match wish {
        RpsCpus::Auto => {
            let interrupt_cpu = device.interrupt_cpu(&topology, queue);
            let auto = topology.auto_mask(interrupt_cpu)?;
            info!("{} queue {queue}: {auto}", device.name);
            if auto.cpus.is_empty() {
                bail!(
                    "auto finds no CPU for {} queue {queue}: all that are near are isolated; name \
                     them with --rps-cpus",
                    device.name
                );
            }
            return Ok(auto.into());
        }
        RpsCpus::Mask(mask) => mask,
    };
    let online = topology.online()?;
    let usable = mask.intersect(&online);
    if usable.is_empty() {
        bail!("none of the CPUs {mask} is online: choose from {online}");
    }
    let offline = mask.without(&online);
    if !offline.is_empty() {
        warn!(
            "CPUs {offline} are not online: {} queue {queue} does without them until they are",
            device.name
        );
    }
    Ok(QueueMask {
        cpus: mask.clone(),
        auto: None,
    })
}

/// The mode in which the device is steered: that of `auto` is native if it loses nothing.
pub(super) fn mode_for(device: &Device, wish: Mode) -> RxMode {
    match wish {
        Mode::Generic => RxMode::Generic,
        Mode::Skb => RxMode::Skb,
        Mode::Native => RxMode::Native,
        Mode::Auto if device.objection_to_native().is_none() => RxMode::Native,
        Mode::Auto => RxMode::Skb,
    }
}

/// Logs which mode `auto` has chosen, and why.
fn say_why(device: &Device) {
    let name = &device.name;
    match device.objection_to_native() {
        None => info!("{name} is steered in native mode: nothing is lost there"),
        Some(objection) if device.prepared().objection_to_native().is_none() => info!(
            "{name} is steered in skb mode: {} (`--prepare` makes native mode possible)",
            objection.reason
        ),
        Some(objection) => info!("{name} is steered in skb mode: {}", objection.reason),
    }
}

/// Fails if an objection to the device is fatal; logs the others as warnings.
fn check(device: &Device, mode: RxMode) -> Result<()> {
    let (fatal, advice): (Vec<_>, Vec<_>) =
        device.objections(mode).into_iter().partition(|o| o.fatal);
    if !fatal.is_empty() {
        let why: Vec<_> = fatal.iter().map(ToString::to_string).collect();
        bail!(why.join("\n"));
    }
    for objection in advice {
        warn!("{objection}");
    }
    Ok(())
}

/// `--inline-ports`: none under `--hash device`.
pub(super) fn inline_ports(options: &Options) -> Result<InlinePorts> {
    let wanted = match options.hash {
        Hash::Packet => &options.inline_ports[..],
        Hash::Device => &[],
    };
    datapath::inline_ports(wanted).ok_or_else(|| {
        anyhow!(
            "--inline-ports lists {} ports: {} are possible",
            wanted.len(),
            InlinePorts::default().len()
        )
    })
}

/// `--backlog`, or `net.core.netdev_max_backlog`.
pub(super) fn backlog_limit(configured: Option<u32>) -> Result<u32> {
    if let Some(limit) = configured {
        return Ok(limit);
    }
    // Only the initial network namespace has this file; 1000 is the kernel's default.
    let limit = std::fs::read_to_string("/proc/sys/net/core/netdev_max_backlog")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(1000);
    if limit > LIMIT_MAX {
        warn!("net.core.netdev_max_backlog is {limit}; a backlog holds {LIMIT_MAX} at most");
    }
    Ok(limit.clamp(1, LIMIT_MAX))
}
