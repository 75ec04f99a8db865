// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine that measured: what shapes the figures and can't be seen in them.

use serde::{Deserialize, Serialize};

/// What was there when the measurement began. What can't be known is left out.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Host {
    /// The processor's model.
    pub cpu: String,
    /// CPUs online.
    pub cpus: u32,
    /// Threads that share a core.
    pub threads_per_core: u32,
    /// NUMA nodes with CPUs.
    pub numa_nodes: u32,
    /// CPU 0's caches, such as `L2 2 MiB, shared by CPUs 0`.
    pub caches: Vec<String>,
    /// What runs this machine as a guest, if it is one.
    pub hypervisor: Option<String>,
    /// The kernel's release and build.
    pub kernel: String,
    /// The kernel's command line options that matter here (`mitigations=`, `isolcpus=`, …).
    pub kernel_options: Vec<String>,
    /// The tick, per second.
    pub hz: Option<u32>,
    /// Frequency governor, where frequencies can be chosen.
    pub governor: Option<String>,
    /// Idle states of CPU 0 with their exit latencies, such as `C1 2 us`.
    pub idle_states: Vec<String>,
    /// Who chooses among them.
    pub idle_governor: Option<String>,
    /// Memory, bytes.
    pub memory: u64,
    /// The device under test: `veth, in the lab`, or name, driver, queues and NUMA node.
    pub nic: String,
}
