// SPDX-License-Identifier: MIT OR Apache-2.0
//! Obstacles to steering on this host and on its devices, and the answer of `rxsteer doctor`.

use std::fs;
use std::net::UdpSocket;

use anyhow::Result;
use nix::sys::epoll::{Epoll, EpollCreateFlags};
use serde::Serialize;

use super::facts;
use super::napi_effects::{Advice, of_napi};
use super::recommendations::{Recommendation, recommendations};
use crate::api::client;
use crate::api::status::{self, NOT_STEERED, Status};
use crate::host::caps::{self, Missing};
use crate::host::device::{AttachedXdp, Device, RxMode};
use crate::host::gain;
use crate::host::gone::is_gone;
use crate::host::lower::bond_ports;
use crate::host::objection::Objection;
use crate::host::polling::Polling;
use crate::host::record;
use crate::host::topology::Topology;
use crate::napi::{self, Instance};

/// The answer of `rxsteer doctor`.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    /// This host.
    pub host: Host,
    /// The devices named, or all that are up except loopback.
    pub devices: Vec<DeviceDiagnosis>,
    /// What to change, in the order of gain.
    pub recommendations: Vec<Recommendation>,
    /// There is an obstacle: on the host, or on a named device.
    pub in_the_way: bool,
}

/// Facts about the host.
#[derive(Debug, Serialize)]
pub struct Host {
    /// The kernel's release.
    pub release: String,
    /// Requirements of steering that the host lacks.
    pub missing: Vec<Missing>,
    /// Sockets can poll (`SO_BUSY_POLL`).
    pub busy_polling: bool,
    /// Epoll instances have their own parameters of busy polling (Linux 6.9).
    pub epoll_params: bool,
    /// `net.core.busy_poll`, us: the time for which poll(), select() and all epoll instances of the
    /// host poll. `None` without busy polling.
    pub busy_poll_usecs: Option<u32>,
    /// What a rxsteer has changed in this network namespace that was killed before it was put back, in
    /// sentences with remedies.
    pub not_put_back: Vec<String>,
}

/// Facts about a device.
#[derive(Debug, Serialize)]
pub struct DeviceDiagnosis {
    /// The device's name.
    pub device: String,
    /// The driver; empty for devices without ethtool operations.
    pub driver: String,
    /// Receive queues in use.
    pub rx_queues: u32,
    /// The rxsteer that steers the device now.
    pub steered_by: Option<String>,
    /// The mode in which the device is steered as it is, by `--mode auto`; `None`: in none.
    pub mode: Option<RxMode>,
    /// Objections to native mode.
    pub native: Vec<Objection>,
    /// Objections to softirq mode.
    pub softirq: Vec<Objection>,
    /// Why steering wins nothing there, if it does not, with the CPUs of `--rps-cpus auto`.
    pub nothing_to_gain: Option<String>,
    /// Effects of the settings of its NAPI instances.
    pub napi: Vec<Advice>,
}

/// Examines the host, and the devices named, or all that are up except loopback.
///
/// # Errors
/// When a device does not exist, with a list of devices; or when the kernel can't be queried.
pub fn diagnose(names: &[String]) -> Result<Diagnosis> {
    let host = Host::look();
    let asked = !names.is_empty();
    let (mut devices, mut facts) = (Vec::new(), Vec::new());
    // Another user is not answered.
    let steering = client::counters().ok();
    // A bond is steered on its ports.
    let bonds = names.iter().filter_map(|name| bond_ports(name));
    let names: Vec<String> = names.iter().cloned().chain(bonds.flatten()).collect();
    for (device, instances) in napi::with_instances(&names)? {
        if !asked && (!device.up || device.name == "lo") {
            continue;
        }
        match facts::of_device(&device, &instances) {
            Err(e) if !asked && is_gone(&e) => continue,
            of_device => facts.push(of_device?),
        }
        let steered_by = steered_by(&device, steering.as_ref());
        devices.push(DeviceDiagnosis::of(&device, &instances, steered_by));
    }
    let unfit = devices.iter().any(|device| device.mode.is_none());
    Ok(Diagnosis {
        recommendations: recommendations(&facts::of_host(&facts), &facts),
        in_the_way: !host.missing.is_empty() || asked && unfit,
        host,
        devices,
    })
}

impl Host {
    fn look() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let unknown = |e: std::io::Error| e.raw_os_error() == Some(libc::ENOPROTOOPT);
        let polls = |socket: UdpSocket| !Polling::of_socket(&socket).is_err_and(unknown);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC);
        Self {
            release: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            missing: caps::missing(),
            busy_polling: UdpSocket::bind("0.0.0.0:0").is_ok_and(polls),
            epoll_params: epoll.is_ok_and(|epoll| Polling::of_epoll(&epoll.0).is_ok()),
            busy_poll_usecs: read("/proc/sys/net/core/busy_poll").trim().parse().ok(),
            not_put_back: record::words(),
        }
    }
}

impl DeviceDiagnosis {
    fn of(device: &Device, instances: &[Instance], steered_by: Option<String>) -> Self {
        let device = &Device {
            xdp: device.xdp.clone().filter(|xdp| !is_ours(xdp)),
            ..device.clone()
        };
        let [native, softirq] =
            [RxMode::Native, RxMode::Softirq].map(|mode| device.objections(mode));
        let mode = Some(device.fitting_mode()).filter(|mode| device.unobstructed(*mode).is_ok());
        Self {
            device: device.name.clone(),
            driver: device.driver.clone(),
            rx_queues: device.rx_queues,
            steered_by,
            mode,
            native,
            softirq,
            nothing_to_gain: nothing_to_gain(device),
            napi: of_napi(device, instances),
        }
    }
}

fn is_ours(xdp: &AttachedXdp) -> bool {
    xdp.name.starts_with("rxsteer")
}

/// The rxsteer that steers a device: by its XDP program, which may be pinned, or by what the running
/// one says, since softirq mode has none.
fn steered_by(device: &Device, steering: Option<&Status>) -> Option<String> {
    if let Some(xdp) = device.xdp.as_ref().filter(|xdp| is_ours(xdp)) {
        return Some(xdp.holders.join(", "));
    }
    let steering = steering?;
    let is_it = |known: &status::Device| known.device == device.name && known.mode != NOT_STEERED;
    let known = steering.devices.iter().find(|known| is_it(known))?;
    Some(format!(
        "rxsteer (pid {}) in {} mode",
        steering.pid, known.mode
    ))
}

/// [`Topology::nothing_to_gain`] with the masks of `auto`.
fn nothing_to_gain(device: &Device) -> Option<String> {
    let topology = Topology::host();
    let queue = |queue| {
        let interrupt_cpu = device.interrupt_cpu(&topology, queue);
        let cpus = topology.auto_mask(interrupt_cpu).ok()?.cpus;
        Some(gain::Queue {
            interrupt_cpu,
            nr_interrupts: device.nr_interrupts(&topology, queue),
            cpus,
        })
    };
    let queues: Option<Vec<_>> = (0..device.rx_queues).map(queue).collect();
    topology.nothing_to_gain(&device.name, &queues?)
}
