// SPDX-License-Identifier: MIT OR Apache-2.0
//! A CPU that went offline or came online. The threads of an offline CPU's backlogs run on other
//! CPUs, and the kernel does not bind them again: its backlogs are closed until they are drained,
//! then removed, and created again when flows want the CPU after its return (docs/order.md).

use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::info;

use crate::datapath::{Datapath, Drain};
use crate::host::topology::Topology;

/// Time that flows have to leave by themselves, without loss. In native mode their frames are dropped
/// from then on until they can leave; in softirq mode, what the softnet backlog held when its CPU went
/// offline counts as passed up by another CPU: 1000 packets, unless `net.core.netdev_max_backlog` is
/// changed.
const PATIENCE: Duration = Duration::from_secs(1);

/// See the module's documentation.
pub(super) struct Leaving {
    pub(super) cpu: u32,
    drain: Drain,
    /// The last change of the CPU.
    changed: Instant,
    /// Until when flows have to leave the backlogs of native mode by themselves; `None`: shed.
    deadline: Option<Instant>,
}

impl Leaving {
    /// Closes the CPU's backlogs. `before`: the CPU is leaving already; a CPU that comes and goes
    /// gives flows no more time.
    pub(super) fn close(datapath: &Datapath, cpu: u32, before: Option<&Self>) -> Self {
        datapath.close_cpu(cpu);
        let changed = Instant::now();
        Self {
            cpu,
            drain: Drain::of(cpu..cpu + 1),
            changed,
            deadline: before.map_or(Some(changed + PATIENCE), |before| before.deadline),
        }
    }

    /// Removes the backlogs if they are drained, and opens those of a CPU that is online. Returns
    /// whether that is done. Before, flows leave those that nothing may enter, after [`PATIENCE`] also
    /// without proof, which skbs that vanished prevent; and after that time nothing enters those of
    /// native mode, which one flow without a pause could keep from being empty.
    ///
    /// # Errors
    /// When a map or the online CPUs can't be read, or a map can't be written.
    pub(super) fn look(&mut self, datapath: &Datapath) -> Result<bool> {
        let cpu = self.cpu;
        if datapath.is_down(cpu)
            && (self.changed.elapsed() > PATIENCE || self.drain.drained(datapath)?.is_some())
        {
            datapath.leave_cpu(cpu);
        }
        if self.deadline.is_some_and(|at| Instant::now() > at) {
            self.deadline = None;
            if datapath.shed_cpu(cpu) {
                info!(
                    cpu,
                    "packets still wait for CPU {cpu}: more are dropped until these flows have left it"
                );
            }
        }
        if !self.drain.check(datapath)? {
            return Ok(false);
        }
        datapath.remove_cpu(cpu)?;
        if Topology::host().online()?.contains(cpu) {
            datapath.open_cpu(cpu);
        }
        Ok(true)
    }
}
