// SPDX-License-Identifier: MIT OR Apache-2.0
//! Temporary settings of NAPI instances: `rxsteer napi --defer-hard-irqs …`. A child process
//! restores the previous settings when this process ends, also after SIGKILL.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::host::device::Device;
use crate::host::guardian::{self, Guardian};
use crate::host::left::put_back_left;
use crate::host::lock;
use crate::host::netdev::{self, Napi, Settings, Threaded};
use crate::host::netns;
use crate::host::setting::Setting;
use crate::host::wait::readable;
use crate::napi;

/// The hidden command that runs [`put_back`].
pub const COMMAND: &str = "put-back-napi";

const NO_BUSY_POLL: &str = "this kernel's NAPI threads don't busy-poll: it needs Linux 6.19";

/// The message to the child.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    /// Interface index.
    ifindex: u32,
    /// Previous settings of the instances, by id.
    before: Vec<(u32, Settings)>,
    /// The settings made on all instances.
    set: Settings,
}

/// The settings made on a device's instances; restored on drop or when the process ends.
pub struct Changed {
    /// Restores settings per instance (6.13, `threaded` 6.17), if any were made.
    instances: Option<Guardian>,
    /// Files of the whole device, for settings that the kernel doesn't have per instance.
    files: Vec<Setting>,
    /// Held until all is restored: no other rxsteer may take these settings for the previous ones.
    _lock: File,
}

/// Changes the devices' instances until `stop` becomes readable, then restores them.
///
/// # Errors
/// When there is no such device, it has no NAPI instances, the kernel lacks a setting or refuses a
/// value, or another rxsteer sets the same device. All changes are restored then.
pub fn run(devices: &[String], wanted: &Settings, stop: BorrowedFd<'_>) -> Result<()> {
    put_back_left();
    let mut changed = Vec::new();
    for name in devices {
        changed.push(Changed::set(&Device::open(name)?, wanted)?);
    }
    info!("until this ends: press Ctrl-C");
    while !readable(&[stop], None)?[0] {}
    for changed in changed {
        changed.put_back()?;
    }
    info!("as before");
    Ok(())
}

impl Changed {
    /// Makes the settings `wanted` on `device.napis`, and logs the previous ones.
    ///
    /// # Errors
    /// As [`run`]'s.
    pub fn set(device: &Device, wanted: &Settings) -> Result<Self> {
        let name = &device.name;
        let lock = format!("napi {} {}", netns::inode()?, device.ifindex);
        let Some(lock) = lock::try_take(&lock)? else {
            bail!("another rxsteer sets the NAPI instances of {name}; stop it first")
        };
        let napis = device.napis.as_deref().unwrap_or_default();
        ensure!(
            device.napis.is_none() || !napis.is_empty(),
            "{}",
            napi::no_instances(name, &device.driver)
        );
        // All instances have the same set of settings: it depends on the kernel only.
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
        // The device's file accepts off and on only, also on later kernels.
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
                let setting = Setting::keep_recorded(vec![path], "`rxsteer napi`")?;
                setting.set(&value.to_string())?;
                self.files.push(setting);
                info!("{name}, all NAPI instances: {file} {value}");
            }
        }
        Ok(())
    }

    /// Restores all settings.
    ///
    /// # Errors
    /// When something could not be restored; the log says what.
    pub fn put_back(mut self) -> Result<()> {
        self.files.clear();
        match self.instances.take() {
            Some(mut guardian) => guardian.end(),
            None => Ok(()),
        }
    }
}

/// Sets every instance. The child holds `lock` through its unused standard output.
fn set_each(device: &Device, napis: &[Napi], wanted: &Settings, lock: File) -> Result<Guardian> {
    let name = &device.name;
    let before: Vec<(u32, Settings)> = napis
        .iter()
        .map(|napi| (napi.id, napi.settings.only(wanted)))
        .collect();
    // Writing the present values changes nothing, and fails where settings can't be made.
    for (id, before) in &before {
        netdev::set_napi(*id, before).map_err(|e| match e.kind() {
            io::ErrorKind::PermissionDenied => {
                anyhow!("NAPI instances can't be set without CAP_NET_ADMIN: run it as root")
            }
            _ => anyhow!(e).context(format!("NAPI instance {id} of {name} can't be set")),
        })?;
    }
    let what = format!("set by `rxsteer napi`: NAPI instances of {name}");
    let mut guardian = Guardian::recorded(COMMAND, Some(lock), &what)?;
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

/// Runs in the child: once the parent ends, restores settings not changed by others since.
///
/// # Errors
/// When something can't be restored.
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
        // The driver has created new instances since.
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

/// The changes in words: `defer-hard-irqs 0 -> 2, gro-flush-timeout 0 -> 200000 ns`.
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
    fn changes_are_printed_with_units() {
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
        // Another process has changed the timeout meanwhile.
        let now = Settings {
            gro_flush_timeout: Some(50_000),
            ..wanted
        };
        let back = found.only(&wanted).unless_changed(&wanted, &now);
        assert_eq!(
            (back.gro_flush_timeout, back.threaded),
            (None, Some(Threaded::Off))
        );
        // Before 6.17 `threaded` is a setting of the device.
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
