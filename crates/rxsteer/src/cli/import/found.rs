// SPDX-License-Identifier: MIT OR Apache-2.0
//! Settings of receive steering that another system has, and the configuration that has the same effect.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::host::cpumask::CpuMask;

/// See the module's documentation.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Where they are from.
    pub(super) from: String,
    /// The devices with receive steering, and the CPUs of their queues; none: `auto`.
    pub(super) devices: BTreeMap<String, BTreeMap<u32, CpuMask>>,
    /// Flows follow applications.
    pub(super) follows: bool,
    pub(super) rps_sock_flow_entries: Option<u32>,
    pub(super) rps_flow_cnt: Option<u32>,
    /// Microseconds for which sockets poll.
    pub(super) busy_read: u32,
    /// What to do besides, in sentences and commands.
    pub(super) notes: Vec<String>,
}

impl Found {
    /// The text of a configuration file.
    pub(super) fn configuration(&self) -> String {
        let mut text = format!("# From {}, by `rxsteer import`.\n", self.from);
        if self.devices.is_empty() {
            text.push_str("# Kernel RPS is on for no device there: name those to steer.\n#devices = [\"eth0\"]\n");
        } else {
            let names: Vec<_> = self
                .devices
                .keys()
                .map(|name| format!("{name:?}"))
                .collect();
            let _ = writeln!(text, "devices = [{}]", names.join(", "));
            let policy = if self.follows { "rfs" } else { "rps" };
            text.push_str(
                "# As there. The default, \"adaptive\", moves a flow only from a CPU that has no room.\n",
            );
            let _ = writeln!(text, "policy = \"{policy}\"");
        }
        self.add_masks(&mut text);
        let sizes = [
            ("rps-sock-flow-entries", self.rps_sock_flow_entries),
            ("rps-flow-cnt", self.rps_flow_cnt),
        ];
        for (key, size) in sizes {
            if let Some(size) = size.filter(|_| self.follows) {
                let _ = writeln!(text, "{key} = {size}");
            }
        }
        for note in &self.notes {
            let _ = writeln!(text, "# {note}");
        }
        if self.busy_read > 0 {
            let _ = write!(
                text,
                "\n# net.core.busy_read: every socket polls.\n[[busy_poll]]\ncgroup = \"/\"\nusecs = {}\n",
                self.busy_read
            );
        }
        text
    }

    /// One mask for all queues, or one for each queue that has CPUs.
    fn add_masks(&self, text: &mut String) {
        let queues = self.devices.iter().flat_map(|(device, queues)| {
            queues
                .iter()
                .map(move |(queue, cpus)| (device, queue, cpus))
        });
        let masks: BTreeSet<String> = queues
            .clone()
            .map(|(_, _, cpus)| cpus.to_string())
            .collect();
        match Vec::from_iter(masks)[..] {
            [] => {}
            [ref mask] if !mask.is_empty() => {
                let _ = writeln!(text, "rps-cpus = {mask:?}");
            }
            _ => {
                text.push_str("# Queues that are not listed have the CPUs of `rps-cpus`.\n");
                let given = queues.filter(|(_, _, cpus)| !cpus.is_empty());
                let given: Vec<_> = given
                    .map(|(device, queue, cpus)| format!("\"{device}:{queue}={cpus}\""))
                    .collect();
                let _ = writeln!(text, "queue = [{}]", given.join(", "));
            }
        }
    }
}
