// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer advise`: whether steering would help this host, by how much, and with which command. It
//! changes nothing, except by `--trial`.

pub mod asked;
pub mod prediction;
mod run;
mod trial;
pub mod tunnels;
pub mod watch;
pub mod words;

use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use clap::ValueEnum;

use self::asked::{Asked, Stopped};
use self::prediction::Facts;
use self::trial::{Trial, trial};
use self::tunnels::Kind;
use self::watch::{Seen, watch};
use self::words::Advice;
use super::program::{end_with_the_reader, print_answer, stop_signals};
use super::value::seconds;
use crate::api::client;
use crate::daemon::options::{Mode, RpsCpus, Tunnel, device_name};
use crate::host::caps;
use crate::host::device::{self, Device, RxMode};
use crate::host::lower::bond_ports;
use crate::host::shell::quoted;
use crate::host::wait::readable;

/// A tunnel with this share of the packets is worth a second look, at the flows in it.
const HIDES: f64 = 0.1;

/// `--tunnels` helps if the busiest flow inside has less than this of the busiest tunnel's share.
const SPREADS: f64 = 0.8;

/// Options of `rxsteer advise`.
#[derive(Debug, Args)]
pub struct AdviseArgs {
    /// Network devices, for example eth0; without, network cards that are up, or on a host without
    /// any all devices that are up, but for lo
    #[arg(value_name = "DEVICE", value_parser = device_name)]
    pub devices: Vec<String>,

    /// How long to watch. A second time as long follows if tunnels hide the flows, or if native mode
    /// promises more
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "10")]
    pub seconds: Duration,

    /// Measure instead: steer for this time, and don't, in nine turns. Refused while rxsteer runs
    #[arg(long, value_name = "SECONDS", value_parser = seconds,
          conflicts_with_all = ["seconds", "no_attach"])]
    pub trial: Option<Duration>,

    /// CPUs that may process packets, as for `rxsteer run`
    #[arg(long, value_name = "CPUS", default_value = "auto")]
    pub rps_cpus: RpsCpus,

    /// Where packets would be steered, as for `rxsteer run`
    #[arg(long, value_enum, default_value_t)]
    pub mode: Mode,

    /// Attach no program: read /proc and /sys alone, which don't show the flows
    #[arg(long)]
    pub no_attach: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl AdviseArgs {
    pub(super) fn run(&self) -> Result<ExitCode> {
        end_with_the_reader()?;
        let signals = stop_signals()?;
        let pause = |time| match readable(&[signals.as_fd()], Some(time))?[0] {
            true => Err(Stopped.into()),
            false => Ok(()),
        };
        let asked = Asked {
            time: self.trial.unwrap_or(self.seconds),
            cpus: &self.rps_cpus,
            mode: self.mode,
            attach: !self.no_attach,
            pause: &pause,
        };
        match self.trial {
            Some(_) => {
                let devices = unsteered(&self.devices, &asked)?;
                print_answer(self.json, &trial(&devices, &asked)?, Trial::render)?;
            }
            None => print_answer(self.json, &advise(&self.devices, &asked)?, words::render)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The named devices, or the default ones ([`AdviseArgs::devices`]).
///
/// # Errors
/// When a device does not exist; while rxsteer runs in this network namespace; without its rights.
fn unsteered(names: &[String], asked: &Asked<'_>) -> Result<Vec<Device>> {
    let devices = devices(names)?;
    if let Ok(status) = client::status() {
        bail!(
            "rxsteer is running in this network namespace already (process {}): `rxsteer status` \
             shows what it does; stop it to be told what it gains",
            status.pid
        );
    }
    match caps::missing().first() {
        Some(missing) if asked.attach => {
            bail!("{missing}; or watch without a dry run, by --no-attach")
        }
        _ => Ok(devices),
    }
}

/// Watches the named devices, or the default ones ([`AdviseArgs::devices`]), and predicts.
///
/// # Errors
/// When a device does not exist, with a list of devices; when rxsteer runs in this network namespace
/// already; [`Stopped`].
pub fn advise(names: &[String], asked: &Asked<'_>) -> Result<Advice> {
    let devices = unsteered(names, asked)?;
    let (watched, seen) = watch_as_steered(asked, &devices)?;
    let hidden = hidden(&seen);
    let inside = match hidden.is_empty() {
        true => None,
        false => watch(&watched, &devices, &hidden)?.flows,
    };
    let inside = inside.filter(|inside| {
        let outer = seen.flows.as_ref().map_or(1.0, |flows| flows.busiest_share);
        inside.busiest_share < SPREADS * outer
    });
    let verdict = seen.facts(inside.as_ref()).verdict();
    let tunnels = inside.as_ref().map_or(&[][..], |_| &hidden[..]);
    let command = verdict.is_yes().then(|| command(&seen, &watched, tunnels));
    Ok(Advice {
        ratio: verdict.ratio(),
        sentence: words::sentence(&seen, inside.as_ref(), &verdict),
        seen,
        inside,
        verdict,
        command,
    })
}

/// Native mode is advised if it promises so many times what softirq mode does.
const NATIVE_GAIN: f64 = 1.05;

/// Watches as `--mode auto` steers, and natively if that promises more and loses nothing. The mode is
/// returned with what was seen.
fn watch_as_steered<'a>(asked: &Asked<'a>, devices: &[Device]) -> Result<(Asked<'a>, Seen)> {
    let seen = watch(asked, devices, &[])?;
    let facts = seen.facts(None);
    let least = NATIVE_GAIN * facts.verdict().ratio();
    let promises = |facts: Facts| facts.verdict().ratio() >= least;
    let native = Facts {
        mode: RxMode::Native,
        ..facts
    };
    if asked.mode == Mode::Auto
        && devices.iter().all(|d| d.objection_to_native().is_none())
        && promises(native)
    {
        let natively = Asked {
            mode: Mode::Native,
            ..*asked
        };
        let native = watch(&natively, devices, &[])?;
        if native.flows.is_some() && promises(native.facts(None)) {
            return Ok((natively, native));
        }
    }
    Ok((*asked, seen))
}

/// The devices to watch; of a bond, its ports.
fn devices(names: &[String]) -> Result<Vec<Device>> {
    if names.is_empty() {
        let all = device::names()?;
        // A device may go meanwhile.
        let all = all.iter().filter_map(|name| Device::open(name).ok());
        let up: Vec<Device> = all.filter(|d| d.up && d.name != "lo").collect();
        let cards: Vec<Device> = up.iter().filter(|d| d.hardware).cloned().collect();
        return match (cards.is_empty(), up.is_empty()) {
            (false, _) => Ok(cards),
            (true, false) => Ok(up),
            (true, true) => {
                bail!("no network device is up here but lo: `ip -brief link` lists all")
            }
        };
    }
    let names = names.iter().flat_map(|name| match bond_ports(name) {
        Some(ports) => ports,
        None => vec![name.clone()],
    });
    names.map(|name| Device::open(&name)).collect()
}

/// Tunnels into which `--tunnels` looks, if the busiest flow is one that has many packets.
fn hidden(seen: &Seen) -> Vec<Tunnel> {
    let Some(flows) = &seen.flows else {
        return Vec::new();
    };
    if flows.busiest_share < HIDES || flows.busiest_tunnel.and_then(Kind::option).is_none() {
        return Vec::new();
    }
    let many = flows.tunnels.iter().filter(|(_, share)| **share >= HIDES);
    many.filter_map(|(kind, _)| kind.option()).collect()
}

/// The command that steers the devices that receive.
fn command(seen: &Seen, asked: &Asked<'_>, tunnels: &[Tunnel]) -> String {
    /// Devices with less than this of the packets are left out.
    const RECEIVES: f64 = 0.05;
    let all: f64 = seen.devices.iter().map(|d| d.packets_per_second).sum();
    let receive = |d: &&watch::Watched| d.packets_per_second >= RECEIVES * all;
    let devices = seen.devices.iter().filter(receive);
    let mut words = vec!["rxsteer run".to_owned()];
    words.extend(devices.map(|watched| quoted(&watched.device)));
    if asked.mode != Mode::Auto
        && let Some(mode) = asked.mode.to_possible_value()
    {
        words.push(format!("--mode {}", mode.get_name()));
    }
    if let RpsCpus::Mask(mask) = asked.cpus {
        words.push(format!("--rps-cpus {mask}"));
    }
    let names: Vec<String> = tunnels
        .iter()
        .filter_map(|tunnel| Some(tunnel.to_possible_value()?.get_name().to_owned()))
        .collect();
    if !names.is_empty() {
        words.push(format!("--tunnels {}", names.join(",")));
    }
    words.join(" ")
}
