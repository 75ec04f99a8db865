// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices of a data path: those that come later in softirq mode, and the programs on all of them.

use anyhow::{Context, Result, anyhow};

use super::config::DeviceConfig;
use super::hops::Hops;
use super::loaded::Datapath;
use super::objects::Device;
use super::pins::XDP;
use crate::host::device::RxMode;
use crate::host::progress;

impl Datapath {
    /// What devices in softirq mode share.
    pub(super) fn hops(&self) -> Result<&Hops> {
        let hops = self.hops.as_ref();
        hops.context("softirq mode was not prepared")
    }

    /// Adds a device in softirq mode, whose index is the next one. Attaches nothing to it.
    ///
    /// # Errors
    /// When the kernel refuses the program of such devices.
    pub fn add(&mut self, device: DeviceConfig) -> Result<()> {
        let queue_base = self.hops()?.ways.queue_base;
        self.devices.push(Device {
            config: device,
            queue_base,
            attached: None,
            hashed: None,
            loaded: None,
        });
        Ok(())
    }

    /// Forgets a device in softirq mode, and detaches its program; later devices get the indices before
    /// theirs. Skbs on their way to another CPU are still delivered, or vanish if the device is
    /// gone (`hop_settled()` in `bpf/dissector.bpf.c`).
    pub fn remove(&mut self, device: usize) {
        if let Some(hops) = &self.hops {
            hops.forget(&self.trace, self.devices[device].config.ifindex);
        }
        self.devices.remove(device);
    }

    /// The queue of CPU 0 in softirq mode; `None` if no device can be steered in this mode.
    pub fn softirq_queue(&self) -> Option<u32> {
        self.hops.as_ref().map(|hops| hops.ways.queue_base)
    }

    /// Attaches the program to the device with this index in the list given to [`Self::load`], or
    /// by [`Self::add`].
    ///
    /// # Errors
    /// The kernel's error: `EBUSY` if a program is attached already, `EOPNOTSUPP` if the driver has
    /// no native XDP. Another one if the device refuses the program that hashes.
    pub fn attach(&mut self, device: usize) -> Result<()> {
        let device = &mut self.devices[device];
        if let Some(hasher) = &self.hasher {
            let hashed = hasher.attach(device.config.ifindex);
            device.hashed = Some(hashed.map_err(|e| anyhow!("--follow-nat: {e:#}"))?);
        }
        device.attach(self.hops.as_mut(), &self.trace)?;
        if let Some(pins) = &self.pins
            && let Err(e) = device.pin(pins)
        {
            device.attached = None;
            return Err(e);
        }
        Ok(())
    }

    /// Has the kernel ask about a device's packets again, in softirq mode: others may change this setting, and
    /// queues may be new. Returns whether it did not.
    ///
    /// # Errors
    /// When the device is gone, or the setting can't be written.
    pub fn ask_again(&self, device: usize) -> Result<bool> {
        let device = &self.devices[device];
        match &self.hops {
            Some(hops) if device.config.mode == RxMode::Softirq && device.attached.is_some() => {
                hops.ask_again(device.config.ifindex)
            }
            _ => Ok(false),
        }
    }

    /// Makes the kernel's table of flows large enough again, in softirq mode. Returns whether it was not.
    ///
    /// # Errors
    /// When the setting can't be written.
    pub fn enlarge_table(&self) -> Result<bool> {
        self.hops
            .as_ref()
            .map_or(Ok(false), |hops| hops.ways.enlarge_table())
    }

    /// Whether the device's program is attached.
    pub fn is_attached(&self, device: usize) -> bool {
        self.devices[device].attached.is_some()
    }

    /// Detaches every XDP program, and unpins everything. Frames in the backlogs are still delivered.
    ///
    /// # Errors
    /// When a pin can't be removed.
    pub fn detach(&mut self) -> Result<()> {
        let pins = self.pins.take();
        // The kernel detaches at once when the last holder of a link is a process.
        let unpinned = pins.as_ref().map_or(Ok(()), |pins| pins.unpin(XDP));
        let ended = self.hops.as_mut().map_or(Ok(()), Hops::end);
        for device in &mut self.devices {
            progress::made();
            device.attached = None;
            device.hashed = None;
        }
        unpinned?;
        ended?;
        pins.map_or(Ok(()), |pins| pins.remove())
    }

    /// Detaches the program of a device that is gone. Frames in the backlogs are still delivered;
    /// skbs on their way to another CPU vanish.
    ///
    /// # Errors
    /// When a pin can't be removed.
    pub fn give_up(&mut self, device: usize) -> Result<()> {
        let device = &mut self.devices[device];
        let unpinned = match &self.pins {
            None => Ok(()),
            Some(pins) => pins.unpin_device(device.config.ifindex),
        };
        if let Some(hops) = &self.hops {
            hops.forget(&self.trace, device.config.ifindex);
        }
        device.attached = None;
        unpinned
    }
}
