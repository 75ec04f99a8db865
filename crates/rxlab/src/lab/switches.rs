// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scheduler statistics of some CPUs: context switches from perf, and wake-ups from /proc/schedstat
//! if it counts them.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};

use anyhow::{Context, Result};
use nix::errno::Errno;
use rxsteer::host::cpumask::CpuMask;

pub struct Switches {
    cpus: CpuMask,
    counters: Vec<File>,
}

/// Counts up to one time, or between two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Scheduled {
    pub switches: u64,
    /// Wake-ups by these CPUs; None without CONFIG_SCHEDSTATS or with `kernel.sched_schedstats`
    /// off.
    pub wakeups: Option<u64>,
}

impl Switches {
    /// Counts from now on.
    ///
    /// # Errors
    /// Without CAP_PERFMON, or perf events.
    pub fn of(cpus: &CpuMask) -> Result<Self> {
        Ok(Self {
            counters: cpus.iter().map(counter).collect::<Result<_>>()?,
            cpus: cpus.clone(),
        })
    }

    /// Counts so far.
    ///
    /// # Errors
    /// When a counter can't be read.
    pub fn read(&self) -> Result<Scheduled> {
        let mut switches = 0;
        for mut counter in &self.counters {
            let mut value = [0; 8];
            counter.read_exact(&mut value).context("a perf event")?;
            switches += u64::from_ne_bytes(value);
        }
        let text = fs::read_to_string("/proc/schedstat").ok();
        Ok(Scheduled {
            switches,
            wakeups: text.and_then(|text| wakeups(&text, &self.cpus)),
        })
    }
}

impl Scheduled {
    /// Counts since `then`.
    pub fn since(self, then: Self) -> Self {
        let wakeups = self.wakeups.zip(then.wakeups);
        Self {
            switches: self.switches - then.switches,
            wakeups: wakeups.map(|(now, then)| now.wrapping_sub(then)),
        }
    }
}

/// Opens a counter of all context switches on a CPU.
fn counter(cpu: u32) -> Result<File> {
    let attr = libbpf_sys::perf_event_attr {
        type_: libbpf_sys::PERF_TYPE_SOFTWARE,
        size: size_of::<libbpf_sys::perf_event_attr>() as u32,
        config: u64::from(libbpf_sys::PERF_COUNT_SW_CONTEXT_SWITCHES),
        ..Default::default()
    };
    // SAFETY: the kernel copies the attributes during the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attr,
            -1 as libc::pid_t,
            cpu as libc::c_int,
            -1 as libc::c_int,
            libc::c_ulong::from(libbpf_sys::PERF_FLAG_FD_CLOEXEC),
        )
    };
    let fd = Errno::result(fd)
        .with_context(|| format!("no perf event counts the context switches of CPU {cpu}"))?;
    // SAFETY: nothing else owns the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) }.into())
}

/// Sum of ttwu_count, the fifth number of each CPU's line
/// (Documentation/scheduler/sched-stats.rst). All are 0 if the kernel does not count.
fn wakeups(schedstat: &str, cpus: &CpuMask) -> Option<u64> {
    let of_cpu = |line: &str| {
        let mut words = line.strip_prefix("cpu")?.split_whitespace();
        let cpu = words.next()?.parse().ok()?;
        let count = words.nth(4)?.parse::<u64>().ok()?;
        cpus.contains(cpu).then_some(count)
    };
    let count = schedstat.lines().filter_map(of_cpu).sum();
    (count > 0).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wakeups_are_those_of_the_cpus_asked_for() {
        let text = "version 15\ntimestamp 1\ncpu0 1 0 3 4 50 6 7 8 9\ndomain0 3 1 2\n\
                    cpu1 1 0 3 4 70 6 7 8 9\n";
        let of = |cpus: &[u32]| wakeups(text, &cpus.iter().copied().collect());
        assert_eq!(of(&[0, 1]), Some(120));
        assert_eq!(of(&[1]), Some(70));
        // A kernel that does not count.
        assert_eq!(of(&[2]), None);
    }
}
