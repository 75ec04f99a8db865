// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters of the kernel: UDP and TCP.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};

use super::netns::Netns;

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
