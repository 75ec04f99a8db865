// SPDX-License-Identifier: MIT OR Apache-2.0
//! Changes during the traffic.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use rxsteer::api::client;
use rxsteer::api::set::Change;
use rxsteer::api::status::Queue;
use rxsteer::daemon::options::{Mode, Options};
use rxsteer::datapath::policy::Policy;
use rxsteer::host::cpumask::CpuMask;
use rxsteer::host::setting::Setting;

use super::case::Case;
use super::testbed::INTERRUPT_CPU;
use crate::bench::setup::mode::Active;
use crate::lab::generator::Generator;
use crate::lab::hog::Hog;
use crate::lab::link::End;
use crate::lab::nic::Nic;
use crate::lab::tun::Tunnel;

/// Time that a CPU is kept busy, before a change of the mask and after it.
pub(super) const HOG: Duration = Duration::from_millis(2);

/// Steps between restarts, and between changes of a CPU's state: both take longer than a step.
pub(super) const REST: u64 = 8;

/// In this order.
pub(super) const POLICIES: [Policy; 4] = [
    Policy::ADAPTIVE,
    Policy::RPS,
    Policy {
        idle: true,
        ..Policy::RFS
    },
    Policy::RFS,
];

/// State of the changes.
pub(super) struct Storm<'a> {
    pub(super) case: Case,
    /// The steered device.
    pub(super) steered: &'a End,
    pub(super) nic: Option<Nic>,
    /// Of which it is the second device.
    pub(super) tunnel: Option<&'a Tunnel>,
    pub(super) online: &'a CpuMask,
    pub(super) options: &'a Options,
    /// State file of the last CPU, if the case changes it.
    pub(super) hotplug: Option<Setting>,
    pub(super) is_offline: bool,
    pub(super) step: u64,
    pub(super) events: u64,
    /// Sum over instances of rxsteer that were stopped.
    pub(super) moves_before: u64,
    pub(super) held_before: u64,
}

impl<'a> Storm<'a> {
    pub(super) fn new(
        case: Case,
        steered: &'a End,
        nic: Option<Nic>,
        tunnel: Option<&'a Tunnel>,
        online: &'a CpuMask,
        options: &'a Options,
    ) -> Result<Self> {
        let last = online.iter().last().context("no CPU is online")?;
        let hotplug = (case == Case::Hotplug)
            .then(|| Setting::keep(&format!("/sys/devices/system/cpu/cpu{last}/online")));
        Ok(Self {
            case,
            steered,
            nic,
            tunnel,
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

    /// Performs a step; returns the running rxsteer, which may be a new one.
    pub(super) fn step(
        &mut self,
        mut active: Active<'a>,
        generator: Option<&Generator>,
    ) -> Result<Active<'a>> {
        let steered = self.steered;
        let online = self.online_now();
        let masks = masks(&online);
        let mask = &masks[self.step as usize % masks.len()];
        // Combines each CPU with each mask.
        let hog = self.step as usize + self.step as usize / masks.len();
        let hog = online.iter().nth(hog % online.len());
        self.step += 1;
        // Frames wait for a thread, skbs for softirqs.
        let keep_busy = match self.options.mode {
            Mode::Softirq => Hog::softirqs,
            _ => Hog::new,
        };
        // Not if it is the only CPU.
        let hog = hog
            .filter(|_| online.len() > 1)
            .map(keep_busy)
            .transpose()?;
        sleep(HOG);
        if !self.case.is_steady() {
            steered
                .netns
                .run(|| client::set(Change::rps_cpus(&steered.name, None, &mask.to_string())))?;
        }
        if matches!(self.case, Case::Irq | Case::Softirq | Case::Tun) {
            let next = self.step as usize % self.online.len();
            let next = self.online.iter().nth(next).context("no CPU is online")?;
            match (self.tunnel, &mut self.nic, generator) {
                (Some(tunnel), ..) => tunnel.move_to(next)?,
                (None, Some(nic), _) => nic.move_to(0, next)?,
                (None, None, Some(generator)) => generator.move_to(next)?,
                (None, None, None) => {}
            }
            self.events += 1;
        }
        sleep(HOG);
        drop(hog);
        if !self.step.is_multiple_of(REST) {
            return Ok(active);
        }
        if self.case == Case::Policies {
            let policy = POLICIES[self.events as usize % POLICIES.len()];
            let change = Change {
                policy: Some(policy),
                ..Change::default()
            };
            steered.netns.run(|| client::set(change))?;
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
            active = Active::steer(steered, self.options.clone())?;
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

/// All CPUs, all but the interrupt's, and each CPU alone.
pub(super) fn masks(online: &CpuMask) -> Vec<CpuMask> {
    let others = online.without(&CpuMask::from_iter([INTERRUPT_CPU]));
    let mut masks = vec![online.clone(), others];
    masks.extend(online.iter().map(|cpu| CpuMask::from_iter([cpu])));
    masks.retain(|mask| !mask.is_empty());
    masks
}

/// rxsteer's counters of the device: of its only queue, or in softirq mode the sum over the CPUs that
/// receive.
pub(super) fn queue(active: &Active<'_>) -> Result<Queue> {
    let status = active.status()?.context("rxsteer keeps account")?;
    let mut sum = Queue::default();
    for queue in &status.devices[0].queues {
        sum.received += queue.received;
        sum.inline += queue.inline;
        sum.sums += &queue.sums;
        sum.no_flow_truncated += queue.no_flow_truncated;
        sum.no_flow_unknown += queue.no_flow_unknown;
        sum.moves += queue.moves;
        sum.held += queue.held;
    }
    Ok(sum)
}
