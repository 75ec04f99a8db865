// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPUs' softnet backlogs, by which packets come that another CPU has sent, or a device without
//! NAPI of its own.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};

/// One CPU's line of /proc/net/softnet_stat, of the host in every namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Softnet {
    pub cpu: u32,
    /// Packets that the stack processed, from NAPI and from the backlog.
    pub processed: u64,
    /// Packets dropped at a full backlog (netdev_max_backlog).
    pub dropped: u64,
    /// Times that net_rx_action() ran out of budget or time.
    pub time_squeeze: u64,
    /// RPS inter-processor interrupts received.
    pub received_rps: u64,
    /// Packets dropped by the flow limit.
    pub flow_limit: u64,
    /// Packets in the backlog now.
    pub waiting: u64,
}

/// Reads softnet_stat, one line per online CPU. The counters have 32 bits and wrap.
///
/// # Errors
/// When the file can't be read, or is of another kernel than Linux 5.10 or later.
pub fn read() -> Result<Vec<Softnet>> {
    parse(&fs::read_to_string("/proc/net/softnet_stat")?)
}

/// The growth of the counters between two readings, by CPU.
pub fn since(before: &[Softnet], now: &[Softnet]) -> BTreeMap<u32, Softnet> {
    let less = |now: u64, before: u64| u64::from((now as u32).wrapping_sub(before as u32));
    let of = |now: &Softnet| {
        let zero = Softnet::default();
        let before = before.iter().find(|b| b.cpu == now.cpu).unwrap_or(&zero);
        let grown = Softnet {
            cpu: now.cpu,
            waiting: now.waiting,
            processed: less(now.processed, before.processed),
            dropped: less(now.dropped, before.dropped),
            time_squeeze: less(now.time_squeeze, before.time_squeeze),
            received_rps: less(now.received_rps, before.received_rps),
            flow_limit: less(now.flow_limit, before.flow_limit),
        };
        (now.cpu, grown)
    };
    now.iter().map(of).collect()
}

/// Columns as in softnet_seq_show(), net/core/net-procfs.c.
fn parse(text: &str) -> Result<Vec<Softnet>> {
    let line = |line: &str| {
        let columns: Vec<u64> = line
            .split_whitespace()
            .map(|column| u64::from_str_radix(column, 16))
            .collect::<Result<_, _>>()?;
        let column = |i: usize| columns.get(i).copied().context("a column is missing");
        Ok(Softnet {
            cpu: column(12)? as u32,
            processed: column(0)?,
            dropped: column(1)?,
            time_squeeze: column(2)?,
            received_rps: column(9)?,
            flow_limit: column(10)?,
            waiting: column(11)?,
        })
    };
    text.lines()
        .map(line)
        .collect::<Result<_>>()
        .context("/proc/net/softnet_stat is not as it is since Linux 5.10")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_wrap_at_32_bits() {
        let at = |processed| Softnet {
            cpu: 1,
            processed,
            ..Default::default()
        };
        let grown = since(&[at(0xffff_fffe)], &[at(3)]);
        assert_eq!(grown[&1].processed, 5);
    }

    #[test]
    fn columns_are_where_the_kernel_puts_them() {
        let text = "0000000a 0000000b 0000000c 00000000 00000000 00000000 00000000 00000000 \
                    00000000 0000000d 0000000e 0000000f 00000003 00000000 00000000\n";
        let expected = Softnet {
            cpu: 3,
            processed: 10,
            dropped: 11,
            time_squeeze: 12,
            received_rps: 13,
            flow_limit: 14,
            waiting: 15,
        };
        assert_eq!(parse(text).unwrap(), [expected]);
        assert!(parse("0000000a 0000000b\n").is_err());
    }
}
