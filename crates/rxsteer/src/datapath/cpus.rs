// SPDX-License-Identifier: MIT OR Apache-2.0
//! Facts about the host's CPUs for the data path: the address of each CPU's run queue, the CPU's
//! capacity, and the CPUs near it (`bpf/cpu.h`).

use std::mem::offset_of;
use std::thread;

use anyhow::{Context, Result, anyhow};
use libbpf_rs::Link;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use super::mapped::Mapped;
use crate::bpf::trace_skel::{OpenTraceProgs, TraceSkel};
use crate::host::caps;
use crate::host::cpumask::CpuMask;
use crate::host::topology::Topology;
use crate::types::cpu;

/// Whether a program of `bpf/trace.bpf.c` is attached here, not with the others.
pub(crate) fn owns(program: &str) -> bool {
    ["on_nr_running", "on_sched_switch"].contains(&program)
}

/// Selects the programs to load: the one on the tracepoint that shows run queues, if the kernel has
/// it (5.9 and later), and the one on `sched_switch`, which replaces it at a cost for each switch
/// of tasks.
///
/// # Errors
/// When the kernel's types can't be read.
pub(crate) fn choose(progs: &mut OpenTraceProgs<'_>) -> Result<()> {
    let missing = caps::missing_tracepoints(&["sched_update_nr_running_tp"])?;
    progs.on_nr_running.set_autoload(missing.is_empty());
    progs.on_sched_switch.set_autoload(true);
    Ok(())
}

/// The CPUs known to the data path. Dropping it detaches the program on `sched_switch`, if
/// attached.
pub(crate) struct Cpus {
    _watching: Option<Link>,
}

impl Cpus {
    /// Learns the run queues of all online CPUs, and stores each one's capacity and the CPUs near
    /// it. If a run queue
    /// can't be learnt, attaches the program on `sched_switch` instead.
    ///
    /// # Errors
    /// When the map can't be written, or the kernel refuses the programs.
    pub(crate) fn learn(trace: &TraceSkel<'_>) -> Result<Self> {
        let topology = Topology::host();
        let online = topology.online()?;
        let housekeeping = topology.housekeeping()?;
        let cpus = Mapped::<cpu>::of(&trace.maps.cpus)?;
        for number in online.iter() {
            let mut near = cpu::default().near;
            let nearest = topology.nearest(number, &housekeeping, near.len());
            for (slot, near) in near.iter_mut().zip(&nearest) {
                *slot = *near as u16;
            }
            cpus.set_field(number, offset_of!(cpu, near), near);
            cpus.set_field(number, offset_of!(cpu, nr_near), nearest.len() as u16);
            let capacity = topology.capacity(number);
            cpus.set_field(number, offset_of!(cpu, capacity), capacity);
        }
        if trace.progs.on_nr_running.autoload() {
            let _learning = trace.progs.on_nr_running.attach_trace()?;
            visit(&online)?;
        }
        let watching = match online.iter().all(|number| cpus.get(number).rq != 0) {
            true => None,
            false => Some(trace.progs.on_sched_switch.attach_trace()?),
        };
        Ok(Self {
            _watching: watching,
        })
    }
}

/// Runs a thread on each of these CPUs once: on an isolated or idle CPU, the tracepoint may not
/// fire by itself. CPUs that this process may not use are left out.
fn visit(cpus: &CpuMask) -> Result<()> {
    let cpus: Vec<u32> = cpus.iter().collect();
    thread::spawn(move || {
        for number in cpus {
            let mut set = CpuSet::new();
            if set.set(number as usize).is_ok() {
                // Returns when the thread runs on that CPU.
                let _ = sched_setaffinity(Pid::from_raw(0), &set);
            }
        }
    })
    .join()
    .map_err(|_| anyhow!("visiting CPUs"))
    .context("the scheduler's run queues are not known")
}
