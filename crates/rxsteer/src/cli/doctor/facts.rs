// SPDX-License-Identifier: MIT OR Apache-2.0
//! The facts on which recommendations depend, as this host has them.

use std::fs;
use std::path::Path;

use anyhow::Result;
use libbpf_rs::query::ProgInfoIter;

use super::recommendations::{DeviceFacts, HostFacts, Poller};
use crate::host::channels::Channels;
use crate::host::coalesce;
use crate::host::cpumask::CpuMask;
use crate::host::device::Device;
use crate::host::ethtool::{Ethtool, Features, NTUPLE, RX_CHECKSUM, RX_GRO};
use crate::host::kernel;
use crate::host::rings::RxRings;
use crate::host::rss;
use crate::host::softnet;
use crate::host::topology::Topology;
use crate::napi::Instance;

fn read(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number(path: &str) -> Option<u64> {
    read(path)?.parse().ok()
}

/// Facts about the host, with the CPUs on which these devices are polled.
pub(super) fn of_host(devices: &[DeviceFacts]) -> HostFacts {
    let topology = Topology::host();
    let cpus = topology.housekeeping().unwrap_or_default();
    let polling = devices.iter().flat_map(|device| &device.pollers);
    let polling: CpuMask = polling.filter_map(|poller| poller.cpu).collect();
    let idle = polling.iter().chain(cpus.iter());
    let idle = idle.filter_map(|cpu| topology.deepest_idle(cpu));
    let sysctl = |name: &str| number(&format!("/proc/sys/net/core/{name}"));
    let polls = [sysctl("busy_poll"), sysctl("busy_read")];
    let drops = softnet::read().unwrap_or_default();
    HostFacts {
        kernel: kernel::version(),
        irqbalance: runs(Path::new("/proc"), "irqbalance"),
        busy_poll_usecs: polls.into_iter().flatten().max().unwrap_or(0) as u32,
        idle: idle.max_by_key(|state| state.latency),
        max_backlog: sysctl("netdev_max_backlog"),
        backlog_drops: drops.iter().map(|cpu| cpu.dropped).sum(),
        cpus,
    }
}

/// Whether a process with this name runs.
fn runs(proc: &Path, name: &str) -> bool {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let mut processes = entries.filter(|entry| {
        let pid = entry.file_name();
        pid.to_str()
            .is_some_and(|pid| pid.bytes().all(|b| b.is_ascii_digit()))
    });
    processes.any(|process| {
        fs::read_to_string(process.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
    })
}

/// Facts about a device that has these NAPI instances.
///
/// # Errors
/// When the query of the kernel for its features fails.
pub(super) fn of_device(device: &Device, instances: &[Instance]) -> Result<DeviceFacts> {
    let ethtool = Ethtool::by_index(device.ifindex)?;
    let features = ethtool.features()?;
    let sysfs = format!("/sys/class/net/{}", device.name);
    let flow_cnt = |queue| number(&format!("{sysfs}/queues/rx-{queue}/rps_flow_cnt"));
    let count = |file: &str| number(&format!("{sysfs}/statistics/{file}")).unwrap_or(0);
    let bound = |id: u32| ProgInfoIter::default().any(|prog| prog.id == id && prog.ifindex != 0);
    let ours = device
        .xdp
        .as_ref()
        .filter(|xdp| xdp.name.starts_with("rxsteer"));
    Ok(DeviceFacts {
        has_napi: !instances.is_empty(),
        rx_queues: device.rx_queues,
        channels: Channels::of(&ethtool),
        rss: rss::queues(&ethtool),
        pollers: instances.iter().filter_map(poller).collect(),
        node: node_of(&sysfs),
        kernel_rps: device.kernel_rps.clone(),
        flow_cnts: (0..device.rx_queues).filter_map(flow_cnt).collect(),
        accelerated_rfs: features.0.get(NTUPLE).is_some_and(|f| f.active),
        // Without ethtool operations there is no driver that GRO would help.
        gro_off: !device.driver.is_empty()
            && is_off(&features, RX_GRO)
            && device.bypasses_napi().is_none(),
        rx_checksum_off: is_off(&features, RX_CHECKSUM),
        rings: RxRings::of(&ethtool),
        missed: count("rx_missed_errors") + count("rx_fifo_errors"),
        rx_usecs: coalesce::rx_usecs(&ethtool),
        bound_program: ours.is_some_and(|xdp| bound(xdp.id)),
        name: device.name.clone(),
    })
}

/// It is off, and can be switched on.
fn is_off(features: &Features, name: &str) -> bool {
    let feature = features.0.get(name);
    feature.is_some_and(|f| !f.active && !f.wanted && f.changeable)
}

/// `None` if the instance polls no receive queue.
fn poller(instance: &Instance) -> Option<Poller> {
    let thread = instance.thread.as_ref();
    let bound = |cpus: &CpuMask| cpus.len() == 1;
    let thread_cpu = || {
        let cpus = CpuMask::parse_list(thread?.cpus.as_deref()?).ok()?;
        bound(&cpus).then(|| cpus.first())?
    };
    Some(Poller {
        queue: *instance.rx_queues.first()?,
        irq: instance.irq,
        thread: thread.map(|thread| thread.pid),
        cpu: match thread {
            Some(_) => thread_cpu(),
            None => instance.irq_cpu,
        },
    })
}

/// The CPUs of the device's node, if there are several nodes.
fn node_of(sysfs: &str) -> Option<CpuMask> {
    let node: i32 = read(&format!("{sysfs}/device/numa_node"))?.parse().ok()?;
    // -1: the firmware doesn't tell, or there is one node.
    let node = u32::try_from(node).ok()?;
    let list = read(&format!("/sys/devices/system/node/node{node}/cpulist"))?;
    CpuMask::parse_list(&list)
        .ok()
        .filter(|cpus| !cpus.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_by_name() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, comm) in [("12", "irqbalance"), ("self", "bash")] {
            fs::create_dir(proc.path().join(pid)).unwrap();
            fs::write(proc.path().join(pid).join("comm"), format!("{comm}\n")).unwrap();
        }
        assert!(runs(proc.path(), "irqbalance"));
        assert!(!runs(proc.path(), "bash"));
        assert!(!runs(Path::new("/nonexistent"), "irqbalance"));
    }
}
