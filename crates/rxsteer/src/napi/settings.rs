// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer napi --defer-hard-irqs …`: settings of NAPI instances, changed until it is stopped. They
//! are put back whatever happens: a child keeps what was found, and does it when this process has
//! ended, killed or not.

use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::BorrowedFd;

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::host::device::Device;
use crate::host::guardian::{self, Guardian};
use crate::host::netdev::{self, Napi, Settings, Threaded};
use crate::host::setting::Setting;
use crate::napi;

/// The hidden command that is the child.
pub const COMMAND: &str = "put-back-napi";

const NO_BUSY_POLL: &str = "this kernel's NAPI threads don't busy-poll: it needs Linux 6.19";

/// What the child is told.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    /// The device's.
    ifindex: u32,
    /// How its instances were, by id.
    before: Vec<(u32, Settings)>,
    /// What they are set to.
    set: Settings,
}

/// What a device's instances have been set to. When it is dropped, or this process ends otherwise,
/// they are as they were.
pub struct Changed {
    /// For each instance, where the kernel has settings of theirs (6.13, `threaded` 6.17).
    instances: Option<Guardian>,
    /// Files of the whole device, where it has not.
    files: Vec<Setting>,
    /// Held until all is put back: nobody else may take for found what was set here.
    _lock: File,
}

/// Sets the devices' instances until `stop` becomes readable.
///
/// # Errors
/// When there is no such device, it has no NAPI instances, the kernel lacks a setting or refuses a
/// value, or another one sets the same device. All is put back then.
pub fn run(devices: &[String], wanted: &Settings, stop: BorrowedFd<'_>) -> Result<()> {
    let mut changed = Vec::new();
    for name in devices {
        changed.push(Changed::set(&Device::open(name)?, wanted)?);
    }
    info!("until this ends: press Ctrl-C");
    loop {
        match poll(
            &mut [PollFd::new(stop, PollFlags::POLLIN)],
            PollTimeout::NONE,
        ) {
            Ok(_) => break,
            Err(Errno::EINTR) => {}
            Err(e) => return Err(e).context("waiting"),
        }
    }
    for changed in changed {
        changed.put_back()?;
    }
    info!("as before");
    Ok(())
}

impl Changed {
    /// Sets what is wanted, and says what that was. `device.napis` is what the kernel told of the
    /// instances.
    ///
    /// # Errors
    /// As [`run`]'s.
    pub fn set(device: &Device, wanted: &Settings) -> Result<Self> {
        let name = &device.name;
        let path = format!("/sys/class/net/{name}/ifindex");
        let lock = File::open(&path).with_context(|| format!("cannot read {path}"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("another rxsteer sets the NAPI instances of {name}; stop it first")
            }
            Err(TryLockError::Error(e)) => {
                return Err(e).with_context(|| format!("cannot lock {path}"));
            }
        }
        let napis = device.napis.as_deref().unwrap_or_default();
        ensure!(
            device.napis.is_none() || !napis.is_empty(),
            "{}",
            napi::no_instances(name, &device.driver)
        );
        // All instances of a kernel tell the same.
        let told = napis.first().map(|napi| napi.settings).unwrap_or_default();
        let each = wanted.only(&told);
        let mut this = Self {
            instances: None,
            files: Vec::new(),
            _lock: lock.try_clone().context("the lock")?,
        };
        if each != Settings::default() {
            this.instances = Some(set_each(device, napis, &each, lock)?);
        }
        this.set_device_wide(name, &wanted.without(&each))?;
        Ok(this)
    }

    fn set_device_wide(&mut self, name: &str, wanted: &Settings) -> Result<()> {
        ensure!(
            wanted.irq_suspend_timeout.is_none(),
            "this kernel has no irq-suspend-timeout: it needs Linux 6.13"
        );
        // The device's file has off and on only, in later kernels, too.
        ensure!(
            wanted.threaded != Some(Threaded::BusyPoll),
            "{NO_BUSY_POLL}"
        );
        let files = [
            (
                "napi_defer_hard_irqs",
                wanted.defer_hard_irqs.map(u64::from),
            ),
            ("gro_flush_timeout", wanted.gro_flush_timeout),
            ("threaded", wanted.threaded.map(|t| t as u64)),
        ];
        for (file, value) in files {
            if let Some(value) = value {
                let path = format!("/sys/class/net/{name}/{file}");
                let setting = Setting::keep(&path)?;
                setting.set(&value.to_string())?;
                self.files.push(setting);
                info!("{name}, all NAPI instances: {file} {value}");
            }
        }
        Ok(())
    }

    /// Returns when all is as it was.
    ///
    /// # Errors
    /// When something could not be put back; it has been said what.
    pub fn put_back(mut self) -> Result<()> {
        self.files.clear();
        match self.instances.take() {
            Some(mut guardian) => guardian.end(),
            None => Ok(()),
        }
    }
}

/// Sets every instance. The guardian holds the lock, by an output that it does not use.
fn set_each(device: &Device, napis: &[Napi], wanted: &Settings, lock: File) -> Result<Guardian> {
    let name = &device.name;
    let before: Vec<(u32, Settings)> = napis
        .iter()
        .map(|napi| (napi.id, napi.settings.only(wanted)))
        .collect();
    // As it is already: changes nothing, and shows whether it may be changed.
    for (id, before) in &before {
        netdev::set_napi(*id, before).map_err(|e| match e.kind() {
            io::ErrorKind::PermissionDenied => {
                anyhow!("NAPI instances can't be set without CAP_NET_ADMIN: run it as root")
            }
            _ => anyhow!(e).context(format!("NAPI instance {id} of {name} can't be set")),
        })?;
    }
    let mut guardian = Guardian::start(COMMAND, Some(lock))?;
    guardian.tell(&Found {
        ifindex: device.ifindex,
        before: before.clone(),
        set: *wanted,
    })?;
    for (id, before) in &before {
        netdev::set_napi(*id, wanted).map_err(|e| match e.raw_os_error() {
            Some(libc::ERANGE | libc::EINVAL) if wanted.threaded == Some(Threaded::BusyPoll) => {
                anyhow!(NO_BUSY_POLL)
            }
            _ => anyhow!(e).context(format!("cannot set NAPI instance {id} of {name}")),
        })?;
        info!("{name}, NAPI instance {id}: {}", words(before, wanted));
    }
    Ok(guardian)
}

/// The child: reads what was found, waits until nobody is left who could write more, and puts back
/// what nobody else has changed since.
///
/// # Errors
/// When something can't be put back.
pub fn put_back() -> Result<()> {
    let mut found = Found::default();
    guardian::told(|told| found = told)?;
    restore(&found)
}

fn restore(found: &Found) -> Result<()> {
    let mut failed = 0;
    let gone = |e: &anyhow::Error| {
        let cause = e.downcast_ref::<io::Error>();
        cause.and_then(io::Error::raw_os_error) == Some(libc::ENODEV)
    };
    let napis = match netdev::napis(found.ifindex) {
        Err(e) if gone(&e) => return Ok(()),
        napis => napis?.unwrap_or_default(),
    };
    for napi in napis {
        // The driver has made others since.
        let Some((_, before)) = found.before.iter().find(|(id, _)| *id == napi.id) else {
            continue;
        };
        match netdev::set_napi(napi.id, &before.unless_changed(&found.set, &napi.settings)) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {}
            Err(e) => {
                failed += 1;
                tracing::error!("NAPI instance {} is not as before: {e}", napi.id);
            }
        }
    }
    ensure!(failed == 0, "{failed} NAPI instances are not as before");
    Ok(())
}

/// What becomes of what: `defer-hard-irqs 0 -> 2, gro-flush-timeout 0 -> 200000 ns`.
fn words(before: &Settings, now: &Settings) -> String {
    let change = |name, before: Option<String>, now: Option<String>, unit| {
        let (before, now) = (before?, now?);
        Some(format!("{name} {before} -> {now}{unit}"))
    };
    let polls = |s: &Settings| s.defer_hard_irqs.map(|polls| polls.to_string());
    let flush = |s: &Settings| s.gro_flush_timeout.map(|ns| ns.to_string());
    let suspend = |s: &Settings| s.irq_suspend_timeout.map(|ns| ns.to_string());
    let threaded = |s: &Settings| s.threaded.map(|threaded| threaded.to_string());
    let changes = [
        change("defer-hard-irqs", polls(before), polls(now), ""),
        change("gro-flush-timeout", flush(before), flush(now), " ns"),
        change("irq-suspend-timeout", suspend(before), suspend(now), " ns"),
        change("threaded", threaded(before), threaded(now), ""),
    ];
    changes.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::netdev::Threaded;

    #[test]
    fn what_is_changed_is_said_with_its_unit() {
        let found = Settings {
            defer_hard_irqs: Some(0),
            gro_flush_timeout: Some(0),
            irq_suspend_timeout: Some(0),
            threaded: Some(Threaded::Off),
        };
        let wanted = Settings {
            gro_flush_timeout: Some(200_000),
            threaded: Some(Threaded::On),
            ..Settings::default()
        };
        assert_eq!(
            words(&found.only(&wanted), &wanted),
            "gro-flush-timeout 0 -> 200000 ns, threaded off -> on"
        );
        // Somebody else has changed the timeout meanwhile.
        let now = Settings {
            gro_flush_timeout: Some(50_000),
            ..wanted
        };
        let back = found.only(&wanted).unless_changed(&wanted, &now);
        assert_eq!(
            (back.gro_flush_timeout, back.threaded),
            (None, Some(Threaded::Off))
        );
        // Before 6.17 `threaded` is the device's.
        let told = Settings {
            threaded: None,
            ..found
        };
        let each = wanted.only(&told);
        assert_eq!(each.gro_flush_timeout, Some(200_000));
        assert_eq!(each.threaded, None);
        assert_eq!(
            wanted.without(&each),
            Settings {
                threaded: Some(Threaded::On),
                ..Settings::default()
            }
        );
    }
}
