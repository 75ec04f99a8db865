// SPDX-License-Identifier: MIT OR Apache-2.0
//! Check of the options against the facts about host and devices: errors, warnings, and the CPUs of
//! each queue.

use std::ops::Range;

use anyhow::{Result, anyhow, bail};
use tracing::subscriber::{NoSubscriber, with_default};
use tracing::{info, warn};

use super::bonds::{self, with_ports};
use super::options::{Mode, Options, QueueCpus, RpsCpus, meant_as_port};
use super::patterns::{Patterns, is_pattern};
use crate::datapath::backlogs::LIMIT_MAX;
use crate::datapath::hash::Hash;
use crate::datapath::{self, DeviceConfig, InlinePorts, SoftirqKind};
use crate::host::auto::AutoMask;
use crate::host::cpumask::CpuMask;
use crate::host::device::{Device, RxMode};
use crate::host::gain;
use crate::host::kernel;
use crate::host::objection::Objection;
use crate::host::progress;
use crate::host::topology::Topology;

/// A device while it is steered.
pub(super) struct Steered {
    /// Its `rx_queues` is the number of queues in the tables: in softirq mode, one for each CPU id.
    pub(super) device: Device,
    pub(super) mode: RxMode,
    /// Index of its queue 0, over all devices. Those in softirq mode share their queues.
    pub(super) first_queue: u32,
    /// Its name when the options were read, or the pattern that it matches.
    pub(super) named: Named,
}

/// How the options name a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Named {
    Name(String),
    Pattern,
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

impl QueueMask {
    /// The option that makes it.
    pub(super) fn wish(&self) -> RpsCpus {
        match &self.auto {
            Some(_) => RpsCpus::Auto,
            None => RpsCpus::Mask(self.cpus.clone()),
        }
    }
}

impl Steered {
    /// Indices of its queues.
    pub(super) fn queues(&self) -> Range<u32> {
        self.first_queue..self.first_queue + self.device.rx_queues
    }

    /// What the data path has to know of it.
    pub(super) fn config(&self) -> DeviceConfig {
        DeviceConfig {
            ifindex: self.device.ifindex,
            nr_rx_queues: self.device.rx_queues,
            mode: self.mode,
            gro: self.device.gro,
            kind: SoftirqKind {
                unpolled: self.device.unpolled,
                loopback: self.device.loopback,
                veth: self.device.driver == "veth",
            },
        }
    }

    /// A queue for the log, by its number.
    pub(super) fn queue_name(&self, queue: u32) -> String {
        queue_name(self.mode, &self.device.name, queue)
    }

    /// Whether the device could be attached to, ignoring our own program.
    ///
    /// # Errors
    /// With the reason and its remedy.
    pub(super) fn unobstructed(&self) -> Result<()> {
        let device = Device {
            xdp: None,
            ..Device::open(&self.device.name)?
        };
        device.unobstructed(self.mode)
    }
}

pub(super) fn queue_name(mode: RxMode, device: &str, queue: u32) -> String {
    match mode {
        RxMode::Softirq => format!("softirq mode queue {queue}"),
        _ => format!("{device} queue {queue}"),
    }
}

/// What a start steers.
pub(super) struct Plan {
    pub(super) devices: Vec<Steered>,
    /// By queue, over all devices.
    pub(super) masks: Vec<QueueMask>,
    /// Devices that a start anew leaves out: name, and reasons with their remedies.
    pub(super) refused: Vec<(String, String)>,
}

/// The devices that the options name, and the CPUs of each queue. The queues of softirq mode come after
/// all others. A dry run with `--prepare` has the devices as they would be.
///
/// # Errors
/// With all reasons and their remedies, if devices can't be steered; if one lacks a queue. Not if
/// this is a start anew.
pub(super) fn plan(options: &Options) -> Result<Plan> {
    let patterns = Patterns::of(options)?;
    bonds::say(&options.devices);
    let mut plan = named(options, options.prepare && options.dry_run)?;
    let matching = patterns.matching()?;
    let matched: Vec<&str> = matching.iter().map(|(name, _)| &name[..]).collect();
    for pattern in patterns.without(&matched) {
        info!("no device matches {pattern} now: those that come are steered");
    }
    for (name, device) in matching {
        match device {
            Ok(device) if knows(&plan.devices, &device) => {}
            Ok(device) => plan.devices.push(Steered::by_pattern(device)?),
            Err(why) => warn!("{name} is not steered: {why:#}"),
        }
    }
    plan.masks = number(&mut plan.devices, !patterns.is_empty(), options)?;
    for steered in &plan.devices {
        if let Some(words) = nothing_to_gain(steered, &plan.masks) {
            info!("{words}");
        }
    }
    Ok(plan)
}

/// Fails where [`plan`] will, before anything is changed or logged. With `--prepare`, by the devices as
/// they will be.
///
/// # Errors
/// As [`plan`].
pub(super) fn rehearse(options: &Options) -> Result<()> {
    let patterns = !Patterns::of(options)?.is_empty();
    with_default(NoSubscriber::default(), || {
        let mut plan = named(options, options.prepare)?;
        number(&mut plan.devices, patterns, options).map(|_| ())
    })
}

/// The devices with names in the options, without masks; `prepared`, as they are after `--prepare`.
fn named(options: &Options, prepared: bool) -> Result<Plan> {
    let mut devices: Vec<Steered> = Vec::new();
    let mut refused = Vec::new();
    let names = with_ports(&options.devices);
    for name in names.iter().filter(|name| !is_pattern(name)) {
        progress::made();
        match examine(name, options, prepared) {
            Ok((device, _)) if knows(&devices, &device) => {
                refused.push((name.clone(), named_twice(name)))
            }
            Ok((device, mode)) => devices.push(Steered {
                named: Named::Name(name.clone()),
                device,
                mode,
                first_queue: 0,
            }),
            Err(e) => refused.push((name.clone(), format!("{e:#}"))),
        }
    }
    if !refused.is_empty() && !options.anew {
        let obstacles: Vec<_> = refused.into_iter().map(|(_, why)| why).collect();
        bail!(obstacles.join("\n"));
    }
    Ok(Plan {
        devices,
        masks: Vec::new(),
        refused,
    })
}

/// Numbers the queues of all devices; returns their masks. `softirq`: there are queues of softirq mode also
/// if no device is in it yet.
///
/// # Errors
/// When a mask has no CPU that is online, or a queue does not exist; not if this is a start anew.
pub(super) fn number(
    devices: &mut [Steered],
    softirq: bool,
    options: &Options,
) -> Result<Vec<QueueMask>> {
    let topology = Topology::host();
    let mut masks = Vec::new();
    let mut wish = |name: String, interrupt_cpu, wish| {
        masks.push(cpus_of(&name, interrupt_cpu, wish, options.anew)?);
        anyhow::Ok(())
    };
    let mut next = 0;
    for steered in devices.iter_mut().filter(|s| s.mode != RxMode::Softirq) {
        let device = &steered.device;
        steered.first_queue = next;
        next += device.rx_queues;
        for queue in 0..device.rx_queues {
            let interrupt_cpu = device.interrupt_cpu(&topology, queue);
            wish(steered.queue_name(queue), interrupt_cpu, &options.rps_cpus)?;
        }
    }
    let in_softirq_mode = devices.iter_mut().filter(|s| s.mode == RxMode::Softirq);
    let in_softirq_mode = in_softirq_mode
        .map(|steered| steered.first_queue = next)
        .count();
    if softirq || in_softirq_mode > 0 {
        let online = topology.online()?;
        for cpu in 0..topology.nr_cpu_ids()? {
            let online = Some(cpu).filter(|&cpu| online.contains(cpu));
            let cpus = options
                .skb_cpus
                .get(cpu as usize)
                .unwrap_or(&options.rps_cpus);
            wish(queue_name(RxMode::Softirq, "", cpu), online, cpus)?;
        }
    }
    for wish in &options.queues {
        match wished(devices, wish, options.anew) {
            Ok((queue, cpus)) => masks[queue as usize] = cpus,
            // The device or the queue may be gone since the first start.
            Err(_) if options.anew => {}
            Err(e) => return Err(e),
        }
    }
    Ok(masks)
}

fn knows(devices: &[Steered], new: &Device) -> bool {
    devices.iter().any(|d| d.device.ifindex == new.ifindex)
}

/// The mask that the options have for a queue, with the queue's index.
fn wished(devices: &[Steered], wish: &QueueCpus, anew: bool) -> Result<(u32, QueueMask)> {
    let steered = &devices[find(devices, wish.device.as_deref())?];
    let queue = steered.has_queue(wish.queue)?;
    let cpus = steered.cpus_of(wish.queue, &wish.cpus, anew)?;
    Ok((queue, cpus))
}

/// [`Topology::nothing_to_gain`] with the device's masks.
fn nothing_to_gain(steered: &Steered, masks: &[QueueMask]) -> Option<String> {
    let topology = Topology::host();
    let device = &steered.device;
    if steered.mode == RxMode::Softirq {
        return None;
    }
    let queue = |queue: u32| gain::Queue {
        interrupt_cpu: device.interrupt_cpu(&topology, queue - steered.first_queue),
        nr_interrupts: device.nr_interrupts(&topology, queue - steered.first_queue),
        cpus: masks[queue as usize].cpus.clone(),
    };
    let queues: Vec<_> = steered.queues().map(queue).collect();
    topology.nothing_to_gain(&device.name, &queues)
}

/// A device that can be steered, and its mode; `prepared`, as it is after `--prepare`.
fn examine(name: &str, options: &Options, prepared: bool) -> Result<(Device, RxMode)> {
    let mut device = Device::open(name).map_err(|e| match meant_as_port(name) {
        Some(form) if options.metrics.is_some() => {
            anyhow!("{e:#}; for the port of --metrics, {form}")
        }
        _ => e,
    })?;
    device
        .xdp
        .take_if(|xdp| options.own_programs.contains(&xdp.id));
    if prepared {
        device = device.prepared();
    }
    let least_queues = options.least_queues.get(name).copied().unwrap_or(0);
    device.rx_queues = device.rx_queues.max(least_queues);
    let bound = objection_to_bound(&device, options);
    let mode = mode_for(&device, options);
    info!("{name} is steered in {mode} mode");
    if let Some(bound) = bound.filter(|_| mode == RxMode::Native) {
        bail!("{bound}");
    }
    check(&device, mode, options.pin.is_some())?;
    if mode == RxMode::Softirq {
        device.rx_queues = Topology::host().nr_cpu_ids()?;
    }
    Ok((device, mode))
}

/// The names of the devices.
fn names(devices: &[Steered]) -> Vec<String> {
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
        None => bail!(which_device(&names)),
    }
}

/// The error when one of several devices is not named.
pub(super) fn which_device(names: &[impl AsRef<str>]) -> String {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    format!(
        "say which device the queue belongs to, DEVICE:QUEUE=CPUS; one of {}",
        names.join(", ")
    )
}

/// The error when a device is there already.
pub(super) fn named_twice(name: &str) -> String {
    format!("{name} is named twice")
}

impl Steered {
    /// A device in softirq mode that a pattern matches. The caller sets its first queue.
    ///
    /// # Errors
    /// When the number of CPUs can't be read.
    pub(super) fn by_pattern(mut device: Device) -> Result<Self> {
        device.rx_queues = Topology::host().nr_cpu_ids()?;
        Ok(Self {
            device,
            mode: RxMode::Softirq,
            first_queue: 0,
            named: Named::Pattern,
        })
    }

    /// The index of a queue, by its number.
    ///
    /// # Errors
    /// When the device has no such queue.
    pub(super) fn has_queue(&self, queue: u32) -> Result<u32> {
        let Device {
            name, rx_queues, ..
        } = &self.device;
        if queue < *rx_queues {
            return Ok(self.first_queue + queue);
        }
        let there = match (rx_queues, self.mode) {
            (1, _) => "its only queue is 0".to_owned(),
            (n, RxMode::Softirq) => format!(
                "in softirq mode its queues are the CPUs that receive, 0 to {}",
                n - 1
            ),
            (n, _) => format!("its queues are 0 to {}", n - 1),
        };
        bail!("{name} has no receive queue {queue}: {there}")
    }

    /// The CPUs of a queue, by its number; at least one of them is online, unless this is for a start
    /// `anew`: CPUs may have gone offline since the first one.
    ///
    /// # Errors
    /// When none is.
    pub(super) fn cpus_of(&self, queue: u32, wish: &RpsCpus, anew: bool) -> Result<QueueMask> {
        let interrupt_cpu = match self.mode {
            RxMode::Softirq => Some(queue),
            _ => self.device.interrupt_cpu(&Topology::host(), queue),
        };
        cpus_of(&self.queue_name(queue), interrupt_cpu, wish, anew)
    }
}

/// As [`Steered::cpus_of`], for the queue with this name.
fn cpus_of(
    queue: &str,
    interrupt_cpu: Option<u32>,
    wish: &RpsCpus,
    anew: bool,
) -> Result<QueueMask> {
    let topology = Topology::host();
    let mask = match wish {
        RpsCpus::Auto => {
            let auto = topology.auto_mask(interrupt_cpu)?;
            info!("{queue}: {auto}");
            if auto.cpus.is_empty() && !anew {
                bail!(
                    "auto finds no CPU for {queue}: all that are near are isolated; name them with \
                     --rps-cpus"
                );
            }
            return Ok(auto.into());
        }
        RpsCpus::Mask(mask) => mask,
    };
    let online = topology.online()?;
    let usable = mask.intersect(&online);
    if usable.is_empty() && !anew {
        bail!("none of the CPUs {mask} is online: choose from {online}");
    }
    let offline = mask.without(&online);
    if !offline.is_empty() {
        warn!("CPUs {offline} are not online: {queue} does without them until they are");
    }
    Ok(QueueMask {
        cpus: mask.clone(),
        auto: None,
    })
}

/// The mode in which the device is steered. Under `--mode auto` options that are for native mode alone
/// choose it.
pub(super) fn mode_for(device: &Device, options: &Options) -> RxMode {
    match options.mode {
        Mode::Softirq => RxMode::Softirq,
        Mode::Native => RxMode::Native,
        Mode::Auto if options.hash == Hash::Device => RxMode::Native,
        Mode::Auto if options.prepare && device.objection_to_native().is_none() => RxMode::Native,
        Mode::Auto => device.fitting_mode(),
    }
}

/// Against a native program, which `--hash device` would bind to the device.
fn objection_to_bound(device: &Device, options: &Options) -> Option<Objection> {
    let bound = options.hash == Hash::Device;
    bound.then(|| device.objection_to_bound(kernel::version()))?
}

/// Fails if an objection to the device is fatal; logs the others as warnings.
fn check(device: &Device, mode: RxMode, pinned: bool) -> Result<()> {
    let objections = device.objections(mode).into_iter();
    let objections = objections.map(|objection| objection.if_pinned(pinned));
    let (fatal, advice): (Vec<_>, Vec<_>) = objections.partition(|o| o.fatal);
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
        Hash::Packet | Hash::Symmetric => &options.inline_ports[..],
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
