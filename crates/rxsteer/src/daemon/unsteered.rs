// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets that are not steered as they should be, because others have changed their device.

use anyhow::Result;
use tracing::{info, warn};

use super::absent::Absent;
use super::foreign::{Foreign, Frames};
use super::kernel_rps;
use super::more_queues::{self, Queues};
use super::options::{OnKernelRps, Options};
use super::plan::Steered;
use crate::datapath::Datapath;
use crate::host::device::RxMode;

/// What was found at the last look.
pub(super) struct Unsteered {
    pub(super) on_kernel_rps: OnKernelRps,
    pub(super) absent: Absent,
    /// In the order of the devices.
    by_device: Vec<Findings>,
}

#[derive(Default)]
struct Findings {
    foreign: Foreign,
    /// Why new queues can't be steered.
    obstructed: Option<String>,
}

impl Unsteered {
    pub(super) fn new(options: &Options, nr_devices: usize) -> Self {
        let by_device = (0..nr_devices).map(|_| Findings::default()).collect();
        Self {
            on_kernel_rps: options.on_kernel_rps,
            absent: Absent::new(options),
            by_device,
        }
    }

    /// Looks at the devices, and logs what has changed. To be called once a second: no event shows
    /// these changes. Returns whether steering has to start anew, for a device that has more queues,
    /// that is there again, or that has become the port of a bond or is none any more.
    ///
    /// # Errors
    /// When kernel RPS is on for a device, and steering is to end then.
    pub(super) fn look(&mut self, datapath: &Datapath, devices: &mut [Steered]) -> Result<bool> {
        let there = |steered: &Steered| self.absent.why(&steered.device.name).is_none();
        kernel_rps::look(devices.iter_mut().filter(|s| there(s)), self.on_kernel_rps)?;
        let present: Vec<_> = devices.iter().filter(|steered| there(steered)).collect();
        if datapath.enlarge_table().unwrap_or(false) {
            warn!(
                "somebody has made rps_sock_flow_entries smaller than softirq mode needs: it is set again"
            );
        }
        let mut anew = false;
        // The first device in softirq mode counts for all of them.
        let mut softirq = false;
        let looked_at = self.by_device.iter_mut().zip(&*devices);
        for (index, (found, steered)) in looked_at.enumerate() {
            if !there(steered) {
                continue;
            }
            let name = &steered.device.name;
            // A device that is gone has no queues.
            if datapath.ask_again(index).unwrap_or(false) {
                warn!(
                    device = %name,
                    "rps_flow_cnt was not set for each queue of {name}, by which softirq mode steers: it is set again"
                );
            }
            let counts = steered.mode == RxMode::Native || !std::mem::replace(&mut softirq, true);
            if counts && found.foreign.look(frames(datapath, steered)) {
                match found.foreign.report(name, steered.mode) {
                    Some(report) => warn!(device = %name, "{report}"),
                    None => info!(device = %name, "the frames of {name} are steered again"),
                }
            }
            let before = found.obstructed.take();
            match more_queues::look(steered, &present) {
                Queues::Steered => {}
                Queues::More(now) => {
                    let planned = steered.device.rx_queues;
                    info!(device = %name, "{name} has {now} receive queues (before: {planned}): starting anew");
                    anew = true;
                }
                Queues::Obstructed(why) => {
                    if before.as_ref() != Some(&why) {
                        warn!(device = %name, "{why}");
                    }
                    found.obstructed = Some(why);
                }
            }
        }
        anew |= self.absent.look_at_ports(&present);
        Ok(self.absent.back(&present) || anew)
    }

    /// Another device is steered, the last one.
    pub(super) fn added(&mut self) {
        self.by_device.push(Findings::default());
    }

    /// The device with this index is steered no longer.
    pub(super) fn removed(&mut self, index: usize) {
        self.by_device.remove(index);
    }

    /// Why packets of the device with this index are not steered as they should be, in sentences
    /// with remedies.
    pub(super) fn of(&self, index: usize, steered: &Steered) -> Vec<String> {
        if let Some(why) = self.absent.why(&steered.device.name) {
            return vec![why.to_owned()];
        }
        let found = &self.by_device[index];
        let kernel_rps = steered
            .device
            .kernel_rps_on(steered.mode)
            .map(|o| o.to_string());
        let reports = [
            kernel_rps,
            found.obstructed.clone(),
            found.foreign.report(&steered.device.name, steered.mode),
        ];
        reports.into_iter().flatten().collect()
    }
}

/// The frames of a device since attach.
fn frames(datapath: &Datapath, steered: &Steered) -> Frames {
    Frames {
        foreign: datapath.foreign_frames(steered.first_queue),
        received: steered
            .queues()
            .map(|q| datapath.rx_queue(q).nr_received)
            .sum(),
    }
}
