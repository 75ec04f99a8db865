// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `set` is asked.

use serde::{Deserialize, Serialize};

use crate::datapath::policy::Policy;

/// What can be changed while rxsteer runs; what is `None` stays as it is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Change {
    /// Whose CPUs; needed only when several devices are steered.
    pub device: Option<String>,
    /// Only this queue's CPUs.
    pub queue: Option<u32>,
    /// As in `--rps-cpus`.
    pub rps_cpus: Option<String>,
    /// How packets find their CPU.
    pub policy: Option<Policy>,
    /// Entries of the table of applications' CPUs.
    pub rps_sock_flow_entries: Option<u32>,
    /// Slots of each queue's flow table.
    pub rps_flow_cnt: Option<u32>,
}

impl Change {
    /// The CPUs of a device's queue, or of all its queues.
    pub fn rps_cpus(device: &str, queue: Option<u32>, cpus: &str) -> Self {
        Self {
            device: Some(device.to_owned()),
            queue,
            rps_cpus: Some(cpus.to_owned()),
            ..Self::default()
        }
    }
}
