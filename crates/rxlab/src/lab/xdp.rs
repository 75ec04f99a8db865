// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lab's own XDP programs, and how any program is attached to an end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{MapCore, MapFlags};
use rxsteer::host::xdp;

use super::link::End;
use super::programs::load;
use crate::lab_skel::LabSkel;
use crate::lab_skel::types::bpf_cpumap_val;

/// Attaches a program to an end until the returned BPF link is closed.
///
/// # Errors
/// EBUSY when another program holds the device.
pub fn attach(end: &End, program: BorrowedFd) -> Result<OwnedFd> {
    end.netns.run(|| {
        xdp::attach(program, end.ifindex)
            .with_context(|| format!("cannot attach XDP to {}", end.name))
    })
}

/// The same in the stack: generic XDP.
fn attach_in_stack(end: &End, program: BorrowedFd) -> Result<OwnedFd> {
    end.netns
        .run(|| Ok(xdp::attach_in_stack(program, end.ifindex)?))
}

/// One of the lab's programs, attached to a device until dropped.
pub struct Xdp {
    skel: LabSkel<'static>,
    _link: OwnedFd,
}

impl Xdp {
    /// Passes every frame to the stack: the baseline, with the cost of XDP and without steering.
    pub fn pass(end: &End) -> Result<Self> {
        Self::passing(|program| attach(end, program))
    }

    /// The same in the stack: generic XDP.
    pub fn pass_in_stack(end: &End) -> Result<Self> {
        Self::passing(|program| attach_in_stack(end, program))
    }

    fn passing(attach: impl FnOnce(BorrowedFd<'_>) -> Result<OwnedFd>) -> Result<Self> {
        let skel = load(|open| {
            open.progs.pass.set_autoload(true);
            Ok(())
        })?;
        let link = attach(skel.progs.pass.as_fd())?;
        Ok(Self { skel, _link: link })
    }

    /// Drops every frame: the upper limit of a generator and a NAPI.
    pub fn drop(end: &End) -> Result<Self> {
        Self::dropping(|program| attach(end, program))
    }

    /// The same in the stack, behind kernel RPS: generic XDP.
    pub fn drop_in_stack(end: &End) -> Result<Self> {
        Self::dropping(|program| attach_in_stack(end, program))
    }

    fn dropping(attach: impl FnOnce(BorrowedFd<'_>) -> Result<OwnedFd>) -> Result<Self> {
        let skel = load(|open| {
            open.progs.drop.set_autoload(true);
            Ok(())
        })?;
        let link = attach(skel.progs.drop.as_fd())?;
        Ok(Self { skel, _link: link })
    }

    /// Spreads frames over `cpus` by a hash of the 4-tuple, through one cpumap with rings of `ring`
    /// frames: the usual XDP load balancer, without order, limits or locality.
    pub fn cpumap(end: &End, cpus: &[u32], ring: u32) -> Result<Self> {
        let skel = load(|open| {
            open.progs.cpumap.set_autoload(true);
            let constants = open.maps.rodata_data.as_mut().context("no .rodata")?;
            let slots = constants.lab_cpus.len();
            ensure!(
                !cpus.is_empty() && cpus.len() <= slots && cpus.iter().all(|&c| c < slots as u32),
                "a cpumap takes 1…{slots} CPUs below {slots}, not {cpus:?}"
            );
            constants.lab_cpus[..cpus.len()].copy_from_slice(cpus);
            constants.lab_nr_cpus = cpus.len() as u32;
            Ok(())
        })?;
        for cpu in cpus {
            let value = bpf_cpumap_val {
                qsize: ring,
                ..Default::default()
            };
            // SAFETY: plain old data of the map's value size.
            let value = unsafe {
                std::slice::from_raw_parts((&raw const value).cast(), size_of_val(&value))
            };
            skel.maps
                .lab_cpumap
                .update(&cpu.to_ne_bytes(), value, MapFlags::ANY)
                .with_context(|| format!("no cpumap entry for CPU {cpu}: is it online?"))?;
        }
        let link = attach(end, skel.progs.cpumap.as_fd())?;
        Ok(Self { skel, _link: link })
    }

    /// Frames received on an rx queue since the program was attached.
    pub fn received(&self, queue: u32) -> u64 {
        let queues = self.skel.maps.bss_data.as_ref().map(|bss| &bss.lab_queues);
        queues
            .and_then(|queues| queues.get(queue as usize))
            // SAFETY: the kernel writes this word concurrently; a 64-bit load is atomic.
            .map_or(0, |queue| unsafe {
                (&raw const queue.nr_received).read_volatile()
            })
    }
}
