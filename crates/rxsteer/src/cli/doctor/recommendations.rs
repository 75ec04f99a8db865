// SPDX-License-Identifier: MIT OR Apache-2.0
//! What to change on a host and its devices so that packets are received better, each with its command.
//! Plain conditions on facts; docs/manual/doctor.md has the reasons for their order.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::host::channels::Channels;
use crate::host::cpuidle::IdleState;
use crate::host::cpumask::CpuMask;
use crate::host::kernel::{Version, loses_bound_programs};
use crate::host::rings::RxRings;
use crate::host::shell::{quoted, write_to_each, zero_queue_files};

/// `net.core.netdev_max_backlog` below which drops at backlogs are a reason to raise it: four times
/// the kernel's default.
const BACKLOG: u64 = 4000;

/// Exit latency of an idle state that is deep, us: about what busy polling saves of a round trip.
const DEEP: u32 = 20;

/// What a recommendation is about, in the order of gain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    /// A fault of this kernel.
    KernelFault,
    /// Queues that the device has and does not use.
    Channels,
    /// Queues to which the device sends no flows.
    Rss,
    /// Several queues on one CPU.
    Interrupts,
    /// An interrupt on a CPU of another node than the device.
    Numa,
    /// A daemon that moves interrupts.
    Irqbalance,
    /// Kernel RPS or RFS, which rxsteer replaces.
    KernelRps,
    /// GRO is off.
    Gro,
    /// Checksums of received packets are left to the CPUs.
    RxChecksum,
    /// A small receive ring that has overflowed.
    Ring,
    /// Full backlogs of CPUs.
    Backlog,
    /// Interrupts that are delayed longer than applications poll.
    Coalesce,
    /// Idle states that take long to leave, on a host whose applications poll.
    IdleStates,
}

/// A change that helps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Recommendation {
    /// What it is about.
    pub subject: Subject,
    /// The device; null for the host.
    pub device: Option<String>,
    /// Why, in words.
    pub reason: String,
    /// The commands that make the change, joined by `&&` or `;`.
    pub command: String,
}

/// Facts about the host.
#[derive(Clone, Debug, Default)]
pub struct HostFacts {
    /// Version of the kernel; zeros if unknown.
    pub kernel: Version,
    /// CPUs for interrupts: online ones without isolated ones.
    pub cpus: CpuMask,
    /// The daemon irqbalance runs.
    pub irqbalance: bool,
    /// How long sockets or epoll instances of the host poll, us; 0: not.
    pub busy_poll_usecs: u32,
    /// The deepest idle state of a CPU that polls or receives.
    pub idle: Option<IdleState>,
    /// `net.core.netdev_max_backlog`; `None` outside of the initial network namespace.
    pub max_backlog: Option<u64>,
    /// Packets dropped at the backlogs of all CPUs since boot.
    pub backlog_drops: u64,
}

/// What polls receive queues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Poller {
    /// Its queue, or the first of several.
    pub queue: u32,
    /// Its interrupt.
    pub irq: Option<u32>,
    /// The kernel thread that polls instead of softirqs.
    pub thread: Option<u32>,
    /// The only CPU where it runs.
    pub cpu: Option<u32>,
}

/// Facts about a device.
#[derive(Clone, Debug, Default)]
pub struct DeviceFacts {
    /// Interface name.
    pub name: String,
    /// NAPI instances poll it.
    pub has_napi: bool,
    /// Receive queues in use.
    pub rx_queues: u32,
    /// Used queues and possible ones.
    pub channels: Option<Channels>,
    /// Queues that get flows.
    pub rss: Option<BTreeSet<u32>>,
    /// What polls the queues.
    pub pollers: Vec<Poller>,
    /// CPUs of the device's node.
    pub node: Option<CpuMask>,
    /// Files that switch kernel RPS or RFS on, as `rx-0/rps_cpus`.
    pub kernel_rps: Vec<String>,
    /// `rps_flow_cnt` of each queue.
    pub flow_cnts: Vec<u64>,
    /// The driver places flows for the kernel's RFS (ntuple filters are on).
    pub accelerated_rfs: bool,
    /// GRO can be switched on, and is off.
    pub gro_off: bool,
    /// Checksum verification by the device can be switched on, and is off.
    pub rx_checksum_off: bool,
    /// Its receive rings.
    pub rings: Option<RxRings>,
    /// Packets that found no descriptor.
    pub missed: u64,
    /// Delay of its interrupts, us.
    pub rx_usecs: Option<u32>,
    /// It has a program of rxsteer that is bound to it (`--hash device`).
    pub bound_program: bool,
}

/// All recommendations, in the order of gain.
pub fn recommendations(host: &HostFacts, devices: &[DeviceFacts]) -> Vec<Recommendation> {
    let mut all: Vec<Recommendation> = host.recommendations();
    for device in devices {
        all.extend(device.recommendations(host));
    }
    let irqs = || {
        devices
            .iter()
            .flat_map(|d| &d.pollers)
            .any(|p| p.irq.is_some())
    };
    if host.irqbalance && irqs() {
        all.push(Recommendation {
            subject: Subject::Irqbalance,
            device: None,
            reason:
                "irqbalance runs, and may move interrupts of the queues at any time; the CPUs of \
                     `--rps-cpus auto` follow them, a mask does not. To keep its work for other \
                     devices, ban the queues' interrupts instead (`irqbalance --banirq=IRQ`)"
                    .to_owned(),
            command: "systemctl stop irqbalance".to_owned(),
        });
    }
    all.sort_by_key(|recommendation| recommendation.subject);
    all
}

impl HostFacts {
    fn recommendations(&self) -> Vec<Recommendation> {
        let of_host = |subject, reason, command| Recommendation {
            subject,
            device: None,
            reason,
            command,
        };
        let mut all = Vec::new();
        if let Some(limit) = self.max_backlog.filter(|limit| *limit < BACKLOG)
            && self.backlog_drops > 0
        {
            all.push(of_host(
                Subject::Backlog,
                format!(
                    "since boot {} packets were dropped at backlogs of CPUs, which hold {limit} \
                     packets (/proc/net/softnet_stat)",
                    self.backlog_drops
                ),
                format!("sysctl -w net.core.netdev_max_backlog={BACKLOG}"),
            ));
        }
        if let Some(idle) = self.idle.as_ref().filter(|idle| idle.latency >= DEEP)
            && self.busy_poll_usecs > 0
        {
            all.push(of_host(
                Subject::IdleStates,
                format!(
                    "applications poll to save time, but an idle CPU takes {} us to leave {}",
                    idle.latency, idle.name
                ),
                format!("cpupower idle-set --disable-by-latency {DEEP}"),
            ));
        }
        all
    }

    /// Whether the kernel is of `first` up to before `fixed`, of one series.
    fn is_in(&self, first: Version, fixed: Version) -> bool {
        self.kernel >= first && self.kernel < fixed
    }
}

impl DeviceFacts {
    fn recommendations(&self, host: &HostFacts) -> Vec<Recommendation> {
        let all = [
            self.flow_tables(host),
            self.bound(host),
            self.channels(host),
            self.rss(),
            self.interrupts(host),
            self.numa(host),
            self.rps(),
            self.gro(),
            self.rx_checksum(),
            self.ring(),
            self.coalesce(host),
        ];
        all.into_iter().flatten().collect()
    }

    fn recommend(&self, subject: Subject, reason: String, command: String) -> Recommendation {
        Recommendation {
            subject,
            device: Some(self.name.clone()),
            reason,
            command,
        }
    }

    /// set_rps_cpu() in net/core/dev.c, since "net: Cache hash and flow_id to avoid recalculation"
    /// (6.18) up to "net: do not pass flow_id to set_rps_cpu()" (6.18.16, 6.19.6, CVE-2026-43208):
    /// the index of one queue's table is used in that of another. Only with accelerated RFS.
    fn flow_tables(&self, host: &HostFacts) -> Option<Recommendation> {
        let faulty = host.is_in([6, 18, 0], [6, 18, 16]) || host.is_in([6, 19, 0], [6, 19, 6]);
        let sizes: BTreeSet<u64> = self.flow_cnts.iter().copied().filter(|n| *n > 0).collect();
        let most = *sizes.last()?;
        (faulty && self.accelerated_rfs && sizes.len() > 1).then(|| {
            self.recommend(
                Subject::KernelFault,
                format!(
                    "this kernel (6.18 before 6.18.16, 6.19 before 6.19.6) writes beyond a flow table \
                     of kernel RFS if the tables of {}'s queues have different sizes \
                     (CVE-2026-43208)",
                    self.name
                ),
                write_to_each(
                    &format!(
                        "/sys/class/net/{}/queues/rx-*/rps_flow_cnt",
                        quoted(&self.name)
                    ),
                    most,
                ),
            )
        })
    }

    /// docs/hash.md: the kernel frees a bound program after its device.
    fn bound(&self, host: &HostFacts) -> Option<Recommendation> {
        (self.bound_program && loses_bound_programs(host.kernel)).then(|| {
            self.recommend(
                Subject::KernelFault,
                format!(
                    "this kernel (6.18) can stop if {} is removed while rxsteer steers it by `--hash \
                     device`: use `--hash packet`, or stop rxsteer before the device is removed",
                    self.name
                ),
                "systemctl stop rxsteer".to_owned(),
            )
        })
    }

    fn channels(&self, host: &HostFacts) -> Option<Recommendation> {
        let channels = self.channels.filter(|_| self.has_napi)?;
        let cpus = host.cpus.len() as u32;
        // Drivers have combined channels, or receive and transmit channels.
        let (kind, now, max) = match channels.max_combined {
            0 => ("rx", channels.rx, channels.max_rx),
            max => ("combined", channels.combined, max),
        };
        let wanted = max.min(cpus);
        (now > 0 && now < wanted).then(|| {
            self.recommend(
                Subject::Channels,
                format!(
                    "of {max} receive queues {now} {} in use, and the host has {cpus} CPUs: the \
                     hardware spreads flows without a hop",
                    if now == 1 { "is" } else { "are" }
                ),
                format!("ethtool -L {} {kind} {wanted}", quoted(&self.name)),
            )
        })
    }

    fn rss(&self) -> Option<Recommendation> {
        let used = self.rss.as_ref()?;
        let left_out: CpuMask = (0..self.rx_queues).filter(|q| !used.contains(q)).collect();
        (!left_out.is_empty()).then(|| {
            self.recommend(
                Subject::Rss,
                format!(
                    "the device sends no flows to its queues {left_out}: its indirection table leaves \
                     them out"
                ),
                format!("ethtool -X {} equal {}", quoted(&self.name), self.rx_queues),
            )
        })
    }

    /// CPUs that receive nothing from the device: those of its node first.
    fn free_cpus(&self, host: &HostFacts) -> Vec<u32> {
        let busy: CpuMask = self.pollers.iter().filter_map(|p| p.cpu).collect();
        let free = host.cpus.without(&busy);
        let node = self.node.clone().unwrap_or_default();
        let near = free.intersect(&node);
        near.iter().chain(free.without(&node).iter()).collect()
    }

    fn interrupts(&self, host: &HostFacts) -> Option<Recommendation> {
        let mut free = self.free_cpus(host).into_iter();
        let mut taken: BTreeMap<u32, u32> = BTreeMap::new();
        let mut commands = Vec::new();
        for poller in &self.pollers {
            let Some(cpu) = poller.cpu else { continue };
            let on_it = taken.entry(cpu).or_default();
            *on_it += 1;
            if *on_it > 1
                && let Some(to) = free.next()
            {
                commands.extend(poller.moved_to(to));
            }
        }
        let crowded: CpuMask = taken
            .iter()
            .filter(|(_, n)| **n > 1)
            .map(|(c, _)| *c)
            .collect();
        (!commands.is_empty()).then(|| {
            self.recommend(
                Subject::Interrupts,
                format!(
                    "several receive queues are polled on the same CPU ({crowded}), while others \
                     receive nothing"
                ),
                commands.join(" && "),
            )
        })
    }

    fn numa(&self, host: &HostFacts) -> Option<Recommendation> {
        let node = self.node.as_ref()?;
        let near = node.intersect(&host.cpus);
        let far = |p: &&Poller| p.cpu.is_some_and(|cpu| !node.contains(cpu));
        let far: Vec<&Poller> = self.pollers.iter().filter(far).collect();
        let near: Vec<u32> = near.iter().collect();
        let targets = near.iter().cycle();
        let moved = far
            .iter()
            .zip(targets)
            .filter_map(|(p, to)| p.moved_to(*to));
        let commands: Vec<String> = moved.collect();
        (!commands.is_empty()).then(|| {
            self.recommend(
                Subject::Numa,
                format!(
                    "{} of its queues are polled on CPUs of another NUMA node than the device's \
                     (CPUs {node})",
                    far.len()
                ),
                commands.join(" && "),
            )
        })
    }

    fn rps(&self) -> Option<Recommendation> {
        (!self.kernel_rps.is_empty()).then(|| {
            self.recommend(
                Subject::KernelRps,
                format!(
                    "kernel RPS or RFS is on: rxsteer does not steer {} beside it",
                    self.name
                ),
                zero_queue_files(&self.name, &self.kernel_rps),
            )
        })
    }

    fn gro(&self) -> Option<Recommendation> {
        self.gro_off.then(|| {
            self.recommend(
                Subject::Gro,
                "GRO is off: each segment of TCP in bulk takes the whole way through the stack"
                    .to_owned(),
                format!("ethtool -K {} gro on", quoted(&self.name)),
            )
        })
    }

    fn rx_checksum(&self) -> Option<Recommendation> {
        self.rx_checksum_off.then(|| {
            self.recommend(
                Subject::RxChecksum,
                "the device does not verify checksums: a CPU reads each packet for that".to_owned(),
                format!("ethtool -K {} rx on", quoted(&self.name)),
            )
        })
    }

    fn ring(&self) -> Option<Recommendation> {
        let rings = self.rings.filter(|rings| rings.now < rings.max)?;
        (self.missed > 0).then(|| {
            self.recommend(
                Subject::Ring,
                format!(
                    "{} packets found no descriptor, and the receive rings have {} of at most {}",
                    self.missed, rings.now, rings.max
                ),
                format!("ethtool -G {} rx {}", quoted(&self.name), rings.max),
            )
        })
    }

    fn coalesce(&self, host: &HostFacts) -> Option<Recommendation> {
        let usecs = self.rx_usecs?;
        let polls = host.busy_poll_usecs;
        (polls > 0 && usecs > polls).then(|| {
            self.recommend(
                Subject::Coalesce,
                format!(
                    "applications poll for {polls} us; a packet that comes later waits up to {usecs} us \
                     for its interrupt"
                ),
                format!("ethtool -C {} rx-usecs {polls}", quoted(&self.name)),
            )
        })
    }
}

impl Poller {
    /// The command that moves it to a CPU.
    fn moved_to(&self, cpu: u32) -> Option<String> {
        match (self.thread, self.irq) {
            (Some(thread), _) => Some(format!("taskset -cp {cpu} {thread}")),
            (None, Some(irq)) => Some(format!("echo {cpu} > /proc/irq/{irq}/smp_affinity_list")),
            (None, None) => None,
        }
    }
}

#[cfg(test)]
#[path = "recommendations_tests.rs"]
mod tests;
