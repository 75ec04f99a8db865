// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPU times from /proc/stat; rxlab uses them as well. The procfs crate loses CPU numbers when a CPU
//! is offline.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};

/// One CPU's times since boot in ns; the resolution is a clock tick (10 ms).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// CPU number.
    pub cpu: u32,
    /// All time except idle and waiting for I/O.
    pub busy_ns: u64,
    /// The part of `busy_ns` spent in programs, also of guests.
    pub user_ns: u64,
    /// The part of `busy_ns` spent in system calls and kernel threads.
    pub system_ns: u64,
    /// The part of `busy_ns` spent in softirq.
    pub softirq_ns: u64,
    /// Idle, or waiting for I/O.
    pub idle_ns: u64,
    /// Time that the hypervisor gave to other guests.
    pub steal_ns: u64,
}

/// Reads /proc/stat: one entry per online CPU.
///
/// # Errors
/// When the file can't be read, or lacks columns.
pub fn cpu_times() -> Result<Vec<CpuTimes>> {
    // SAFETY: no memory is involved.
    let hz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as u64;
    parse_cpu_times(&fs::read_to_string("/proc/stat")?, 1_000_000_000 / hz)
}

/// The share of `seconds` between two readings in which each CPU was not idle. It is computed from
/// idle times, since busy times are sampled at ticks while idle times are measured (NO_HZ_IDLE).
pub fn busy_shares(before: &[CpuTimes], after: &[CpuTimes], seconds: f64) -> BTreeMap<u32, f64> {
    let share = |now: &CpuTimes| {
        let then = before.iter().find(|then| then.cpu == now.cpu);
        let before = then.map_or(now.idle_ns, |then| then.idle_ns);
        let idle_ns = now.idle_ns.saturating_sub(before);
        let busy = 1.0 - idle_ns as f64 / 1e9 / seconds;
        (now.cpu, busy.clamp(0.0, 1.0))
    };
    after.iter().map(share).collect()
}

/// Columns: user (includes guest) nice system idle iowait irq softirq steal (proc(5)).
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
            user_ns: (ticks[0] + ticks[1]) * tick_ns,
            system_ns: ticks[2] * tick_ns,
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
    fn a_cpu_is_busy_while_it_is_not_idle() {
        let at = |cpu, idle_ns| CpuTimes {
            cpu,
            idle_ns,
            ..Default::default()
        };
        let before = [at(0, 5), at(1, 1_000_000_000)];
        let after = [at(0, 5), at(1, 1_500_000_000), at(3, 9)];
        let shares = busy_shares(&before, &after, 2.0);
        // A CPU that came online in between has no earlier idle time.
        assert_eq!(shares, BTreeMap::from([(0, 1.0), (1, 0.75), (3, 1.0)]));
    }

    #[test]
    fn cpu_times_leave_out_the_total() {
        let text = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu1 1 2 3 4 5 6 7 8 9 9\nintr 1\n";
        let expected = CpuTimes {
            cpu: 1,
            busy_ns: 27 * 10,
            user_ns: 3 * 10,
            system_ns: 3 * 10,
            softirq_ns: 7 * 10,
            idle_ns: 9 * 10,
            steal_ns: 8 * 10,
        };
        assert_eq!(parse_cpu_times(text, 10).unwrap(), [expected]);
    }
}
