// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters of the kernel: softnet_stat, UDP and TCP.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};

use super::netns::Netns;

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
}

/// Reads softnet_stat, one line per online CPU. The counters have 32 bits and wrap.
pub fn softnet() -> Result<Vec<Softnet>> {
    parse_softnet(&fs::read_to_string("/proc/net/softnet_stat")?)
}

/// Columns as in softnet_seq_show(), net/core/net-procfs.c.
fn parse_softnet(text: &str) -> Result<Vec<Softnet>> {
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
        })
    };
    text.lines()
        .map(line)
        .collect::<Result<_>>()
        .context("/proc/net/softnet_stat is not as it is since Linux 5.10")
}

/// UDP counters of a namespace by name (`InDatagrams`, `RcvbufErrors`, `InCsumErrors`, `NoPorts`…);
/// those of IPv6 have a prefix (`Udp6InDatagrams`).
pub fn udp(netns: &Netns) -> Result<BTreeMap<String, u64>> {
    netns.run(|| {
        let v4 = fs::read_to_string("/proc/thread-self/net/snmp")?;
        // Absent without IPv6.
        let v6 = fs::read_to_string("/proc/thread-self/net/snmp6").unwrap_or_default();
        parse_udp(&v4, &v6)
    })
}

fn parse_udp(v4: &str, v6: &str) -> Result<BTreeMap<String, u64>> {
    let mut counters = parse_group(v4, "Udp")?;
    for line in v6.lines().filter(|line| line.starts_with("Udp6")) {
        let (name, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        counters.insert(name.to_string(), value.trim().parse()?);
    }
    Ok(counters)
}

/// TCP counters of a namespace by name, both families together: `InErrs` and others from snmp,
/// `TCPOFOQueue`, `BusyPollRxPackets`… from netstat.
pub fn tcp(netns: &Netns) -> Result<BTreeMap<String, u64>> {
    netns.run(|| {
        let snmp = fs::read_to_string("/proc/thread-self/net/snmp")?;
        let netstat = fs::read_to_string("/proc/thread-self/net/netstat")?;
        let mut counters = parse_group(&netstat, "TcpExt")?;
        counters.extend(parse_group(&snmp, "Tcp")?);
        Ok(counters)
    })
}

/// Growth of named counters.
pub fn since(
    before: &BTreeMap<String, u64>,
    mut now: BTreeMap<String, u64>,
) -> BTreeMap<String, u64> {
    for (name, value) in &mut now {
        *value -= before.get(name).copied().unwrap_or(0).min(*value);
    }
    now
}

/// Parses a line of names and a line of values, both prefixed with the group's name. Negative
/// values (`MaxConn`) become zero.
fn parse_group(text: &str, group: &str) -> Result<BTreeMap<String, u64>> {
    let prefix = format!("{group}: ");
    let mut rows = text.lines().filter_map(|line| line.strip_prefix(&prefix));
    let (names, values) = rows
        .next()
        .zip(rows.next())
        .with_context(|| format!("the kernel shows no {group} counters"))?;
    names
        .split_whitespace()
        .zip(values.split_whitespace())
        .map(|(name, value)| Ok((name.to_string(), value.parse::<i64>()?.max(0) as u64)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softnet_columns_are_where_the_kernel_puts_them() {
        let text = "0000000a 0000000b 0000000c 00000000 00000000 00000000 00000000 00000000 \
                    00000000 0000000d 0000000e 00000000 00000003 00000000 00000000\n";
        let expected = Softnet {
            cpu: 3,
            processed: 10,
            dropped: 11,
            time_squeeze: 12,
            received_rps: 13,
            flow_limit: 14,
        };
        assert_eq!(parse_softnet(text).unwrap(), [expected]);
        assert!(parse_softnet("0000000a 0000000b\n").is_err());
    }

    #[test]
    fn udp_counters_of_both_families() {
        let v4 = "Udp: InDatagrams NoPorts\nUdp: 5 6\nUdpLite: InDatagrams\nUdpLite: 7\n";
        let counters = parse_udp(v4, "Ip6InReceives 1\nUdp6NoPorts      \t8\n").unwrap();
        let expected = [("InDatagrams", 5), ("NoPorts", 6), ("Udp6NoPorts", 8)];
        assert_eq!(counters, expected.map(|(k, v)| (k.to_string(), v)).into());
    }

    #[test]
    fn a_group_name_matches_as_a_whole() {
        let text = "TcpExt: A B\nTcpExt: 1 2\nTcp: C MaxConn\nTcp: 3 -1\n";
        let expected = [("C", 3), ("MaxConn", 0)];
        assert_eq!(
            parse_group(text, "Tcp").unwrap(),
            expected.map(|(k, v)| (k.to_string(), v)).into()
        );
        assert!(parse_group(text, "Udp").is_err());
    }
}
