// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel threads by name, such as `napi/eth0-8193` and `cpumap/3/map:17`.

use std::fs;
use std::path::Path;

use procfs::FromRead;
use procfs::process::{Stat, StatFlags};

/// The kernel threads named `prefix` followed by a number, as pairs of that number and the process
/// id, ordered by number. Empty if `proc` can't be read. Before 5.17 names are cut at 15 bytes.
pub fn numbered(proc: &Path, prefix: &str) -> Vec<(u32, u32)> {
    let Ok(entries) = fs::read_dir(proc) else {
        return Vec::new();
    };
    let mut threads: Vec<(u32, u32)> = entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            // A process may end before it is read.
            let stat = Stat::from_file(entry.path().join("stat")).ok()?;
            let number = stat.comm.strip_prefix(prefix)?.parse().ok()?;
            // Any process may take such a name.
            let ours = stat.flags().ok()?.contains(StatFlags::PF_KTHREAD);
            ours.then_some((number, pid))
        })
        .collect();
    threads.sort_unstable();
    threads
}

/// Whether the kernel thread with this name, which ends with a number, sleeps; `None` if there is
/// no such thread.
pub fn sleeps(proc: &Path, name: &str) -> Option<bool> {
    let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let number: u32 = name.strip_prefix(prefix)?.parse().ok()?;
    let threads = numbered(proc, prefix);
    let (_, pid) = threads.iter().find(|(n, _)| *n == number)?;
    let stat = Stat::from_file(proc.join(pid.to_string()).join("stat")).ok()?;
    Some(stat.state == 'S')
}

/// /proc/PID/stat of a kernel thread, or of another process with its name.
#[cfg(test)]
pub(super) fn stat(pid: u32, comm: &str, is_kthread: bool) -> String {
    let flags = match is_kthread {
        true => StatFlags::PF_KTHREAD.bits(),
        false => 0,
    };
    let zeros = "0 ".repeat(43);
    format!("{pid} ({comm}) S 2 0 0 0 -1 {flags} {zeros}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_such_a_name_is_no_kernel_thread() {
        const PREFIX: &str = "napi/rxsteer-";
        let proc = tempfile::tempdir().unwrap();
        for (pid, number, is_kthread) in [(70, 8200, true), (71, 8201, false)] {
            let dir = proc.path().join(pid.to_string());
            fs::create_dir(&dir).unwrap();
            let stat = stat(pid, &format!("{PREFIX}{number}"), is_kthread);
            fs::write(dir.join("stat"), stat).unwrap();
        }
        assert_eq!(numbered(proc.path(), PREFIX), [(8200, 70)]);
        let sleeps = |name| sleeps(proc.path(), &format!("{PREFIX}{name}"));
        assert_eq!((sleeps("8200"), sleeps("8201")), (Some(true), None));
        assert_eq!((sleeps(""), sleeps("820")), (None, None));
        let stat = proc.path().join("70/stat");
        let runs = fs::read_to_string(&stat).unwrap().replace(") S ", ") R ");
        fs::write(stat, runs).unwrap();
        assert_eq!(sleeps("8200"), Some(false));
    }
}
