// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a host does with its packets for some seconds, as a dry run and /proc count it.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use procfs::process::Process;
use serde::Serialize;

use super::asked::{Asked, Stopped};
use super::prediction::{Facts, Helper, Poller};
use super::run::Run;
use super::tunnels::Kind;
use crate::api::flows::{Flows, Reason};
use crate::api::status::Status;
use crate::daemon::options::{Mode, RpsCpus, Tunnel};
use crate::host::channels::Channels;
use crate::host::cpu_times::{CpuTimes, cpu_times};
use crate::host::cpumask::CpuMask;
use crate::host::device::{Device, RxMode};
use crate::host::ethtool::Ethtool;
use crate::host::gone::is_gone;
use crate::host::netdev::Napi;
use crate::host::softnet::{self, Softnet};
use crate::host::topology::Topology;

/// Time between two looks at the load of the queues, which is that of a window of 10 ms.
const LOOK: Duration = Duration::from_millis(100);

/// Without a dry run, and where the CPU of an interrupt is not known, CPUs with this share of the
/// packets count as those that receive.
const RECEIVES: f64 = 0.05;

/// A CPU's time by kind, as shares of it, and its packets.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cpu {
    /// CPU number.
    pub cpu: u32,
    /// Programs.
    pub user: f64,
    /// System calls and kernel threads.
    pub system: f64,
    /// Softirqs and interrupts.
    pub softirq: f64,
    /// Idle, or waiting for I/O.
    pub idle: f64,
    /// Packets that the stack processed there, per second (softnet_stat).
    pub packets_per_second: f64,
    /// Times per second that softirqs left packets for later (time_squeeze).
    pub squeezes_per_second: f64,
    /// Packets per second dropped at the CPU's backlog.
    pub drops_per_second: f64,
    /// Interrupts of kernel RPS that it received, per second (received_rps).
    pub rps_interrupts_per_second: f64,
}

/// A device, and what it received.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Watched {
    /// Interface name.
    pub device: String,
    /// Receive queues in use.
    pub rx_queues: u32,
    /// Receive queues that it can have; null if the driver does not tell.
    pub most_queues: Option<u32>,
    /// The mode of the dry run that counted; null: /proc and /sys alone were read.
    pub dry_run: Option<String>,
    /// Why there was no dry run.
    pub not_counted: Option<String>,
    /// By the device's own count.
    pub packets_per_second: f64,
    /// Packets that the device dropped or missed, per second.
    pub drops_per_second: f64,
    /// Files that switch kernel RPS on, as `rx-0/rps_cpus`.
    pub kernel_rps: Vec<String>,
}

/// The flows of a dry run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FlowsSeen {
    /// Number of flows; those that share a slot of the table count once.
    pub number: usize,
    /// The busiest flow, if its name is known.
    pub busiest: Option<String>,
    /// Its share of the packets, 0 to 1.
    pub busiest_share: f64,
    /// Its kind, if it is a tunnel's.
    pub busiest_tunnel: Option<Kind>,
    /// Share of the packets in flows that GRO merges, which the default policy leaves where they are.
    pub merged_share: f64,
    /// Share of the packets in tunnels, by kind.
    pub tunnels: BTreeMap<Kind, f64>,
}

/// Everything that was seen.
#[derive(Clone, Debug, Serialize)]
pub struct Seen {
    /// Length, s.
    pub seconds: f64,
    /// Online CPUs.
    pub cpus: Vec<Cpu>,
    /// The devices.
    pub devices: Vec<Watched>,
    /// CPUs that poll the devices' queues.
    pub pollers: Vec<Poller>,
    /// CPUs to which packets could be steered.
    pub helpers: Vec<Helper>,
    /// The flows; null without a dry run.
    pub flows: Option<FlowsSeen>,
    /// The mode in which the devices would be steered.
    pub mode: RxMode,
}

impl Seen {
    /// What the prediction needs; `flows` replaces the flows seen here.
    pub(super) fn facts(&self, flows: Option<&FlowsSeen>) -> Facts {
        let flows = flows.or(self.flows.as_ref());
        Facts {
            pollers: self.pollers.clone(),
            helpers: self.helpers.clone(),
            busiest_flow: flows.map(|flows| flows.busiest_share),
            merged: flows.map_or(0.0, |flows| flows.merged_share),
            mode: self.mode,
            kernel_rps: self.devices.iter().any(|d| !d.kernel_rps.is_empty()),
        }
    }
}

/// Watches for the time asked for.
///
/// # Errors
/// When counters can't be read, or [`Stopped`].
pub(super) fn watch(asked: &Asked<'_>, devices: &[Device], tunnels: &[Tunnel]) -> Result<Seen> {
    let (fit, mut why): (Vec<&Device>, BTreeMap<_, _>) = match asked.attach {
        true if asked.mode == Mode::Auto => fitting(devices),
        true => (devices.iter().collect(), BTreeMap::new()),
        false => {
            let not = |d: &Device| (d.name.clone(), "--no-attach".to_owned());
            (Vec::new(), devices.iter().map(not).collect())
        }
    };
    let names: Vec<String> = fit.iter().map(|device| device.name.clone()).collect();
    let mut dry_run = None;
    if !names.is_empty() {
        match Run::start(&names, asked, tunnels, true) {
            Ok(started) => dry_run = Some(started),
            Err(e) if e.is::<Stopped>() => return Err(e),
            Err(e) => why.extend(names.iter().map(|name| (name.clone(), format!("{e:#}")))),
        }
    }
    let before = Reading::new(devices)?;
    let mut loads = Loads::default();
    if let Some(dry_run) = &dry_run {
        loads.begin(&dry_run.status()?);
    }
    let mut status = None;
    while let Some(left) = asked.time.checked_sub(before.at.elapsed()) {
        (asked.pause)(left.min(LOOK))?;
        if let Some(dry_run) = &dry_run {
            status = Some(loads.look(dry_run.status()?));
        }
    }
    let after = Reading::new(devices)?;
    let flows = match (&dry_run, &status) {
        (Some(dry_run), Some(status)) => Some(flows_seen(&dry_run.flows()?, status)),
        _ => None,
    };
    if let Some(mut dry_run) = dry_run {
        dry_run.end()?;
    }
    let cpus = after.cpus(&before);
    let watched = devices.iter().enumerate().map(|(index, device)| {
        let mut steered = status.iter().flat_map(|status| &status.devices);
        let mode = steered.find(|steered| steered.device == device.name);
        let [received, dropped] = after.rates(&before, index);
        Watched {
            device: device.name.clone(),
            rx_queues: device.rx_queues,
            most_queues: most_queues(device),
            dry_run: mode
                .filter(|_| !why.contains_key(&device.name))
                .map(|steered| steered.mode.clone()),
            not_counted: why.get(&device.name).cloned(),
            packets_per_second: received,
            drops_per_second: dropped,
            kernel_rps: device.kernel_rps.clone(),
        }
    });
    let watched: Vec<Watched> = watched.collect();
    let by_counters = (0..)
        .zip(devices)
        .filter(|(_, d)| why.contains_key(&d.name));
    let pollers = pollers(&loads, &after, &before, by_counters, &cpus);
    let native = match asked.mode {
        Mode::Auto => devices.iter().all(|d| d.fitting_mode() == RxMode::Native),
        mode => mode == Mode::Native,
    };
    Ok(Seen {
        seconds: after.at.duration_since(before.at).as_secs_f64(),
        helpers: helpers(asked.cpus, &pollers, &cpus)?,
        mode: match native {
            true => RxMode::Native,
            false => RxMode::Softirq,
        },
        cpus,
        devices: watched,
        pollers,
        flows,
    })
}

/// Receive queues that a device can have (`ethtool -l`); `None` if the driver does not tell.
fn most_queues(device: &Device) -> Option<u32> {
    let channels = Channels::of(&Ethtool::by_index(device.ifindex).ok()?)?;
    Some(channels.max_combined.max(channels.max_rx)).filter(|&most| most > 0)
}

/// The devices of which `run` would accept all, and why it would not accept the others.
fn fitting(devices: &[Device]) -> (Vec<&Device>, BTreeMap<String, String>) {
    let mut why = BTreeMap::new();
    let fits = |device: &&Device| {
        let mut objections = device.objections(device.fitting_mode()).into_iter();
        let fatal = objections.find(|objection| objection.fatal);
        let fits = fatal.is_none();
        why.extend(fatal.map(|objection| (device.name.clone(), objection.reason)));
        fits
    };
    let fit = devices.iter().filter(fits).collect();
    (fit, why)
}

/// Counters at one time.
struct Reading {
    at: Instant,
    times: Vec<CpuTimes>,
    softnet: Vec<Softnet>,
    /// Received and dropped packets of each device.
    devices: Vec<[u64; 2]>,
    /// Those of threaded NAPI, by process id.
    threads: BTreeMap<u32, PollingThread>,
}

/// A kernel thread that polls a device.
struct PollingThread {
    /// On which it ran last.
    cpu: u32,
    /// Of its CPU time.
    ns: u64,
}

impl PollingThread {
    /// `None` if it has ended.
    fn read(pid: u32) -> Option<Self> {
        let process = Process::new(pid.try_into().ok()?).ok()?;
        Some(Self {
            cpu: process.stat().ok()?.processor?.try_into().ok()?,
            ns: process.schedstat().ok()?.sum_exec_runtime,
        })
    }
}

/// A counter of the device, by its file in /sys.
pub(super) fn statistic(device: &Device, file: &str) -> Result<u64> {
    let path = format!("/sys/class/net/{}/statistics/{file}", device.name);
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    Ok(text.trim().parse()?)
}

impl Reading {
    fn new(devices: &[Device]) -> Result<Self> {
        let counts = devices.iter().map(|device| {
            let count = |file| statistic(device, file);
            let dropped = count("rx_dropped")? + count("rx_missed_errors")?;
            anyhow::Ok([count("rx_packets")?, dropped])
        });
        // A device that has gone receives nothing.
        let counts = counts.map(|counts| match counts {
            Err(e) if is_gone(&e) => Ok([0, 0]),
            counts => counts,
        });
        Ok(Self {
            devices: counts.collect::<Result<_>>()?,
            threads: polling_threads(devices)
                .filter_map(|pid| Some((pid, PollingThread::read(pid)?)))
                .collect(),
            times: cpu_times()?,
            softnet: softnet::read()?,
            at: Instant::now(),
        })
    }

    fn seconds(&self, before: &Self) -> f64 {
        self.at.duration_since(before.at).as_secs_f64()
    }

    /// Received and dropped packets per second of a device.
    fn rates(&self, before: &Self, device: usize) -> [f64; 2] {
        let rate = |i: usize| {
            let [now, then] = [self, before].map(|reading| reading.devices[device][i]);
            now.saturating_sub(then) as f64 / self.seconds(before)
        };
        [rate(0), rate(1)]
    }

    /// Share of a CPU's time that threads have used which poll these devices.
    fn threads(&self, before: &Self, devices: &[Device], cpu: u32) -> f64 {
        let ns = polling_threads(devices).filter_map(|pid| {
            let now = self.threads.get(&pid).filter(|thread| thread.cpu == cpu)?;
            let then = before.threads.get(&pid).map_or(0, |thread| thread.ns);
            Some(now.ns.saturating_sub(then) as f64)
        });
        ns.sum::<f64>() / 1e9 / self.seconds(before)
    }

    fn cpus(&self, before: &Self) -> Vec<Cpu> {
        let softnet = softnet::since(&before.softnet, &self.softnet);
        let rate = |count: u64| count as f64 / self.seconds(before);
        let cpu = |now: &CpuTimes| {
            let then = before.times.iter().find(|then| then.cpu == now.cpu)?;
            let since = |ns: fn(&CpuTimes) -> u64| ns(now).saturating_sub(ns(then)) as f64;
            let whole = (since(|t| t.busy_ns) + since(|t| t.idle_ns)).max(1.0);
            let share = |ns: fn(&CpuTimes) -> u64| since(ns) / whole;
            let (user, system) = (share(|t| t.user_ns), share(|t| t.system_ns));
            let others = user + system + share(|t| t.steal_ns);
            let softnet = softnet.get(&now.cpu).copied().unwrap_or_default();
            Some(Cpu {
                cpu: now.cpu,
                user,
                system,
                softirq: (share(|t| t.busy_ns) - others).max(0.0),
                idle: share(|t| t.idle_ns),
                packets_per_second: rate(softnet.processed),
                squeezes_per_second: rate(softnet.time_squeeze),
                drops_per_second: rate(softnet.dropped),
                rps_interrupts_per_second: rate(softnet.received_rps),
            })
        };
        self.times.iter().filter_map(cpu).collect()
    }
}

/// The process ids of threaded NAPI.
fn polling_threads(devices: &[Device]) -> impl Iterator<Item = u32> + '_ {
    let napis = devices
        .iter()
        .flat_map(|device| device.napis.iter().flatten());
    napis.filter_map(|napi: &Napi| napi.pid)
}

/// The loads of the queues that a dry run counts.
#[derive(Default)]
struct Loads {
    /// Frames received by the last look, by device and queue.
    received: BTreeMap<(String, u32), u64>,
    /// Frames, and the sum of the percentages in polls, by polling CPU.
    cpus: BTreeMap<u32, (u64, u64)>,
    looks: u64,
}

impl Loads {
    fn begin(&mut self, status: &Status) {
        for device in &status.devices {
            for queue in &device.queues {
                let key = (device.device.clone(), queue.queue);
                self.received.insert(key, queue.received);
            }
        }
    }

    /// Adds what has happened since the last look; returns the status. A queue without new packets
    /// has ended no window, and its CPU polled nothing.
    fn look(&mut self, status: Status) -> Status {
        let mut polls: BTreeMap<u32, u64> = BTreeMap::new();
        for device in &status.devices {
            for queue in &device.queues {
                let key = (device.device.clone(), queue.queue);
                let last = self.received.insert(key, queue.received).unwrap_or(0);
                // A dry run that started anew counts from 0.
                let new = queue.received.checked_sub(last).unwrap_or(queue.received);
                let load = queue.load.as_ref();
                let Some(cpu) = load.and_then(|load| load.polling_cpu).filter(|_| new > 0) else {
                    continue;
                };
                self.cpus.entry(cpu).or_default().0 += new;
                let percent = load.map_or(0, |load| load.polls_percent.into());
                // The load has the polls of all queues on the CPU.
                let most = polls.entry(cpu).or_default();
                *most = percent.max(*most);
            }
        }
        for (cpu, percent) in polls {
            self.cpus.entry(cpu).or_default().1 += percent;
        }
        self.looks += 1;
        status
    }
}

/// The CPUs that poll: as the dry run has counted and, for the other devices, by their interrupts.
fn pollers<'a>(
    loads: &Loads,
    after: &Reading,
    before: &Reading,
    by_counters: impl Iterator<Item = (usize, &'a Device)>,
    cpus: &[Cpu],
) -> Vec<Poller> {
    let idle = |cpu: u32| cpus.iter().find(|c| c.cpu == cpu).map_or(0.0, |c| c.idle);
    let counted = loads.cpus.iter().map(|(&cpu, (packets, percents))| Poller {
        cpu,
        packets_per_second: *packets as f64 / after.seconds(before),
        polls: *percents as f64 / 100.0 / loads.looks.max(1) as f64,
        idle: idle(cpu),
    });
    let mut pollers: Vec<Poller> = counted.collect();
    let all: f64 = cpus.iter().map(|cpu| cpu.packets_per_second).sum();
    for (index, device) in by_counters {
        if after.rates(before, index)[0] == 0.0 {
            continue;
        }
        let topology = Topology::host();
        let known: Option<CpuMask> = (0..device.rx_queues)
            .map(|queue| device.interrupt_cpu(&topology, queue))
            .collect();
        for cpu in cpus {
            let receives = match &known {
                Some(known) => known.contains(cpu.cpu),
                None => cpu.packets_per_second >= RECEIVES * all,
            };
            if receives && pollers.iter().all(|poller| poller.cpu != cpu.cpu) {
                pollers.push(Poller {
                    cpu: cpu.cpu,
                    packets_per_second: cpu.packets_per_second,
                    polls: cpu.softirq
                        + after.threads(before, std::slice::from_ref(device), cpu.cpu),
                    idle: cpu.idle,
                });
            }
        }
    }
    pollers
}

/// The CPUs of the masks: of `auto`, those that `run` would choose for the polling CPUs.
fn helpers(mask: &RpsCpus, pollers: &[Poller], cpus: &[Cpu]) -> Result<Vec<Helper>> {
    let topology = Topology::host();
    let mask: CpuMask = match mask {
        RpsCpus::Mask(mask) => mask.clone(),
        RpsCpus::Auto => {
            let masks = pollers.iter().map(|p| topology.auto_mask(Some(p.cpu)));
            let masks: Vec<_> = masks.collect::<Result<_>>()?;
            masks.iter().flat_map(|auto| auto.cpus.iter()).collect()
        }
    };
    let helps = cpus.iter().filter(|cpu| mask.contains(cpu.cpu));
    let helper = |cpu: &Cpu| Helper {
        cpu: cpu.cpu,
        idle: cpu.idle,
    };
    Ok(helps.map(helper).collect())
}

fn flows_seen(flows: &Flows, status: &Status) -> FlowsSeen {
    let queues = status.devices.iter().flat_map(|device| &device.queues);
    let received: u64 = queues.map(|queue| queue.received).sum();
    let listed: u64 = flows.flows.iter().map(|f| u64::from(f.packets)).sum();
    // The flows are read after the status, and have the packets since they got their slots.
    let all = received.max(listed).max(1) as f64;
    let mut seen = FlowsSeen {
        number: flows.total,
        ..FlowsSeen::default()
    };
    if let Some(first) = flows.flows.first() {
        seen.busiest = first.flow.map(|flow| flow.to_string());
        seen.busiest_share = f64::from(first.packets) / all;
        seen.busiest_tunnel = first.flow.as_ref().and_then(Kind::of);
    }
    for entry in &flows.flows {
        if entry.reason == Reason::Merged {
            seen.merged_share += f64::from(entry.packets) / all;
        }
        if let Some(kind) = entry.flow.as_ref().and_then(Kind::of) {
            *seen.tunnels.entry(kind).or_default() += f64::from(entry.packets) / all;
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::flows::{Entry, Location};
    use crate::api::status;
    use crate::datapath::flow::FlowHash;
    use crate::datapath::load::{Load, Pressure};

    fn status(received: [u64; 2], percents: [u32; 2]) -> Status {
        let queue = |queue: usize| status::Queue {
            queue: queue as u32,
            received: received[queue],
            load: Some(Load {
                polling_cpu: Some(3),
                pressure: Pressure::Full,
                busy_percent: 99,
                polls_percent: percents[queue],
            }),
            ..status::Queue::default()
        };
        let device = status::Device {
            device: "eth0".to_owned(),
            ifindex: 2,
            mode: "native".to_owned(),
            foreign: 0,
            unsteered: Vec::new(),
            queues: vec![queue(0), queue(1)],
            queues_of: None,
            shares_queues: false,
        };
        Status {
            devices: vec![device],
            ..Status::default()
        }
    }

    #[test]
    fn the_load_of_a_cpu_is_that_of_all_its_queues() {
        let mut loads = Loads::default();
        loads.begin(&status([1_000, 0], [50, 0]));
        loads.look(status([1_100, 300], [60, 70]));
        // Without packets, the last window is an old one.
        loads.look(status([1_100, 300], [60, 70]));
        // Counted anew.
        loads.look(status([50, 300], [20, 70]));
        assert_eq!(loads.cpus, BTreeMap::from([(3, (450, 90))]));
        assert_eq!(loads.looks, 3);
    }

    #[test]
    fn shares_of_flows_and_tunnels() {
        let entry = |flow: &str, packets| Entry {
            flow: Some(flow.parse().unwrap()),
            hash: FlowHash(7),
            device: "eth0".to_owned(),
            queue: 0,
            location: Location::Inline,
            wanted: Location::Inline,
            reason: Reason::Room,
            base: None,
            application_cpu: None,
            application_offline: false,
            polling_cpu: None,
            packets,
            dropped: 0,
            moves: 0,
            idle_seconds: 0.0,
            shed: false,
        };
        let merged = Entry {
            reason: Reason::Merged,
            ..entry("tcp/192.0.2.1:1/80", 50)
        };
        let flows = Flows {
            flows: vec![
                entry("gre/192.0.2.1/192.0.2.2", 600),
                entry("esp/192.0.2.1/192.0.2.2/0x1001", 100),
                entry("udp/192.0.2.1:1/53", 100),
                merged,
            ],
            total: 4,
            slots: 4096,
        };
        let seen = flows_seen(&flows, &status([600, 400], [0, 0]));
        assert_eq!((seen.number, seen.busiest_share), (4, 0.6));
        assert_eq!(seen.merged_share, 0.05);
        assert_eq!(seen.busiest_tunnel, Some(Kind::Gre));
        let tunnels = BTreeMap::from([(Kind::Gre, 0.6), (Kind::Esp, 0.1)]);
        assert_eq!(seen.tunnels, tunnels);
    }
}
