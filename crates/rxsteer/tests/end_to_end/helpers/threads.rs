// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel threads of cpumaps.

use std::collections::BTreeSet;
use std::fs;

use anyhow::Result;
use nix::errno::Errno;

/// Ids of the cpumaps that a process has open.
pub fn cpumaps(pid: u32) -> Result<BTreeSet<u32>> {
    const BPF_MAP_TYPE_CPUMAP: u32 = 16;
    super::maps::ids(pid, BPF_MAP_TYPE_CPUMAP)
}

/// The kernel threads of these cpumaps, found by name: `cpumap/CPU/map:ID`.
pub fn kthreads(cpumaps: &BTreeSet<u32>) -> Result<Vec<u32>> {
    let mut kthreads = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let map = name
            .strip_prefix("cpumap/")
            .and_then(|name| name.trim_end().split_once("/map:"));
        if map.is_some_and(|(_, id)| id.parse().is_ok_and(|id| cpumaps.contains(&id))) {
            let pid = entry.file_name().into_string().expect("a number");
            kthreads.push(pid.parse()?);
        }
    }
    Ok(kthreads)
}

/// Sets the nice value of threads; those that have ended are skipped.
pub fn renice(threads: &[u32], nice: i32) -> Result<()> {
    for &thread in threads {
        // SAFETY: no memory is involved.
        let ret = unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, nice) };
        match Errno::result(ret) {
            Ok(_) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
