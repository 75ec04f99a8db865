// SPDX-License-Identifier: MIT OR Apache-2.0
//! All that moves meanwhile.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use rxsteer::api::client;
use rxsteer::api::set::Change;
use rxsteer::api::status::Queue;
use rxsteer::daemon::options::Options;
use rxsteer::datapath::policy::Policy;
use rxsteer::host::cpumask::CpuMask;
use rxsteer::host::setting::Setting;

use super::case::Case;
use super::testbed::INTERRUPT_CPU;
use crate::bench::setup::mode::Active;
use crate::lab::generator::Generator;
use crate::lab::hog::Hog;
use crate::lab::link::Link;
use crate::lab::nic::Nic;

/// For how long a CPU does nothing else, before a change and after it.
pub(super) const HOG: Duration = Duration::from_millis(2);

/// Steps between two restarts, or two changes of a CPU: both take longer than a step.
pub(super) const REST: u64 = 8;

/// One after the other.
pub(super) const POLICIES: [Policy; 4] = [
    Policy::ADAPTIVE,
    Policy::RPS,
    Policy {
        idle: true,
        ..Policy::RFS
    },
    Policy::RFS,
];

/// What keeps everything moving.
pub(super) struct Storm<'a> {
    pub(super) case: Case,
    pub(super) link: &'a Link,
    pub(super) nic: Option<Nic>,
    pub(super) online: &'a CpuMask,
    pub(super) options: &'a Options,
    /// Whether the last CPU is online, if that is to change.
    pub(super) hotplug: Option<Setting>,
    pub(super) is_offline: bool,
    pub(super) step: u64,
    pub(super) events: u64,
    /// Of those that were stopped before their end.
    pub(super) moves_before: u64,
    pub(super) held_before: u64,
}

impl<'a> Storm<'a> {
    pub(super) fn new(
        case: Case,
        link: &'a Link,
        nic: Option<Nic>,
        online: &'a CpuMask,
        options: &'a Options,
    ) -> Result<Self> {
        let last = online.iter().last().context("no CPU is online")?;
        let hotplug = (case == Case::Hotplug)
            .then(|| Setting::keep(&format!("/sys/devices/system/cpu/cpu{last}/online")));
        Ok(Self {
            case,
            link,
            nic,
            online,
            options,
            hotplug: hotplug.transpose()?,
            is_offline: false,
            step: 0,
            events: 0,
            moves_before: 0,
            held_before: 0,
        })
    }

    /// The next step; rxsteer may be another afterwards.
    pub(super) fn step(
        &mut self,
        mut active: Active<'a>,
        generator: &Generator,
    ) -> Result<Active<'a>> {
        let dut = &self.link.dut;
        let online = self.online_now();
        let masks = masks(&online);
        let mask = &masks[self.step as usize % masks.len()];
        // Each CPU with each mask: what waits matters where it is left.
        let hog = self.step as usize + self.step as usize / masks.len();
        let hog = online.iter().nth(hog % online.len());
        self.step += 1;
        // The only CPU is everybody's.
        let hog = hog.filter(|_| online.len() > 1).map(Hog::new).transpose()?;
        sleep(HOG);
        dut.netns
            .run(|| client::set(Change::rps_cpus(&dut.name, None, &mask.to_string())))?;
        sleep(HOG);
        drop(hog);
        if matches!(self.case, Case::Irq | Case::Softirq) {
            let next = self.step as usize % self.online.len();
            let next = self.online.iter().nth(next).context("no CPU is online")?;
            match &mut self.nic {
                Some(nic) => nic.move_to(0, next)?,
                None => generator.move_to(next)?,
            }
            self.events += 1;
        }
        if !self.step.is_multiple_of(REST) {
            return Ok(active);
        }
        if self.case == Case::Policies {
            let policy = POLICIES[self.events as usize % POLICIES.len()];
            let change = Change {
                policy: Some(policy),
                ..Change::default()
            };
            dut.netns.run(|| client::set(change))?;
            self.events += 1;
        }
        if let Some(hotplug) = &self.hotplug {
            hotplug.set(if self.is_offline { "1" } else { "0" })?;
            self.is_offline = !self.is_offline;
            self.events += 1;
        }
        if self.case == Case::Restart {
            let queue = queue(&active)?;
            self.moves_before += queue.moves;
            self.held_before += queue.held;
            active.stop()?;
            active = Active::steer(&self.link.dut, self.options.clone())?;
            self.events += 1;
        }
        Ok(active)
    }

    pub(super) fn online_now(&self) -> CpuMask {
        let last = self.online.iter().last();
        let offline = last.filter(|_| self.is_offline);
        self.online.without(&CpuMask::from_iter(offline))
    }
}

/// All CPUs, all but the interrupt's, and each alone.
pub(super) fn masks(online: &CpuMask) -> Vec<CpuMask> {
    let others = online.without(&CpuMask::from_iter([INTERRUPT_CPU]));
    let mut masks = vec![online.clone(), others];
    masks.extend(online.iter().map(|cpu| CpuMask::from_iter([cpu])));
    masks.retain(|mask| !mask.is_empty());
    masks
}

/// rxsteer's account of the only queue.
pub(super) fn queue(active: &Active<'_>) -> Result<Queue> {
    let mut status = active.status()?.context("rxsteer keeps account")?;
    let queues = &mut status.devices[0].queues;
    Ok(std::mem::take(&mut queues[0]))
}
