// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer doctor`: obstacles to steering on this host and on its devices, and the effects of the
//! settings of NAPI instances. Changes nothing.

use std::fmt::Write;
use std::fs;
use std::net::UdpSocket;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use nix::sys::epoll::{Epoll, EpollCreateFlags};
use serde::Serialize;

use super::program::{end_with_the_reader, print_answer};
use crate::host::caps::{self, Missing, Need};
use crate::host::device::{AttachedXdp, Device, RxMode};
use crate::host::gain;
use crate::host::lower::bond_ports;
use crate::host::netdev::{Settings, Threaded};
use crate::host::objection::Objection;
use crate::host::polling::Polling;
use crate::host::topology::Topology;
use crate::napi::{self, Instance};

/// Options of `rxsteer doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Network devices, for example eth0; without, all that are up, but for lo
    #[arg(value_name = "DEVICE")]
    pub devices: Vec<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl DoctorArgs {
    /// Fails, by the exit status only, if there is an obstacle.
    pub(super) fn run(&self) -> Result<ExitCode> {
        end_with_the_reader()?;
        let diagnosis = diagnose(&self.devices)?;
        print_answer(self.json, &diagnosis, render)?;
        Ok(match diagnosis.in_the_way {
            false => ExitCode::SUCCESS,
            true => ExitCode::FAILURE,
        })
    }
}

/// The answer of `rxsteer doctor`.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    /// This host.
    pub host: Host,
    /// The devices named, or all that are up except loopback.
    pub devices: Vec<DeviceDiagnosis>,
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
    /// Objections to skb mode.
    pub skb: Vec<Objection>,
    /// Objections to generic mode.
    pub generic: Vec<Objection>,
    /// Why steering wins nothing there, if it does not, with the CPUs of `--rps-cpus auto`.
    pub nothing_to_gain: Option<String>,
    /// Effects of the settings of its NAPI instances.
    pub napi: Vec<Advice>,
}

/// The effect of settings.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// Ids of the instances with these settings; empty if all have them.
    pub ids: Vec<u32>,
    /// Description of the effect.
    pub what: String,
}

/// Examines the host, and the devices named, or all that are up except loopback.
///
/// # Errors
/// When a device does not exist, with a list of devices; or when the kernel can't be queried.
pub fn diagnose(names: &[String]) -> Result<Diagnosis> {
    let host = Host::look();
    let asked = !names.is_empty();
    let mut devices = Vec::new();
    // A bond is steered on its ports.
    let bonds = names.iter().filter_map(|name| bond_ports(name));
    let names: Vec<String> = names.iter().cloned().chain(bonds.flatten()).collect();
    for (device, instances) in napi::with_instances(&names)? {
        if asked || device.up && device.name != "lo" {
            devices.push(DeviceDiagnosis::of(&device, &instances));
        }
    }
    let unfit = devices.iter().any(|device| device.mode.is_none());
    Ok(Diagnosis {
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
            missing: caps::missing(Need::Steer),
            busy_polling: UdpSocket::bind("0.0.0.0:0").is_ok_and(polls),
            epoll_params: epoll.is_ok_and(|epoll| Polling::of_epoll(&epoll.0).is_ok()),
            busy_poll_usecs: read("/proc/sys/net/core/busy_poll").trim().parse().ok(),
        }
    }
}

impl DeviceDiagnosis {
    fn of(device: &Device, instances: &[Instance]) -> Self {
        let ours = |xdp: &AttachedXdp| xdp.name.starts_with("rxsteer");
        let steered_by = device.xdp.as_ref().filter(|xdp| ours(xdp));
        let device = &Device {
            xdp: device.xdp.clone().filter(|xdp| !ours(xdp)),
            ..device.clone()
        };
        let modes = [RxMode::Native, RxMode::Skb, RxMode::Generic];
        let objections = modes.map(|mode| device.objections(mode));
        let fits = |mode, objections: &[Objection]| match mode {
            RxMode::Native => device.objection_to_native().is_none(),
            _ => !objections.iter().any(|o| o.fatal),
        };
        let fitting = modes.into_iter().zip(&objections);
        let fitting = fitting.into_iter().find(|(mode, o)| fits(*mode, o));
        let mode = fitting.map(|(mode, _)| mode);
        let [native, skb, generic] = objections;
        Self {
            device: device.name.clone(),
            driver: device.driver.clone(),
            rx_queues: device.rx_queues,
            steered_by: steered_by.map(|xdp| xdp.holders.join(", ")),
            mode,
            native,
            skb,
            generic,
            nothing_to_gain: nothing_to_gain(device),
            napi: of_napi(device, instances),
        }
    }
}

/// [`Topology::nothing_to_gain`] with the masks of `auto`.
fn nothing_to_gain(device: &Device) -> Option<String> {
    let topology = Topology::host();
    let queue = |queue| {
        let interrupt_cpu = device.interrupt_cpu(&topology, queue);
        let cpus = topology.auto_mask(interrupt_cpu).ok()?.cpus;
        Some(gain::Queue {
            interrupt_cpu,
            cpus,
        })
    };
    let queues: Option<Vec<_>> = (0..device.rx_queues).map(queue).collect();
    topology.nothing_to_gain(&device.name, &queues?)
}

/// Effects of the settings of a device's instances.
fn of_napi(device: &Device, instances: &[Instance]) -> Vec<Advice> {
    let what = match device.napis {
        _ if !device.up => return Vec::new(),
        _ if !instances.is_empty() => return advice(&device.name, instances),
        Some(_) => format!(
            "{}: no application can poll it",
            napi::no_instances(&device.name, &device.driver)
        ),
        None => "the kernel does not tell whether there are instances (Linux 6.8 does)".to_owned(),
    };
    vec![Advice {
        ids: Vec::new(),
        what,
    }]
}

/// Effects of a device's settings, each once.
fn advice(device: &str, instances: &[Instance]) -> Vec<Advice> {
    let mut advice: Vec<Advice> = Vec::new();
    for instance in instances {
        for what in amounts_to(device, &instance.settings) {
            match advice.iter_mut().find(|known| known.what == what) {
                Some(known) => known.ids.extend(instance.id),
                None => advice.push(Advice {
                    ids: instance.id.into_iter().collect(),
                    what,
                }),
            }
        }
    }
    for known in &mut advice {
        if known.ids.len() == instances.len() {
            known.ids.clear();
        }
    }
    advice
}

/// Effects of an instance's settings, by napi_complete_done(), busy_poll_stop() and
/// napi_suspend_irqs() in net/core/dev.c, and Documentation/networking/napi.rst.
fn amounts_to(device: &str, s: &Settings) -> Vec<String> {
    let polls = s.defer_hard_irqs.unwrap_or(0);
    let timer = s.gro_flush_timeout.unwrap_or(0);
    let set = |options: &str| format!("`rxsteer napi {device} {options}`");
    let mut words = vec![match (polls, timer) {
        (0, 0) => format!(
            "interrupts are not deferred, which is the default. Only `rxsteer poll --prefer` needs \
             that; {} defers them",
            set("--defer-hard-irqs 2 --gro-flush-timeout 200000")
        ),
        (polls, 0) => format!(
            "the interrupt is meant to stay masked for {polls} polls that find nothing, but no timer \
             polls: it has no effect; {} sets one",
            set("--gro-flush-timeout 200000")
        ),
        (0, timer) => format!(
            "GRO may hold packets for {} although interrupts come, and `rxsteer poll --prefer` has \
             no effect; {} defers them",
            us(timer),
            set("--defer-hard-irqs 2")
        ),
        (polls, timer) => format!(
            "the interrupt stays masked until {polls} polls in a row found nothing, and a timer \
             polls every {}: a packet that nobody polls for waits so long at most. Applications \
             that prefer busy polling are not interrupted",
            us(timer)
        ),
    }];
    match s.irq_suspend_timeout {
        None | Some(0) => {}
        Some(suspend) if polls > 0 && timer > 0 => words.push(format!(
            "the interrupt is suspended for {} at most while an epoll instance that prefers busy \
             polling finds packets",
            us(suspend)
        )),
        Some(_) => words.push(
            "irq-suspend-timeout has no effect without defer-hard-irqs and gro-flush-timeout"
                .to_owned(),
        ),
    }
    match s.threaded {
        Some(Threaded::On) => words.push(
            "a kernel thread polls, which may run on any CPU where it is not bound: packets are \
             received where it runs"
                .to_owned(),
        ),
        Some(Threaded::BusyPoll) => words.push(
            "a kernel thread polls without a pause: an application finds its queue taken, and does \
             not poll it"
                .to_owned(),
        ),
        Some(Threaded::Off) | None => {}
    }
    words
}

/// Nanoseconds as text.
fn us(ns: u64) -> String {
    format!("{} us", ns as f64 / 1000.0)
}

/// The answer as text; ends with a newline.
pub fn render(diagnosis: &Diagnosis) -> String {
    let mut out = String::new();
    let host = &diagnosis.host;
    let _ = match host.missing.is_empty() {
        true => writeln!(
            out,
            "this host (Linux {}) has all that steering needs",
            host.release
        ),
        false => writeln!(
            out,
            "this host (Linux {}) can't steer; it lacks",
            host.release
        ),
    };
    for missing in &host.missing {
        let _ = writeln!(out, "  {}: {}", missing.what, missing.how_to_get);
    }
    for line in busy_polling(host) {
        let _ = writeln!(out, "{line}");
    }
    for device in &diagnosis.devices {
        let _ = writeln!(
            out,
            "\n{} ({}{} receive queue{}) {}",
            device.device,
            match device.driver.as_str() {
                "" => String::new(),
                driver => format!("{driver}, "),
            },
            device.rx_queues,
            if device.rx_queues == 1 { "" } else { "s" },
            match device.mode {
                _ if device.steered_by.is_some() => format!(
                    "is steered by {}",
                    device.steered_by.as_deref().unwrap_or_default()
                ),
                Some(mode) => format!("can be steered, in {mode} mode"),
                None => "can't be steered as it is".to_owned(),
            }
        );
        // The chosen mode's objections only; without one, those of both modes.
        let either = match device.mode {
            Some(RxMode::Native) => device.native.iter().collect(),
            Some(RxMode::Generic) => device.generic.iter().collect(),
            Some(RxMode::Skb) => device.skb.iter().collect(),
            None => {
                let generic = device.generic.iter();
                let others = generic.filter(|o| !device.native.contains(o));
                device.native.iter().chain(others).collect::<Vec<_>>()
            }
        };
        for objection in either {
            let weight = if objection.fatal { "" } else { "a warning: " };
            let _ = writeln!(out, "  {weight}{objection}");
        }
        if device.mode == Some(RxMode::Skb) && device.steered_by.is_none() {
            for objection in device.native.iter().filter(|o| !device.skb.contains(o)) {
                let _ = writeln!(out, "  against native mode: {objection}");
            }
        }
        if let Some(words) = &device.nothing_to_gain {
            let _ = writeln!(out, "  {words}");
        }
        for advice in &device.napi {
            let ids: Vec<_> = advice.ids.iter().map(u32::to_string).collect();
            let whose = match ids.is_empty() {
                true => String::new(),
                false => format!(" {}", ids.join(", ")),
            };
            let _ = writeln!(out, "  NAPI{whose}: {}", advice.what);
        }
    }
    out
}

fn busy_polling(host: &Host) -> Vec<String> {
    if !host.busy_polling {
        let no = "this kernel has no busy polling: it was built without CONFIG_NET_RX_BUSY_POLL";
        return vec![no.to_owned()];
    }
    let mut lines = vec!["sockets can poll (`rxsteer poll`)".to_owned()];
    if !host.epoll_params {
        lines.push(
            "epoll instances poll only for the whole host (`rxsteer poll --host-wide`): their own \
             parameters need Linux 6.9"
                .to_owned(),
        );
    }
    if let Some(usecs) = host.busy_poll_usecs.filter(|usecs| *usecs > 0) {
        lines.push(format!(
            "net.core.busy_poll is {usecs}: poll(), select() and all epoll instances of this host \
             poll for {usecs} us"
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(id: u32, settings: Settings) -> Instance {
        Instance {
            id: Some(id),
            rx_queues: Vec::new(),
            rx_queues_by_order: false,
            irq: None,
            irq_cpu: None,
            thread: None,
            settings,
            device_wide: Vec::new(),
            applications: Vec::new(),
        }
    }

    #[test]
    fn settings_amount_to_something_only_together() {
        let settings = |polls, timer, suspend| Settings {
            defer_hard_irqs: Some(polls),
            gro_flush_timeout: Some(timer),
            irq_suspend_timeout: Some(suspend),
            threaded: None,
        };
        let mut said = std::collections::HashSet::new();
        for (settings, words) in [
            (
                settings(0, 0, 0),
                &["interrupts are not deferred, which is the default"][..],
            ),
            (settings(2, 0, 0), &["no timer polls: it has no effect"]),
            (
                settings(0, 200_000, 0),
                &["GRO may hold packets for 200 us"],
            ),
            (
                settings(2, 200_500, 0),
                &["until 2 polls in a row found nothing, and a timer polls every 200.5 us"],
            ),
            (
                settings(2, 200_000, 20_000_000),
                &["are not interrupted", "suspended for 20000 us at most"],
            ),
            (
                settings(0, 0, 20_000_000),
                &[
                    "needs that; `rxsteer napi eth0",
                    "irq-suspend-timeout has no effect",
                ],
            ),
            (
                Settings {
                    threaded: Some(Threaded::On),
                    ..Settings::default()
                },
                &[
                    "interrupts are not deferred",
                    "a kernel thread polls, which",
                ],
            ),
        ] {
            let amount = amounts_to("eth0", &settings);
            assert_eq!(amount.len(), words.len(), "{amount:?}");
            for (amount, words) in amount.iter().zip(words) {
                assert!(amount.contains(words), "not {words:?}: {amount}");
            }
            said.insert(amount);
        }
        assert_eq!(said.len(), 7);
    }

    #[test]
    fn what_instances_have_in_common_is_said_once() {
        let deferred = Settings {
            defer_hard_irqs: Some(2),
            gro_flush_timeout: Some(1000),
            ..Settings::default()
        };
        let ids = |instances: &[Instance]| -> Vec<_> {
            advice("eth0", instances)
                .into_iter()
                .map(|a| a.ids)
                .collect()
        };
        let alike = [1, 2].map(|id| instance(id, deferred));
        assert_eq!(ids(&alike), [Vec::<u32>::new()]);
        let other = [instance(1, deferred), instance(2, Settings::default())];
        assert_eq!(ids(&other), [[1], [2]]);
    }
}
