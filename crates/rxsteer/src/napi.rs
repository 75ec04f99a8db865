// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer napi`: the NAPI instances of this network namespace's devices, what schedules them, and
//! the sockets whose packets they deliver.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;
use std::fs;

use anyhow::Result;
use comfy_table::{CellAlignment, Table};
use nix::net::if_::if_nametoindex;
use serde::Serialize;
use socket2::SockRef;

use crate::busy_poll::options;
use crate::busy_poll::process::{self, Open, Target};
use crate::busy_poll::undo::internet;
use crate::device::{self, Device};
use crate::netdev::{self, Napi, Settings, Threaded};
use crate::table::table;
use crate::topology::Topology;

/// The answer.
#[derive(Debug, Serialize)]
pub struct Napis {
    /// Those that were asked for, or all.
    pub devices: Vec<DeviceNapis>,
    /// Ids that sockets have and no device's instance is known to have, where the kernel does not
    /// tell ids (before 6.8).
    pub unknown: Vec<Unknown>,
    /// Processes whose sockets could not be looked at.
    pub not_looked_at: usize,
}

/// A device's.
#[derive(Debug, Serialize)]
pub struct DeviceNapis {
    /// Its name.
    pub device: String,
    /// Empty for devices without ethtool operations.
    pub driver: String,
    /// In the order of their ids. None: the driver does not use NAPI, or not now.
    pub instances: Vec<Instance>,
}

/// A NAPI instance.
#[derive(Debug, Serialize)]
pub struct Instance {
    /// `None` where the kernel does not tell (before 6.8): then there is one for each receive queue.
    pub id: Option<u32>,
    /// The receive queues that it polls; none if not known.
    pub rx_queues: Vec<u32>,
    /// The driver does not tell `rx_queues`: the ids ascend as the queues do.
    pub rx_queues_by_order: bool,
    /// The interrupt that schedules it.
    pub irq: Option<u32>,
    /// Where that is delivered.
    pub irq_cpu: Option<u32>,
    /// The kernel thread that polls it, if one does.
    pub thread: Option<Thread>,
    /// How it is scheduled.
    #[serde(flatten)]
    pub settings: Settings,
    /// Those of `settings` that were read of the device, since the kernel does not tell an instance's.
    pub device_wide: Vec<&'static str>,
    /// Who has sockets whose latest packet came by it.
    pub applications: Vec<Application>,
}

/// A kernel thread.
#[derive(Debug, Serialize)]
pub struct Thread {
    /// Its number.
    pub pid: u32,
    /// The CPUs where it may run, as a list; `None` if it has ended.
    pub cpus: Option<String>,
}

/// A process that has sockets on an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Application {
    /// Its number.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// TCP and UDP sockets. One that several processes have is counted for each.
    pub sockets: usize,
}

/// An id of which only sockets tell.
#[derive(Debug, Serialize)]
pub struct Unknown {
    /// It.
    pub id: u32,
    /// Who has them.
    pub applications: Vec<Application>,
}

/// The instances of the devices that are named, or of all that have some.
///
/// # Errors
/// When there is no such device, saying which there are, or the kernel can't be asked.
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
    // Where they are told, what is left is of other devices, some of them gone.
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

/// The devices that are named, or all, each with its [`instances`].
///
/// # Errors
/// When there is no such device, saying which there are, or the kernel can't be asked.
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
            // Removed meanwhile.
            Err(_) if all && if_nametoindex(name.as_str()).is_err() => {}
            opened => devices.push(opened?),
        }
    }
    Ok(devices)
}

/// A device's instances, without sockets. `device.napis` is what the kernel told of them.
///
/// # Errors
/// When the kernel can't be asked for the device's queues.
pub fn instances(device: &Device, topology: &Topology) -> Result<Vec<Instance>> {
    let wide = device_wide(&device.name);
    let nr_queues = device.rx_queues;
    let Some(napis) = &device.napis else {
        // Without ids nothing but hardware, and threads, tell that there is NAPI at all.
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

/// One whose queues are known, with the device's settings where it has none.
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

/// What /sys/class/net/DEVICE has for all instances together; `threaded` since 5.12.
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

/// Who has TCP and UDP sockets on which instance, those with the most first; and how many processes
/// could not be looked at. What is opened or closed meanwhile may be missed.
fn sockets() -> Result<(BTreeMap<u32, Vec<Application>>, usize)> {
    let mut by_id: BTreeMap<u32, Vec<Application>> = BTreeMap::new();
    let mut not_looked_at = 0;
    for pid in process::all()? {
        // One that has ended has no sockets.
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

/// How many of a process's sockets are on which instance.
fn ids_of(target: &Target) -> std::io::Result<BTreeMap<u32, usize>> {
    let mut ids = BTreeMap::new();
    let mut seen = HashSet::new();
    for open in target.opened()? {
        let Open::Socket { fd, inode } = open else {
            continue;
        };
        let socket = match target.borrow(fd) {
            Ok(socket) if seen.insert(inode) => socket,
            // Another number of the same, or closed meanwhile.
            Ok(_) => continue,
            Err(e) if e.raw_os_error() == Some(libc::EBADF) => continue,
            Err(e) => return Err(e),
        };
        // The number may be another file's by now, which has no such option.
        if internet(&SockRef::from(&socket)).is_some()
            && let Ok(Some(id)) = options::napi_id(&socket)
        {
            *ids.entry(id).or_default() += 1;
        }
    }
    Ok(ids)
}

/// The answer as text; ends with a newline.
pub fn render(napis: &Napis) -> String {
    let mut out = String::new();
    let with_some = || napis.devices.iter().filter(|d| !d.instances.is_empty());
    if with_some().next().is_some() {
        let _ = writeln!(out, "{}", instances_table(with_some()).trim_fmt());
    } else if napis.devices.is_empty() {
        let _ = writeln!(
            out,
            "no device of this network namespace has NAPI instances"
        );
    }
    if let Some(table) = applications_table(napis) {
        let _ = writeln!(out, "\n{}", table.trim_fmt());
    }
    let notes = notes(napis);
    if !notes.is_empty() {
        let _ = writeln!(out, "\n{}", notes.join("\n"));
    }
    out.trim_start_matches('\n').to_owned()
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

fn instances_table<'a>(devices: impl Iterator<Item = &'a DeviceNapis>) -> Table {
    let mut table = table(&[
        "id",
        "device",
        "queues",
        "interrupt",
        "on CPU",
        "thread",
        "on CPUs",
        "defer-hard-irqs",
        "gro-flush-timeout",
        "irq-suspend-timeout",
        "threaded",
    ]);
    let ns = |timeout: Option<u64>| or_dash(timeout.map(|ns| format!("{ns} ns")));
    for (device, instance) in devices.flat_map(|d| d.instances.iter().map(move |i| (d, i))) {
        let queues: Vec<_> = instance.rx_queues.iter().map(u32::to_string).collect();
        let settings = instance.settings;
        let thread = instance.thread.as_ref();
        table.add_row([
            or_dash(instance.id),
            device.device.clone(),
            or_dash(Some(queues.join(",")).filter(|queues| !queues.is_empty())),
            or_dash(instance.irq),
            or_dash(instance.irq_cpu),
            or_dash(thread.map(|thread| thread.pid)),
            or_dash(thread.and_then(|thread| thread.cpus.as_ref())),
            or_dash(settings.defer_hard_irqs),
            ns(settings.gro_flush_timeout),
            ns(settings.irq_suspend_timeout),
            or_dash(settings.threaded),
        ]);
    }
    table
}

/// `None` if no socket is on any.
fn applications_table(napis: &Napis) -> Option<Table> {
    let mut table = table(&["id", "device", "process", "application", "sockets"]);
    for name in [1, 3] {
        if let Some(column) = table.column_mut(name) {
            column.set_cell_alignment(CellAlignment::Left);
        }
    }
    let known = napis.devices.iter().flat_map(|device| {
        let instances = device.instances.iter();
        instances.map(|i| (i.id, device.device.as_str(), &i.applications))
    });
    let unknown = napis.unknown.iter();
    let unknown = unknown.map(|unknown| (Some(unknown.id), "-", &unknown.applications));
    for (id, device, applications) in known.chain(unknown) {
        for application in applications {
            table.add_row([
                or_dash(id),
                device.to_owned(),
                application.pid.to_string(),
                application.comm.clone(),
                application.sockets.to_string(),
            ]);
        }
    }
    (table.row_iter().count() > 0).then_some(table)
}

/// That a device has none, and what would give it some.
pub fn no_instances(device: &str, driver: &str) -> String {
    match driver {
        "veth" => {
            format!("{device} has no NAPI instances; `ethtool -K {device} gro on` gives it some")
        }
        _ => format!("{device} has no NAPI instances"),
    }
}

/// What is not known, and why; a line each.
fn notes(napis: &Napis) -> Vec<String> {
    let mut notes = Vec::new();
    for device in &napis.devices {
        let name = &device.device;
        let Some(first) = device.instances.first() else {
            notes.push(no_instances(name, &device.driver));
            continue;
        };
        if first.id.is_none() {
            notes.push(format!(
                "{name}: the kernel does not tell the ids (Linux 6.8 does); a line for each receive \
                 queue"
            ));
        } else if first.rx_queues_by_order {
            notes.push(format!(
                "{name}: the driver does not tell the queues; they are in the order of the ids"
            ));
        } else if device.instances.iter().all(|i| i.rx_queues.is_empty()) {
            notes.push(format!("{name}: the driver does not tell the queues"));
        }
        if !first.device_wide.is_empty() {
            notes.push(format!(
                "{name}: {}: the device's, as the kernel does not tell an instance's (Linux 6.13, \
                 threaded 6.17)",
                first.device_wide.join(", ")
            ));
        }
        if first.settings.irq_suspend_timeout.is_none() {
            notes.push(format!(
                "{name}: the kernel does not tell irq-suspend-timeout (Linux 6.13 does)"
            ));
        }
    }
    if !napis.unknown.is_empty() {
        notes.push("ids without a device: only sockets tell of them".to_owned());
    }
    if napis.not_looked_at > 0 {
        notes.push(format!(
            "the sockets of {} process{} may not be looked at: the kernel asks for the right to trace \
             (CAP_SYS_PTRACE)",
            napis.not_looked_at,
            if napis.not_looked_at == 1 { "" } else { "es" }
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn napis(id: Option<u32>, settings: Settings, device_wide: Vec<&'static str>) -> Napis {
        let applications = vec![Application {
            pid: 70,
            comm: "nginx".to_owned(),
            sockets: 12,
        }];
        let instance = Instance {
            id,
            rx_queues: vec![0],
            rx_queues_by_order: id.is_some(),
            irq: Some(38),
            irq_cpu: Some(1),
            thread: None,
            settings,
            device_wide,
            applications: match id {
                Some(_) => applications.clone(),
                None => Vec::new(),
            },
        };
        let device = |device: &str, driver: &str, instances| DeviceNapis {
            device: device.to_owned(),
            driver: driver.to_owned(),
            instances,
        };
        Napis {
            devices: vec![
                device("eth0", "virtio_net", vec![instance]),
                device("veth0", "veth", Vec::new()),
            ],
            unknown: match id {
                Some(_) => Vec::new(),
                None => vec![Unknown {
                    id: 8193,
                    applications,
                }],
            },
            not_looked_at: 0,
        }
    }

    const WIDE: Settings = Settings {
        defer_hard_irqs: Some(2),
        gro_flush_timeout: Some(200_000),
        irq_suspend_timeout: None,
        threaded: Some(Threaded::Off),
    };

    #[test]
    fn as_text() {
        let settings = Settings {
            irq_suspend_timeout: Some(0),
            ..WIDE
        };
        assert_eq!(
            render(&napis(Some(8193), settings, Vec::new())),
            "   id  device  queues  interrupt  on CPU  thread  on CPUs  defer-hard-irqs  gro-flush-timeout  \
             irq-suspend-timeout  threaded
 8193    eth0       0         38       1       -        -                2          200000 ns                 \
             0 ns       off

   id  device  process  application  sockets
 8193  eth0         70  nginx             12

eth0: the driver does not tell the queues; they are in the order of the ids
veth0 has no NAPI instances; `ethtool -K veth0 gro on` gives it some
"
        );
    }

    #[test]
    fn what_older_kernels_do_not_tell() {
        let text = render(&napis(None, WIDE, vec!["defer-hard-irqs", "threaded"]));
        for part in [
            "does not tell the ids (Linux 6.8 does)",
            "eth0: defer-hard-irqs, threaded: the device's",
            "does not tell irq-suspend-timeout",
            " 8193  -            70  nginx             12",
            "ids without a device",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
