// SPDX-License-Identifier: MIT OR Apache-2.0
//! Masks selected by `auto` follow the interrupts of their queues.

use anyhow::Result;
use tracing::info;

use super::plan::{QueueMask, Steered};
use crate::host::auto::AutoMask;
use crate::host::device::RxMode;
use crate::host::netdev;
use crate::host::topology::Topology;

/// Most queues looked at in a call. If the driver does not report its interrupts, each look reads
/// `/proc/interrupts`, which takes milliseconds on hosts with many CPUs.
const QUEUES: usize = 4;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct AutoMasks {
    /// The first queue to look at next, of all that have such a mask.
    next: usize,
}

impl AutoMasks {
    /// Looks at the next few queues, and changes the masks of those whose interrupts have moved.
    /// Returns whether one has changed. To be called now and then: no event shows that an interrupt
    /// moves.
    ///
    /// # Errors
    /// When `/sys` can't be read.
    pub(super) fn follow(
        &mut self,
        devices: &mut [Steered],
        masks: &mut [QueueMask],
    ) -> Result<bool> {
        let topology = Topology::host();
        let by_interrupt = devices.iter().enumerate();
        let by_interrupt = by_interrupt.filter(|(_, steered)| steered.mode != RxMode::Softirq);
        let queues: Vec<_> = by_interrupt
            .flat_map(|(index, steered)| steered.queues().map(move |queue| (index, queue)))
            .filter(|(_, queue)| masks[*queue as usize].auto.is_some())
            .collect();
        let mut changed = false;
        let mut asked = None;
        for number in 0..queues.len().min(QUEUES) {
            let (index, queue) = queues[(self.next + number) % queues.len()];
            let steered = &mut devices[index];
            if asked != Some(index) {
                asked = Some(index);
                // A device that is gone, or that restarts, has no instances now.
                steered.device.napis = netdev::napis(steered.device.ifindex).unwrap_or_default();
            }
            let number = queue - steered.first_queue;
            let cpu = steered.device.interrupt_cpu(&topology, number);
            let mask = &mut masks[queue as usize];
            let Some(auto) = &mask.auto else { continue };
            if let Some(now) = auto.follow(&topology, cpu)? {
                say(&steered.queue_name(number), auto, &now);
                changed |= now.cpus != auto.cpus;
                *mask = QueueMask::from(now);
            }
        }
        self.next = self.next.wrapping_add(QUEUES);
        Ok(changed)
    }
}

fn say(queue: &str, before: &AutoMask, now: &AutoMask) {
    info!(
        "{queue}: CPUs {} (before: {}): {now}",
        now.cpus, before.cpus
    );
}
