// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the kernel counts while a mode is measured.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use rxsteer::host::cpu_times::{CpuTimes, busy_shares, cpu_times};
use rxsteer::host::cpumask::CpuMask;

use crate::lab::netns::Netns;
use crate::lab::softnet::{self, Softnet};

/// Of all CPUs' time, what the hypervisor may take for others.
pub const STEAL: f64 = 0.05;

/// What the hypervisor takes for others.
pub struct Steal {
    since: Instant,
    cpus: Vec<CpuTimes>,
}

impl Steal {
    /// Watches from now on.
    ///
    /// # Errors
    /// When the kernel does not show it.
    pub fn begin() -> Result<Self> {
        Ok(Self {
            cpus: cpu_times()?,
            since: Instant::now(),
        })
    }

    /// The share of all CPUs' time since it was last asked.
    ///
    /// # Errors
    /// When the kernel does not show it any more.
    pub fn share(&mut self) -> Result<f64> {
        let before = std::mem::replace(self, Self::begin()?);
        let all = (self.since - before.since).as_secs_f64() * self.cpus.len() as f64;
        Ok(stolen(&before.cpus, &self.cpus) / all)
    }
}

/// Between two looks at all CPUs, s.
fn stolen(before: &[CpuTimes], now: &[CpuTimes]) -> f64 {
    let sum = |times: &[CpuTimes]| times.iter().map(|cpu| cpu.steal_ns).sum::<u64>();
    sum(now).saturating_sub(sum(before)) as f64 / 1e9
}

/// The counters at one moment.
pub struct Watch {
    netns: Netns,
    host: CpuMask,
    start: Instant,
    softnet: Vec<Softnet>,
    cpus: Vec<CpuTimes>,
    udp: BTreeMap<String, u64>,
    tcp: BTreeMap<String, u64>,
}

/// By how much they have grown.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Meanwhile.
    pub seconds: f64,
    /// By CPU of the host under test.
    pub softnet: BTreeMap<u32, Softnet>,
    /// Of UDP, by name.
    pub udp: BTreeMap<String, u64>,
    /// Of TCP, by name.
    pub tcp: BTreeMap<String, u64>,
    /// The CPUs of the host under test together: the time in which they were not idle, s.
    pub busy: f64,
    /// Of the time of these CPUs.
    pub busy_share: f64,
    /// Of the time of these CPUs, what the hypervisor took for others.
    pub steal_share: f64,
    /// The same of each.
    pub shares: BTreeMap<u32, f64>,
    /// Of the other CPUs, the generators', the one that was idle least: the share of the time in which
    /// it was not.
    pub busiest_generator: f64,
    /// Packets that the stack processed on these.
    pub processed_by_generators: u64,
}

impl Watch {
    /// Reads the counters of a host that consists of some of this machine's CPUs, and a namespace's.
    ///
    /// # Errors
    /// When the kernel does not show them.
    pub fn begin(netns: &Netns, host: &CpuMask) -> Result<Self> {
        Ok(Self {
            netns: netns.clone(),
            host: host.clone(),
            udp: softnet::udp(netns)?,
            tcp: softnet::tcp(netns)?,
            softnet: softnet::softnet()?,
            cpus: cpu_times()?,
            start: Instant::now(),
        })
    }

    /// Reads them again.
    ///
    /// # Errors
    /// When the kernel does not show them any more.
    pub fn end(self) -> Result<Seen> {
        let seconds = self.start.elapsed().as_secs_f64();
        let cpus = cpu_times()?;
        let softnet = grown(&self.softnet, &softnet::softnet()?);
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
        // Busy times are sampled at ticks, idle ones are measured (NO_HZ_IDLE).
        let all = seconds * host.len() as f64;
        let busy = (all - idle).max(0.0);
        let shares = busy_shares(&self.cpus, &cpus, seconds);
        let (shares, generators): (BTreeMap<_, _>, BTreeMap<_, _>) = shares
            .into_iter()
            .partition(|(cpu, _)| self.host.contains(*cpu));
        Ok(Seen {
            seconds,
            softnet,
            processed_by_generators: astray.values().map(|s| s.processed).sum(),
            udp: softnet::since(&self.udp, softnet::udp(&self.netns)?),
            tcp: softnet::since(&self.tcp, softnet::tcp(&self.netns)?),
            busy,
            busy_share: busy / all,
            steal_share: stolen(&then, &host) / all,
            shares,
            busiest_generator: generators.into_values().fold(0.0, f64::max),
        })
    }
}

impl Seen {
    /// Packets that the stack processed, by CPU.
    pub fn processed(&self) -> BTreeMap<u32, u64> {
        self.softnet
            .iter()
            .map(|(&c, s)| (c, s.processed))
            .collect()
    }

    /// Packets that the kernel's flow limit dropped.
    pub fn flow_limit(&self) -> u64 {
        self.softnet.values().map(|s| s.flow_limit).sum()
    }
}

/// The counters have 32 bits, and wrap.
fn grown(before: &[Softnet], now: &[Softnet]) -> BTreeMap<u32, Softnet> {
    let less = |now: u64, before: u64| u64::from((now as u32).wrapping_sub(before as u32));
    let of = |now: &Softnet| {
        let zero = Softnet::default();
        let before = before.iter().find(|b| b.cpu == now.cpu).unwrap_or(&zero);
        let grown = Softnet {
            cpu: now.cpu,
            processed: less(now.processed, before.processed),
            dropped: less(now.dropped, before.dropped),
            time_squeeze: less(now.time_squeeze, before.time_squeeze),
            received_rps: less(now.received_rps, before.received_rps),
            flow_limit: less(now.flow_limit, before.flow_limit),
        };
        (now.cpu, grown)
    };
    now.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_wrap_at_32_bits() {
        let at = |processed| Softnet {
            cpu: 1,
            processed,
            ..Default::default()
        };
        let grown = grown(&[at(0xffff_fffe)], &[at(3)]);
        assert_eq!(grown[&1].processed, 5);
    }
}
