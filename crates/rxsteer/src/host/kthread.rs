// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel threads by name, such as `napi/eth0-8193` and `cpumap/3/map:17`.

use std::fs;
use std::path::Path;

/// The threads named `prefix` followed by a number, as pairs of that number and the process id,
/// ordered by number. Empty if `proc` can't be read. Before 5.17 names are cut at 15 bytes.
pub fn numbered(proc: &Path, prefix: &str) -> Vec<(u32, u32)> {
    let Ok(entries) = fs::read_dir(proc) else {
        return Vec::new();
    };
    let mut threads: Vec<(u32, u32)> = entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            // A process may end before it is read.
            let comm = fs::read_to_string(entry.path().join("comm")).ok()?;
            let number = comm.trim_end().strip_prefix(prefix)?.parse().ok()?;
            Some((number, pid))
        })
        .collect();
    threads.sort_unstable();
    threads
}
