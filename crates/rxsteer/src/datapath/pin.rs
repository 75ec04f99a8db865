// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pinning the loaded data path, and taking over a pinned one (docs/order.md, "Take-over").

use std::mem::offset_of;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use libbpf_rs::MapCore;
use libbpf_rs::skel::Skel;
use tracing::debug;

use super::config::{Config, DeviceConfig};
use super::loaded::{Datapath, is_shared};
use super::mapped::Mapped;
use super::objects::Attached;
use super::pins::{
    Generation, MAPS, PROGRAMS, Pins, RETURNING, SCHEDULER, SOCKETS, TABLES, TRACE, XdpPin,
};
use super::record::Record;
use super::tables;
use crate::host::cpumask::CpuMask;
use crate::host::xdp;
use crate::types::{backlog, backlog_closed, rx_queue};

/// What became of replaced steering.
#[derive(Clone, Copy, Debug)]
pub struct Replaced {
    /// Every flow was INLINE before its program was replaced.
    pub returned: bool,
    /// The counters go on.
    pub carried: bool,
}

impl Datapath {
    /// Pins everything but the XDP programs, which [`Self::attach`] pins as it attaches them. From
    /// then on steering ends by [`Self::detach`] alone.
    ///
    /// # Errors
    /// When the folder is not in a BPF file system, or the kernel refuses.
    pub fn pin(&mut self, folder: &Path) -> Result<()> {
        let mut pins = Generation::create(folder)?;
        for map in self.trace.object().maps() {
            let name = map.name().to_string_lossy().into_owned();
            if is_shared(&name) && self.tables.named(&name).is_none() {
                pins.pin(MAPS, &name, map.as_fd())?;
            }
        }
        for prog in self.trace.object().progs() {
            let name = prog.name().to_string_lossy().into_owned();
            if RETURNING.contains(&&*name) {
                pins.pin(PROGRAMS, &name, prog.as_fd())?;
            }
        }
        for (name, link) in &self.tracepoints {
            pins.pin(TRACE, name, link.as_fd())?;
        }
        self.describe(&mut pins)?;
        self.pins = Some(pins);
        self.pin_watchers()
    }

    /// Whether it is pinned.
    pub fn is_pinned(&self) -> bool {
        self.pins.is_some()
    }

    /// Takes over what is pinned, without a gap: the maps and the attached programs stay as they are.
    ///
    /// # Errors
    /// When something is missing. The pinned steering goes on then.
    pub fn adopt(config: &Config, devices: &[DeviceConfig], mut pins: Pins) -> Result<Self> {
        let mut generation = pins.generations.pop().context("nothing is pinned")?;
        let constants = generation.record()?.constants();
        let config = Config {
            secret: constants.context("no secret is recorded")?.flow_secret,
            ..config.clone()
        };
        let mut datapath = Self::build(&config, devices, Some(&generation))?;
        for link in std::mem::take(&mut generation.links) {
            let of = |d: &&mut super::objects::Device| d.config.ifindex == link.ifindex;
            if let Some(device) = datapath.devices.iter_mut().find(of) {
                device.attached = Some(Attached::Xdp(link.link));
            }
        }
        datapath.forget_requests();
        datapath.pins = Some(generation);
        Ok(datapath)
    }

    /// Replaces pinned steering of whatever version by this one, which is pinned, and steers nothing
    /// yet: returns its flows to INLINE, replaces the programs of its devices, and unpins it.
    ///
    /// # Errors
    /// When pins are missing or unknown, before anything was changed; when the kernel refuses.
    pub fn replace(&mut self, mut old: Pins, patience: Duration) -> Result<Replaced> {
        old.are_sound()?;
        let returned = old.return_inline(patience)?;
        let carried = match &old.steering().collect::<Vec<_>>()[..] {
            [one] => self.carry(one)?,
            _ => false,
        };
        for generation in &mut old.generations {
            for link in std::mem::take(&mut generation.links) {
                self.inherit(generation, link)?;
            }
        }
        old.remove()?;
        Ok(Replaced { returned, carried })
    }

    /// Replaces the program of a link by that of its device, so that the device is never without
    /// one. Unpins the link, and thereby detaches its program, if that can't be done.
    fn inherit(&mut self, from: &Generation, old: XdpPin) -> Result<()> {
        let mut devices = self.devices.iter();
        let device = devices.position(|d| d.config.ifindex == old.ifindex);
        if let (Some(device), Some(pins)) = (device, &self.pins) {
            match xdp::update(&old.link, self.program(device)?) {
                Ok(()) => {
                    from.give(&old, pins)?;
                    self.devices[device].attached = Some(Attached::Xdp(old.link));
                    return Ok(());
                }
                Err(e) => debug!("the program can't be replaced, but attached anew: {e}"),
            }
        }
        from.unpin_link(&old)
    }

    /// Continues the counters of devices that were steered. Their flows are INLINE. Frames that the
    /// old program receives from here on are in no counter.
    fn carry(&self, old: &Generation) -> Result<bool> {
        let record = old.record()?;
        if !record.has_this_layout() || record.nr_cpus != self.nr_cpus {
            return Ok(false);
        }
        let old_queues = Mapped::<rx_queue>::of(&old.map(MAPS, "rx_queues")?)?;
        let old_backlogs = Mapped::<backlog>::of(&old.map(MAPS, "backlogs")?)?;
        for device in &self.devices {
            let config = &device.config;
            let mut recorded = record.devices.iter();
            let Some(before) = recorded.find(|d| d.ifindex == config.ifindex) else {
                continue;
            };
            for queue in 0..config.nr_rx_queues.min(before.nr_rx_queues) {
                let (from, to) = (before.queue_base + queue, device.queue_base + queue);
                let mut accepted = 0;
                for cpu in 0..self.nr_cpus {
                    let b = drained(&old_backlogs.get(from * self.nr_cpus + cpu));
                    accepted += b.tail + b.nr_dropped + b.nr_shed + b.nr_limited;
                    // The mask closes those that it leaves out.
                    let closed = self.closed(to, cpu);
                    let index = to * self.nr_cpus + cpu;
                    self.backlog_counts.set(index, &backlog { closed, ..b });
                }
                let before = old_queues.get(from);
                let now = self.rx_queues.get(to);
                let no_flow: u64 = before.nr_no_flow.iter().sum();
                let continued = rx_queue {
                    // The counter itself was read at another time than the others.
                    nr_received: before.nr_inline + no_flow + accepted,
                    nr_inline: before.nr_inline,
                    nr_no_flow: before.nr_no_flow,
                    nr_rx_hash: before.nr_rx_hash,
                    nr_moves: before.nr_moves,
                    nr_held: before.nr_held,
                    nr_inline_ports: before.nr_inline_ports,
                    ..now
                };
                self.rx_queues.set(to, &continued);
            }
        }
        Ok(true)
    }

    /// Lets flows request backlogs again whose requests an earlier process has taken and not served,
    /// and opens those that it has closed.
    fn forget_requests(&self) {
        let exist: std::collections::BTreeSet<_> = self.backlogs.exist().into_iter().collect();
        for queue in 0..self.nr_queues() {
            for cpu in 0..self.nr_cpus {
                let index = queue * self.nr_cpus + cpu;
                let b = self.backlog_counts.get(index);
                if b.wanted != 0 && !exist.contains(&(queue, cpu)) {
                    let wanted = offset_of!(backlog, wanted);
                    self.backlog_counts.set_field(index, wanted, 0u64);
                }
                for why in [
                    backlog_closed::BACKLOG_IDLE,
                    backlog_closed::BACKLOG_STALLED,
                ] {
                    self.close(queue, cpu, why, false);
                }
            }
        }
    }

    /// CPUs that are offline or have been, while no process looked or just before: their backlogs
    /// have to be drained and created again.
    ///
    /// # Errors
    /// When the online CPUs can't be read.
    pub fn displaced_cpus(&self) -> Result<CpuMask> {
        let displaced = self.backlogs.displaced()?;
        let closed = |cpu: &u32| (0..self.nr_queues()).any(|q| !self.is_open(q, *cpu));
        Ok(displaced
            .iter()
            .chain((0..self.nr_cpus).filter(closed))
            .collect())
    }

    /// Pins the programs that watch sockets and the scheduler, and unpins those from before, if
    /// anything is pinned.
    pub(super) fn pin_watchers(&self) -> Result<()> {
        let Some(pins) = &self.pins else {
            return Ok(());
        };
        let sockets = self.sockets.iter().flat_map(|sockets| &sockets.links);
        let sockets = sockets.map(|(name, link)| (name.as_str(), link.as_fd()));
        pins.repin(SOCKETS, sockets)?;
        let watching = self.scheduler.as_ref().and_then(|s| s.watching.as_ref());
        pins.repin(
            SCHEDULER,
            watching.map(|link| ("on_sched_switch", link.as_fd())),
        )
    }

    /// Pins the tables of flows after their sizes have changed, and writes the record again, if
    /// anything is pinned.
    pub(super) fn pin_tables(&mut self) -> Result<()> {
        let Some(mut pins) = self.pins.take() else {
            return Ok(());
        };
        let described = self.describe(&mut pins);
        self.pins = Some(pins);
        described
    }

    fn describe(&self, pins: &mut Generation) -> Result<()> {
        let table = |name| Some((name, self.tables.named(name)?));
        pins.repin(TABLES, tables::NAMES.into_iter().filter_map(table))?;
        let devices: Vec<_> = self.devices.iter().map(|d| d.config.clone()).collect();
        let (nr_queues, nr_cpus) = (self.nr_queues(), self.nr_cpus);
        pins.write(Record::new(&self.config, &devices, nr_queues, nr_cpus)?)
    }
}

impl Pins {
    /// Why a data path with this configuration can't adopt what is pinned, in words; `None` if it
    /// can.
    ///
    /// # Errors
    /// When the number of CPUs can't be read.
    pub fn difference(&self, config: &Config, devices: &[DeviceConfig]) -> Result<Option<String>> {
        let [generation] = &self.generations[..] else {
            return Ok(Some("an earlier take-over was not completed".to_owned()));
        };
        let nr_cpus = crate::host::topology::Topology::host().nr_cpu_ids()?;
        let nr_queues = devices.iter().map(|d| d.nr_rx_queues).sum::<u32>().max(1);
        let record = Record::new(config, devices, nr_queues, nr_cpus)?;
        let difference = generation.record()?.difference(&record);
        let whole = || generation.is_whole().err().map(|e| format!("{e:#}"));
        Ok(difference.or_else(whole))
    }
}

/// The counters of a backlog in a new cpumap, without frames: those that a late thread has not
/// dequeued yet count as dequeued.
fn drained(b: &backlog) -> backlog {
    backlog {
        tail: b.tail,
        dequeued: b.tail - b.nr_lost - b.nr_vanished,
        nr_dropped: b.nr_dropped,
        nr_shed: b.nr_shed,
        nr_lost: b.nr_lost,
        nr_decided: b.nr_decided,
        nr_limited: b.nr_limited,
        nr_vanished: b.nr_vanished,
        nr_unbuilt: b.nr_unbuilt,
        ..Default::default()
    }
}
