// SPDX-License-Identifier: MIT OR Apache-2.0
//! Observes the order in which a device hands a generator's frames to the stack, before anything
//! else can reorder them.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result};
use libbpf_rs::{TC_INGRESS, TcHookBuilder};

use super::frame::Frames;
use super::link::End;
use super::programs;
use crate::lab_skel::LabSkel;
use crate::lab_skel::types::bss;

/// Attaches a program at a device's tc ingress until the device is removed.
pub(super) fn at_ingress(end: &End, program: BorrowedFd<'_>) -> Result<()> {
    end.netns.run(|| {
        TcHookBuilder::new(program)
            .ifindex(end.ifindex as i32)
            .hook(TC_INGRESS)
            .create()
            .and_then(|mut hook| hook.attach().map(drop))
            .with_context(|| format!("no tc program on {}", end.name))
    })
}

/// What a later device with several transmit queues selects one by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Selection {
    AsIs,
    Recorded,
    ByHash,
}

/// A program at a device's tc ingress; attached until the device is removed.
pub struct Witness {
    skel: LabSkel<'static>,
}

impl Witness {
    /// Watches the frames of one generator from now on, up to 65536 flows.
    ///
    /// # Errors
    /// The kernel has no clsact or no BPF classifier.
    pub fn new(end: &End, frames: &Frames) -> Result<Self> {
        Self::attach(end, frames, Selection::AsIs)
    }

    /// As [`Self::new`], and records the device's first receive queue with packets that come from
    /// its NAPI poll, as drivers of network cards do and a veth does not.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn that_records(end: &End, frames: &Frames) -> Result<Self> {
        Self::attach(end, frames, Selection::Recorded)
    }

    /// As [`Self::new`], and takes the device's receive queue and hash from each packet, so that
    /// the choice of a transmit queue depends on neither.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn that_forgets(end: &End, frames: &Frames) -> Result<Self> {
        Self::attach(end, frames, Selection::ByHash)
    }

    fn attach(end: &End, frames: &Frames, selection: Selection) -> Result<Self> {
        let stamp = frames.stamp(end)?;
        let skel = programs::load(|open| {
            open.progs.witness.set_autoload(true);
            let constants = open.maps.rodata_data.as_mut().context("no .rodata")?;
            constants.witness_stamp = stamp;
            constants.witness_records = (selection == Selection::Recorded).into();
            constants.witness_forgets = (selection == Selection::ByHash).into();
            Ok(())
        })?;
        at_ingress(end, skel.progs.witness.as_fd())?;
        Ok(Self { skel })
    }

    /// Frames handed to the stack so far; frames merged by GRO count as one.
    pub fn seen(&self) -> u64 {
        self.read(|bss| &raw const bss.witness_nr_seen)
    }

    /// Frames handed to the stack after a later one of their flow.
    pub fn reordered(&self) -> u64 {
        self.read(|bss| &raw const bss.witness_nr_reordered)
    }

    fn read(&self, counter: impl FnOnce(&bss) -> *const u64) -> u64 {
        let bss = self.skel.maps.bss_data.as_ref();
        // SAFETY: the kernel writes this word concurrently; a 64-bit load is atomic.
        bss.map_or(0, |bss| unsafe { counter(bss).read_volatile() })
    }
}
