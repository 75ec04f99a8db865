// SPDX-License-Identifier: MIT OR Apache-2.0
//! The request of `set`.

use serde::{Deserialize, Serialize};

use crate::datapath::policy::Policy;

/// Changes of a running rxsteer; `None` leaves a setting as it is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Change {
    /// The device to which `rps_cpus` applies; required only if several are steered.
    pub device: Option<String>,
    /// Only this queue's CPUs.
    pub queue: Option<u32>,
    /// In the format of `--rps-cpus`.
    pub rps_cpus: Option<String>,
    /// Policy for the choice of CPUs.
    pub policy: Option<Policy>,
    /// Entries of the `sock_flow_table`.
    pub rps_sock_flow_entries: Option<u32>,
    /// Slots of each queue's `dev_flow_table`.
    pub rps_flow_cnt: Option<u32>,
}

impl Change {
    /// A change of the CPUs of one queue, or of all queues of a device.
    pub fn rps_cpus(device: &str, queue: Option<u32>, cpus: &str) -> Self {
        Self {
            device: Some(device.to_owned()),
            queue,
            rps_cpus: Some(cpus.to_owned()),
            ..Self::default()
        }
    }
}
