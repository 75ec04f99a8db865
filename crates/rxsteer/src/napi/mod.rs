// SPDX-License-Identifier: MIT OR Apache-2.0
//! NAPI instances of devices: queues, interrupts, threads, settings, applications with sockets.

pub mod settings;

use std::collections::{BTreeMap, HashSet};
use std::fs;

use anyhow::Result;
use nix::net::if_::if_nametoindex;
use serde::Serialize;
use socket2::SockRef;
use tracing::error;

use crate::busy_poll::process::{self, Open, Target};
use crate::busy_poll::undo::internet;
use crate::host::device::{self, Device};
use crate::host::gone::is_gone;
use crate::host::netdev::{self, Napi, Settings, Threaded};
use crate::host::polling;
use crate::host::shell::quoted;
use crate::host::topology::Topology;

/// The result of [`napis`].
#[derive(Debug, Serialize)]
pub struct Napis {
    /// The devices that were named, or all devices with instances.
    pub devices: Vec<DeviceNapis>,
    /// Before 6.8, the NAPI ids of sockets: the kernel doesn't tell the device of an id.
    pub unknown: Vec<Unknown>,
    /// Number of processes that could not be inspected.
    pub not_looked_at: usize,
}

/// The instances of a device.
#[derive(Debug, Serialize)]
pub struct DeviceNapis {
    /// Interface name.
    pub device: String,
    /// Empty for devices without ethtool operations.
    pub driver: String,
    /// Ordered by id. Empty if the driver doesn't use NAPI, or not at present.
    pub instances: Vec<Instance>,
}

/// A NAPI instance.
#[derive(Debug, Serialize)]
pub struct Instance {
    /// `None` before 6.8; there is one entry for each receive queue then.
    pub id: Option<u32>,
    /// The receive queues that it polls; empty if unknown.
    pub rx_queues: Vec<u32>,
    /// The driver doesn't report `rx_queues`; they are assigned in the order of ids.
    pub rx_queues_by_order: bool,
    /// The interrupt that schedules it.
    pub irq: Option<u32>,
    /// The CPU to which the interrupt is delivered.
    pub irq_cpu: Option<u32>,
    /// The kernel thread that polls it, if threaded.
    pub thread: Option<Thread>,
    /// How it is scheduled.
    #[serde(flatten)]
    pub settings: Settings,
    /// Names of the `settings` read from the device, because the kernel has none per instance.
    pub device_wide: Vec<&'static str>,
    /// Applications with sockets that received their latest packet from it.
    pub applications: Vec<Application>,
}

/// A kernel thread.
#[derive(Debug, Serialize)]
pub struct Thread {
    /// Process id.
    pub pid: u32,
    /// CPUs on which it may run, in list form; `None` if it has ended.
    pub cpus: Option<String>,
}

/// A process with sockets on an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Application {
    /// Process id.
    pub pid: u32,
    /// Process name.
    pub comm: String,
    /// Number of TCP and UDP sockets. A socket shared by several processes counts for each.
    pub sockets: usize,
}

/// A NAPI id of an unknown device.
#[derive(Debug, Serialize)]
pub struct Unknown {
    /// NAPI id.
    pub id: u32,
    /// Applications with sockets of this id.
    pub applications: Vec<Application>,
}

/// The instances of the named devices or, without names, of all devices that have some.
///
/// # Errors
/// When no such device exists (the message lists the others), or a query fails.
pub fn napis(names: &[String]) -> Result<Napis> {
    let mut devices = Vec::new();
    for (device, instances) in with_instances(names)? {
        if !names.is_empty() || !instances.is_empty() {
            devices.push(DeviceNapis {
                instances,
                device: device.name,
                driver: device.driver,
            });
        }
    }

    let (mut sockets, not_looked_at) = sockets()?;
    let mut ids_told = true;
    for instance in devices.iter_mut().flat_map(|d| &mut d.instances) {
        match instance.id {
            Some(id) => instance.applications = sockets.remove(&id).unwrap_or_default(),
            None => ids_told = false,
        }
    }
    // With all ids known, the remaining ones belong to other devices, or to removed ones.
    let unknown = match ids_told {
        true => Vec::new(),
        false => sockets
            .into_iter()
            .map(|(id, applications)| Unknown { id, applications })
            .collect(),
    };
    Ok(Napis {
        devices,
        unknown,
        not_looked_at,
    })
}

/// The named devices, or all, each with its [`instances`]. Of all, those that can't be read are logged
/// and left out.
///
/// # Errors
/// As [`napis`].
pub fn with_instances(names: &[String]) -> Result<Vec<(Device, Vec<Instance>)>> {
    let topology = Topology::host();
    let all = names.is_empty();
    let names = match all {
        true => device::names()?,
        false => names.to_vec(),
    };
    let mut devices = Vec::new();
    for name in names {
        let opened = Device::open(&name).and_then(|device| {
            let instances = instances(&device, &topology)?;
            Ok((device, instances))
        });
        match opened {
            Ok(found) => devices.push(found),
            Err(e) if !all => return Err(e),
            // The device was removed meanwhile.
            Err(e) if is_gone(&e) || if_nametoindex(name.as_str()).is_err() => {}
            Err(e) => error!(device = %name, "{name} is left out: {e:#}"),
        }
    }
    Ok(devices)
}

/// A device's instances according to `device.napis`, without applications.
///
/// # Errors
/// When the query for the device's queues fails.
pub fn instances(device: &Device, topology: &Topology) -> Result<Vec<Instance>> {
    let wide = device_wide(&device.name);
    let nr_queues = device.rx_queues;
    let Some(napis) = &device.napis else {
        // Without ids only hardware and NAPI threads show that the device uses NAPI.
        let threaded = wide.threaded.is_some_and(|t| t != Threaded::Off);
        if !device.hardware && !threaded {
            return Ok(Vec::new());
        }
        let of_queue = |queue| {
            let thread = threaded
                .then(|| topology.napi_thread(&device.name, queue, nr_queues))
                .flatten();
            let napi = Napi {
                pid: thread,
                ..Napi::default()
            };
            Instance {
                id: None,
                ..instance(device, topology, &napi, vec![queue], wide)
            }
        };
        return Ok((0..nr_queues).map(of_queue).collect());
    };
    let told = netdev::rx_queues(device.ifindex)?;
    let by_order = told.is_empty() && napis.len() == nr_queues as usize;
    let instances = napis.iter().zip(0..).map(|(napi, nr)| {
        let queues = match by_order {
            true => vec![nr],
            false => {
                let own = told.iter().filter(|(_, id)| *id == napi.id);
                own.map(|(queue, _)| *queue).collect()
            }
        };
        Instance {
            rx_queues_by_order: by_order,
            ..instance(device, topology, napi, queues, wide)
        }
    });
    Ok(instances.collect())
}

/// An instance with the given queues; settings that it lacks come from the device, `wide`.
fn instance(
    device: &Device,
    topology: &Topology,
    napi: &Napi,
    rx_queues: Vec<u32>,
    wide: Settings,
) -> Instance {
    let irq = napi.irq.or_else(|| match rx_queues[..] {
        [queue] => topology.named_interrupt(&device.name, queue),
        _ => None,
    });
    let own = napi.settings;
    let missing = [
        (
            "defer-hard-irqs",
            own.defer_hard_irqs.is_none() && wide.defer_hard_irqs.is_some(),
        ),
        (
            "gro-flush-timeout",
            own.gro_flush_timeout.is_none() && wide.gro_flush_timeout.is_some(),
        ),
        (
            "threaded",
            own.threaded.is_none() && wide.threaded.is_some(),
        ),
    ];
    Instance {
        id: Some(napi.id),
        rx_queues,
        rx_queues_by_order: false,
        irq,
        irq_cpu: irq.and_then(|irq| topology.irq_cpu(irq)),
        thread: napi.pid.map(|pid| Thread {
            pid,
            cpus: topology.thread_cpus(pid).map(|cpus| cpus.to_string()),
        }),
        settings: Settings {
            defer_hard_irqs: own.defer_hard_irqs.or(wide.defer_hard_irqs),
            gro_flush_timeout: own.gro_flush_timeout.or(wide.gro_flush_timeout),
            irq_suspend_timeout: own.irq_suspend_timeout,
            threaded: own.threaded.or(wide.threaded),
        },
        device_wide: missing
            .into_iter()
            .filter_map(|(name, missing)| missing.then_some(name))
            .collect(),
        applications: Vec::new(),
    }
}

/// The settings for all instances of a device, in sysfs; `threaded` exists since 5.12.
fn device_wide(device: &str) -> Settings {
    let read = |file| -> Option<u64> {
        let text = fs::read_to_string(format!("/sys/class/net/{device}/{file}")).ok()?;
        text.trim().parse().ok()
    };
    Settings {
        defer_hard_irqs: read("napi_defer_hard_irqs").and_then(|polls| polls.try_into().ok()),
        gro_flush_timeout: read("gro_flush_timeout"),
        irq_suspend_timeout: None,
        threaded: read("threaded").and_then(Threaded::of_number),
    }
}

/// The applications with TCP and UDP sockets by NAPI id, most sockets first, and the number of
/// processes that could not be inspected. May miss sockets opened or closed meanwhile.
fn sockets() -> Result<(BTreeMap<u32, Vec<Application>>, usize)> {
    let mut by_id: BTreeMap<u32, Vec<Application>> = BTreeMap::new();
    let mut not_looked_at = 0;
    for pid in process::all()? {
        // The process has ended.
        let Ok(target) = Target::open(pid) else {
            continue;
        };
        let ids = match ids_of(&target) {
            Ok(ids) => ids,
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
                not_looked_at += 1;
                continue;
            }
            Err(_) => continue,
        };
        for (id, sockets) in ids {
            by_id.entry(id).or_default().push(Application {
                pid,
                comm: target.comm.clone(),
                sockets,
            });
        }
    }
    for applications in by_id.values_mut() {
        applications.sort_by_key(|a| (std::cmp::Reverse(a.sockets), a.pid));
    }
    Ok((by_id, not_looked_at))
}

/// The number of a process's sockets by NAPI id.
fn ids_of(target: &Target) -> std::io::Result<BTreeMap<u32, usize>> {
    let mut ids = BTreeMap::new();
    let mut seen = HashSet::new();
    for open in target.opened()? {
        let Open::Socket { inode, .. } = open else {
            continue;
        };
        // Otherwise it is a duplicate descriptor of the same socket.
        if seen.insert(inode)
            && let Some(socket) = target.borrow(open)?
            && internet(&SockRef::from(&socket)).is_some()
            && let Ok(Some(id)) = polling::napi_id(&socket)
        {
            *ids.entry(id).or_default() += 1;
        }
    }
    Ok(ids)
}

/// Says that a device has no instances, and how to enable them.
pub fn no_instances(device: &str, driver: &str) -> String {
    match driver {
        "veth" => {
            let word = quoted(device);
            format!(
                "{device} has no NAPI instances; `ethtool -K {word} gro on` gives it some, which packets \
                 bypass unless its other end segments TCP (`ethtool -K PEER tso off` there)"
            )
        }
        _ => format!("{device} has no NAPI instances"),
    }
}
