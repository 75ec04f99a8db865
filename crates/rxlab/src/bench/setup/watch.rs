// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters of the kernel during a measurement.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use rxsteer::host::cpu_times::{CpuTimes, busy_shares, cpu_times};
use rxsteer::host::cpumask::CpuMask;
use rxsteer::host::softnet::{self, Softnet};

use crate::lab::netns::Netns;
use crate::lab::snmp;

/// Share of all CPUs' time that the hypervisor may take.
pub const STEAL: f64 = 0.05;

/// Time that the hypervisor takes.
pub struct Steal {
    since: Instant,
    cpus: Vec<CpuTimes>,
}

impl Steal {
    /// Counts from now on.
    ///
    /// # Errors
    /// When the kernel does not show the CPU times.
    pub fn begin() -> Result<Self> {
        Ok(Self {
            cpus: cpu_times()?,
            since: Instant::now(),
        })
    }

    /// Share of all CPUs' time since the last call, 0 to 1.
    ///
    /// # Errors
    /// When the kernel does not show the CPU times any more.
    pub fn share(&mut self) -> Result<f64> {
        let before = std::mem::replace(self, Self::begin()?);
        let all = (self.since - before.since).as_secs_f64() * self.cpus.len() as f64;
        Ok(stolen(&before.cpus, &self.cpus) / all)
    }
}

/// Stolen time between two readings, s.
fn stolen(before: &[CpuTimes], now: &[CpuTimes]) -> f64 {
    let sum = |times: &[CpuTimes]| times.iter().map(|cpu| cpu.steal_ns).sum::<u64>();
    sum(now).saturating_sub(sum(before)) as f64 / 1e9
}

/// Counters at the start of a measurement.
pub struct Watch {
    netns: Netns,
    host: CpuMask,
    start: Instant,
    softnet: Vec<Softnet>,
    cpus: Vec<CpuTimes>,
    udp: BTreeMap<String, u64>,
    tcp: BTreeMap<String, u64>,
}

/// Growth of the counters.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Duration.
    pub seconds: f64,
    /// By CPU, of the host under test.
    pub softnet: BTreeMap<u32, Softnet>,
    /// UDP counters by name.
    pub udp: BTreeMap<String, u64>,
    /// TCP counters by name.
    pub tcp: BTreeMap<String, u64>,
    /// Time in which the CPUs of the host under test were not idle, sum, s.
    pub busy: f64,
    /// `busy` as a share of these CPUs' time.
    pub busy_share: f64,
    /// Shares of these CPUs' time, sampled at ticks: programs; system calls and kernel threads; softirq.
    pub kinds: [f64; 3],
    /// Share of these CPUs' time that the hypervisor took.
    pub steal_share: f64,
    /// Busy share of each of these CPUs.
    pub shares: BTreeMap<u32, f64>,
    /// Busy share of the busiest generators' CPU.
    pub busiest_generator: f64,
    /// Packets that the stack processed on generators' CPUs.
    pub processed_by_generators: u64,
}

impl Watch {
    /// Reads the counters of a namespace and of the host under test, which consists of the CPUs
    /// `host`.
    ///
    /// # Errors
    /// When the kernel does not show them.
    pub fn begin(netns: &Netns, host: &CpuMask) -> Result<Self> {
        Ok(Self {
            netns: netns.clone(),
            host: host.clone(),
            udp: snmp::udp(netns)?,
            tcp: snmp::tcp(netns)?,
            softnet: softnet::read()?,
            cpus: cpu_times()?,
            start: Instant::now(),
        })
    }

    /// Reads the counters again.
    ///
    /// # Errors
    /// When the kernel does not show them any more.
    pub fn end(self) -> Result<Seen> {
        let seconds = self.start.elapsed().as_secs_f64();
        let cpus = cpu_times()?;
        let softnet = softnet::since(&self.softnet, &softnet::read()?);
        let (softnet, astray): (BTreeMap<_, _>, BTreeMap<_, _>) = softnet
            .into_iter()
            .partition(|(cpu, _)| self.host.contains(*cpu));
        let of_host = |times: &[CpuTimes]| -> Vec<CpuTimes> {
            let times = times.iter().copied();
            times.filter(|t| self.host.contains(t.cpu)).collect()
        };
        let (then, host) = (of_host(&self.cpus), of_host(&cpus));
        let idle = |times: &[CpuTimes]| times.iter().map(|cpu| cpu.idle_ns).sum::<u64>();
        let idle = idle(&host).saturating_sub(idle(&then)) as f64 / 1e9;
        // Busy time is sampled at ticks; idle time is measured (NO_HZ_IDLE).
        let all = seconds * host.len() as f64;
        let busy = (all - idle).max(0.0);
        let of_kind = [
            |times: &CpuTimes| times.user_ns,
            |times: &CpuTimes| times.system_ns,
            |times: &CpuTimes| times.softirq_ns,
        ];
        let kinds = of_kind.map(|kind| {
            let sum = |times: &[CpuTimes]| times.iter().map(kind).sum::<u64>();
            sum(&host).saturating_sub(sum(&then))
        });
        let shares = busy_shares(&self.cpus, &cpus, seconds);
        let (shares, generators): (BTreeMap<_, _>, BTreeMap<_, _>) = shares
            .into_iter()
            .partition(|(cpu, _)| self.host.contains(*cpu));
        Ok(Seen {
            seconds,
            softnet,
            processed_by_generators: astray.values().map(|s| s.processed).sum(),
            udp: snmp::since(&self.udp, snmp::udp(&self.netns)?),
            tcp: snmp::since(&self.tcp, snmp::tcp(&self.netns)?),
            busy,
            busy_share: busy / all,
            kinds: kinds.map(|ns| ns as f64 / 1e9 / all),
            steal_share: stolen(&then, &host) / all,
            shares,
            busiest_generator: generators.into_values().fold(0.0, f64::max),
        })
    }
}

impl Seen {
    /// Packets processed by the stack, by CPU.
    pub fn processed(&self) -> BTreeMap<u32, u64> {
        self.softnet
            .iter()
            .map(|(&c, s)| (c, s.processed))
            .collect()
    }

    /// Packets dropped by the kernel's flow limit.
    pub fn flow_limit(&self) -> u64 {
        self.softnet.values().map(|s| s.flow_limit).sum()
    }
}
