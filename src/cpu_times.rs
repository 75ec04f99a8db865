// SPDX-License-Identifier: MIT OR Apache-2.0
//! What CPUs do with their time: /proc/stat. (The procfs crate does not say whose times they are when a
//! CPU is offline.)

use std::fs;

use anyhow::{Context, Result};

/// One CPU's times since boot, ns, in steps of a clock tick (10 ms).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// The CPU.
    pub cpu: u32,
    /// Everything but idle and waiting for I/O.
    pub busy_ns: u64,
    /// Of it: in softirq.
    pub softirq_ns: u64,
    /// Idle, and waiting for I/O.
    pub idle_ns: u64,
    /// Taken by the hypervisor for others.
    pub steal_ns: u64,
}

/// Reads /proc/stat, a line per online CPU.
pub fn cpu_times() -> Result<Vec<CpuTimes>> {
    // SAFETY: no memory is involved.
    let hz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as u64;
    parse_cpu_times(&fs::read_to_string("/proc/stat")?, 1_000_000_000 / hz)
}

/// user nice system idle iowait irq softirq steal (proc(5)); guest times are within user's.
fn parse_cpu_times(text: &str, tick_ns: u64) -> Result<Vec<CpuTimes>> {
    let mut times = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let name = words.next().and_then(|name| name.strip_prefix("cpu"));
        let Some(Ok(cpu)) = name.map(str::parse) else {
            continue;
        };
        let ticks: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>()?;
        let ticks = ticks.get(..8).context("/proc/stat lacks columns")?;
        let idle = ticks[3] + ticks[4];
        times.push(CpuTimes {
            cpu,
            busy_ns: (ticks.iter().sum::<u64>() - idle) * tick_ns,
            softirq_ns: ticks[6] * tick_ns,
            idle_ns: idle * tick_ns,
            steal_ns: ticks[7] * tick_ns,
        });
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_times_leave_out_the_total() {
        let text = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu1 1 2 3 4 5 6 7 8 9 9\nintr 1\n";
        let expected = CpuTimes {
            cpu: 1,
            busy_ns: 27 * 10,
            softirq_ns: 7 * 10,
            idle_ns: 9 * 10,
            steal_ns: 8 * 10,
        };
        assert_eq!(parse_cpu_times(text, 10).unwrap(), [expected]);
    }
}
