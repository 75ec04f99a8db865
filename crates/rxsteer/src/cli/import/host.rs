// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's settings of receive steering on this host: Documentation/networking/scaling.rst and
//! Documentation/admin-guide/sysctl/net.rst.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::found::Found;
use crate::host::cpumask::CpuMask;
use crate::host::shell::quoted;

/// The settings below this root.
pub(super) fn found(root: &Path) -> Result<Found> {
    let mut found = Found {
        from: "the settings of this host".to_owned(),
        ..Found::default()
    };
    let core = root.join("proc/sys/net/core");
    // Other network namespaces than the initial one lack these files.
    let entries = number(&core.join("rps_sock_flow_entries")).unwrap_or(0);
    found.busy_read = number(&core.join("busy_read")).unwrap_or(0);
    let net = root.join("sys/class/net");
    for entry in fs::read_dir(&net).with_context(|| net.display().to_string())? {
        let device = entry?.file_name().to_string_lossy().into_owned();
        let queues = net.join(&device).join("queues");
        let mut masks = BTreeMap::new();
        // The loopback device has queues, a device that has gone meanwhile has none.
        for entry in fs::read_dir(&queues).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(queue) = name.strip_prefix("rx-").and_then(|nr| nr.parse().ok()) else {
                continue;
            };
            let file = queues.join(&name).join("rps_cpus");
            let Ok(text) = fs::read_to_string(&file) else {
                continue;
            };
            let mask = CpuMask::parse_mask(&text).with_context(|| file.display().to_string())?;
            masks.insert(queue, mask);
            let slots = number(&queues.join(&name).join("rps_flow_cnt")).unwrap_or(0);
            found.rps_flow_cnt = found
                .rps_flow_cnt
                .max(Some(slots).filter(|slots| *slots > 0));
        }
        let on: Vec<_> = masks.iter().filter(|(_, cpus)| !cpus.is_empty()).collect();
        for (queue, _) in &on {
            found.notes.push(format!(
                "before rxsteer starts: echo 0 > /sys/class/net/{}/queues/rx-{queue}/rps_cpus",
                quoted(&device)
            ));
        }
        if !on.is_empty() {
            found.devices.insert(device, masks);
        }
    }
    found.follows = entries > 0 && found.rps_flow_cnt.is_some();
    found.rps_sock_flow_entries = Some(entries);
    if found.busy_read > 0 {
        let sysctl = "before rxsteer starts: sysctl net.core.busy_read=0 (for sockets made later)";
        found.notes.push(sysctl.to_owned());
    }
    Ok(found)
}

fn number(file: &Path) -> Option<u32> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_become_a_configuration() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let queue = |device: &str, queue: u32, mask: &str, slots: &str| {
            let folder = format!("sys/class/net/{device}/queues/rx-{queue}");
            write(&format!("{folder}/rps_cpus"), mask);
            write(&format!("{folder}/rps_flow_cnt"), slots);
        };
        let text = || found(root.path()).unwrap().configuration();
        queue("lo", 0, "0\n", "0\n");
        queue("eth0", 0, "00000000,0000000e\n", "0\n");
        write("proc/sys/net/core/rps_sock_flow_entries", "0\n");
        let rps = text();
        assert!(rps.contains("devices = [\"eth0\"]\n"), "{rps}");
        assert!(
            rps.contains("policy = \"rps\"\nrps-cpus = \"1-3\"\n"),
            "{rps}"
        );
        assert!(
            rps.contains("echo 0 > /sys/class/net/eth0/queues/rx-0/rps_cpus"),
            "{rps}"
        );
        assert!(
            !rps.contains("flow") || !rps.contains("rps-flow-cnt ="),
            "{rps}"
        );
        // Several masks, and RFS.
        queue("eth0", 1, "1\n", "4096\n");
        queue("eth0", 2, "0\n", "0\n");
        write("proc/sys/net/core/rps_sock_flow_entries", "32768\n");
        write("proc/sys/net/core/busy_read", "50\n");
        let rfs = text();
        assert!(rfs.contains("policy = \"rfs\"\n"), "{rfs}");
        assert!(
            rfs.contains("queue = [\"eth0:0=1-3\", \"eth0:1=0\"]\n"),
            "{rfs}"
        );
        assert!(
            rfs.contains("rps-sock-flow-entries = 32768\nrps-flow-cnt = 4096\n"),
            "{rfs}"
        );
        assert!(rfs.contains("usecs = 50\n"), "{rfs}");
        // The control: nothing is on.
        for number in 0..3 {
            queue("eth0", number, "0\n", "0\n");
        }
        assert!(text().contains("\n#devices"), "{}", text());
    }
}
