// SPDX-License-Identifier: MIT OR Apache-2.0
//! Facts about the host's CPUs for the data path: the address of each CPU's run queue, the CPU's
//! capacity, and the CPUs near it (`bpf/cpu.h`).

use std::mem::offset_of;

use anyhow::Result;
use libbpf_rs::Link;
use tracing::{debug, warn};

use super::mapped::Mapped;
use super::visit::{self, visit};
use crate::bpf::trace_skel::{OpenTraceProgs, TraceSkel};
use crate::host::caps;
use crate::host::cpumask::CpuMask;
use crate::host::topology::Topology;
use crate::types::cpu;

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
    /// CPUs that were visited, or should have been.
    visited: CpuMask,
    pub(super) watching: Option<Link>,
}

impl Cpus {
    /// Stores the capacity of all online CPUs and the CPUs near each, and learns the run queues of
    /// the CPUs to visit; `named` are those of the masks. If a run queue can't be learnt, attaches
    /// the program on `sched_switch` instead. CPUs that are not visited seem busy without it.
    ///
    /// # Errors
    /// When the map can't be written, or the kernel refuses the programs.
    pub(crate) fn learn(trace: &TraceSkel<'_>, named: &CpuMask) -> Result<Self> {
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
        let visited = to_visit(&online, &housekeeping, named);
        if trace.progs.on_nr_running.autoload() {
            let _learning = trace.progs.on_nr_running.attach_trace()?;
            report(&visit(&visited, visit::LIMIT)?, named);
        }
        let known = |number: u32| cpus.get(number).rq != 0;
        let watching = match visited.iter().all(known) {
            true => None,
            false => Some(trace.progs.on_sched_switch.attach_trace()?),
        };
        for number in online.iter().filter(|&number| !known(number)) {
            let running = u32::from(watching.is_none());
            cpus.set_field(number, offset_of!(cpu, running), running);
        }
        Ok(Self { visited, watching })
    }

    /// Whether all CPUs of these masks that are online were to be visited.
    pub(crate) fn have(&self, named: &CpuMask) -> Result<bool> {
        let online = Topology::host().online()?;
        Ok(named.intersect(&online).without(&self.visited).is_empty())
    }
}

/// CPUs on which a thread has to run once: on an idle CPU the tracepoint may not fire by itself.
/// Isolated and nohz_full CPUs are left alone unless they are in a mask.
fn to_visit(online: &CpuMask, housekeeping: &CpuMask, named: &CpuMask) -> CpuMask {
    let cpus = housekeeping.iter().chain(named.iter());
    cpus.filter(|&cpu| online.contains(cpu)).collect()
}

/// Logs the CPUs that did not run a thread in time.
fn report(late: &CpuMask, named: &CpuMask) {
    let limit = visit::LIMIT;
    for cpu in late.iter() {
        match named.contains(cpu) {
            true => warn!(
                "CPU {cpu} has not run a thread for {limit:?}, and packets steered to it may wait as \
                 long: see what keeps it (a real-time task?), or leave it out of --rps-cpus"
            ),
            false => debug!("CPU {cpu} has not run a thread for {limit:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isolated_cpus_are_visited_if_a_mask_names_them() {
        let [online, housekeeping, named] =
            ["0-5", "0-2", "2-3,7"].map(|list| CpuMask::parse_list(list).unwrap());
        let visited = to_visit(&online, &housekeeping, &named);
        assert_eq!(visited.to_string(), "0-3");
        let none = CpuMask::new();
        assert_eq!(to_visit(&online, &housekeeping, &none), housekeeping);
    }
}
