// SPDX-License-Identifier: MIT OR Apache-2.0
//! Changes of what is steered and how, while packets arrive: by `rxsteer set`, and by a reload of the
//! configuration. No packet is overtaken: a flow moves only by the rule of order.

use anyhow::{Result, bail, ensure};
use tracing::info;

use super::following::can_follow;
use super::options::{Options, RpsCpus, TABLE_MAX};
use super::plan::{QueueMask, find, number, queue_name};
use super::steering::{PATIENCE, Steering};
use crate::api::set::Change;
use crate::datapath::policy::Policy;
use crate::datapath::tables::rounded;
use crate::host::device::RxMode;

/// The settings after a change.
struct Wish {
    policy: Policy,
    /// By index of the queue, those that change.
    masks: Vec<(u32, QueueMask)>,
    rps_sock_flow_entries: u32,
    rps_flow_cnt: u32,
}

impl Steering {
    /// Makes a change; returns it in lines, and the applications that can't be followed.
    ///
    /// # Errors
    /// When it is not possible; nothing has changed then.
    pub(super) fn set(&mut self, change: &Change) -> Result<Vec<String>> {
        if change.device.is_some() {
            find(&self.devices, change.device.as_deref())?;
        }
        let policy = change.policy.unwrap_or(self.policy);
        if policy == Policy::OFF && change.rps_cpus.is_some() {
            bail!("under policy off no CPUs are steered to: set another --policy as well");
        }
        let config = self.datapath.config();
        self.make(Wish {
            policy,
            masks: self.masks(change)?,
            rps_sock_flow_entries: change
                .rps_sock_flow_entries
                .unwrap_or(config.rps_sock_flow_entries),
            rps_flow_cnt: change.rps_flow_cnt.unwrap_or(config.rps_flow_cnt),
        })
    }

    /// Steers by the options that need no new start, as [`Self::set`].
    ///
    /// # Errors
    /// When that is not possible; nothing has changed then.
    pub(super) fn adopt(&mut self, options: &Options) -> Result<Vec<String>> {
        let softirq = self.datapath.softirq_queue().is_some();
        let masks = number(&mut self.devices, softirq, options)?;
        let masks = (0..).zip(masks).zip(&self.masks);
        let changed = masks.filter(|((_, now), before)| now.wish() != before.wish());
        let lines = self.make(Wish {
            policy: options.policy,
            masks: changed.map(|(mask, _)| mask).collect(),
            rps_sock_flow_entries: options.rps_sock_flow_entries,
            rps_flow_cnt: options.rps_flow_cnt,
        })?;
        self.unsteered.on_kernel_rps = options.on_kernel_rps;
        Ok(lines)
    }

    /// The change is made completely or not at all: steps that may fail come first.
    fn make(&mut self, wish: Wish) -> Result<Vec<String>> {
        if wish.policy.follows() {
            let config = self.datapath.config();
            can_follow(config.hash, config.follow_nat)?;
        }
        let mut lines = Vec::new();
        self.resize(&wish, &mut lines)?;
        for (queue, cpus) in wish.masks {
            let name = self.name_of(queue);
            let before = std::mem::replace(&mut self.masks[queue as usize], cpus.clone());
            let [now, before] = [&cpus, &before].map(|mask| mask.cpus.intersect(&self.online));
            let offline = cpus.cpus.without(&now);
            let later = match offline.is_empty() {
                true => String::new(),
                false => format!(", {offline} when online"),
            };
            lines.push(format!("{name}: CPUs {now}{later} (before: {before})"));
        }
        if wish.policy != self.policy {
            lines.push(format!("policy {} (before: {})", wish.policy, self.policy));
            self.policy = wish.policy;
        }
        for line in &lines {
            info!("{line}");
        }
        lines.extend(self.apply()?);
        Ok(lines)
    }

    /// The name of a queue, by its index.
    fn name_of(&self, queue: u32) -> String {
        let softirq = self
            .datapath
            .softirq_queue()
            .filter(|first| queue >= *first);
        if let Some(first) = softirq {
            return queue_name(RxMode::Softirq, "", queue - first);
        }
        let mut devices = self.devices.iter();
        devices
            .find(|steered| steered.queues().contains(&queue))
            .map(|steered| steered.queue_name(queue - steered.first_queue))
            .unwrap_or_default()
    }

    /// The masks in a change, by index of the queue.
    fn masks(&self, change: &Change) -> Result<Vec<(u32, QueueMask)>> {
        let Some(rps_cpus) = &change.rps_cpus else {
            return Ok(Vec::new());
        };
        let rps_cpus: RpsCpus = rps_cpus.parse()?;
        let steered = &self.devices[find(&self.devices, change.device.as_deref())?];
        let queues: Vec<u32> = match change.queue {
            Some(queue) => vec![queue],
            None => (0..steered.device.rx_queues).collect(),
        };
        let mask = |queue| {
            let index = steered.has_queue(queue)?;
            Ok((index, steered.cpus_of(queue, &rps_cpus, false)?))
        };
        queues.into_iter().map(mask).collect()
    }

    fn resize(&mut self, wish: &Wish, lines: &mut Vec<String>) -> Result<()> {
        let before = self.datapath.config().clone();
        let entries = (before.rps_sock_flow_entries, wish.rps_sock_flow_entries);
        let slots = (before.rps_flow_cnt, wish.rps_flow_cnt);
        ensure!(
            entries.1.max(slots.1) <= TABLE_MAX,
            "a table has {TABLE_MAX} entries at most"
        );
        // Compared after rounding: tables of equal size need not be replaced.
        if [entries, slots].map(|(before, now)| rounded(before) == rounded(now)) == [true; 2] {
            return Ok(());
        }
        self.look_for_gone()?;
        if let Err(e) = self.datapath.resize(entries.1, slots.1, PATIENCE) {
            self.apply()?;
            return Err(e);
        }
        for (name, (before, now)) in [("rps_sock_flow_entries", entries), ("rps_flow_cnt", slots)] {
            if now != before {
                lines.push(format!("{name} {} (before: {before})", rounded(now)));
            }
        }
        Ok(())
    }
}
