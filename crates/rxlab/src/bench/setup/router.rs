// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device under test as a router with a firewall, and a host behind it.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::bench::experiment::{Unfit, fit};
use crate::bench::setup::traffic::Destination;
use crate::lab::frame::{Frames, UdpFlows};
use crate::lab::generator::{Generator, GeneratorConfig};
use crate::lab::link::{End, Link, LinkConfig, VXLAN_PORT};
use crate::lab::netns::Netns;
use crate::lab::xdp::Xdp;

/// The firewall's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ruleset {
    /// A small ruleset with connection tracking: packets of known connections match an early rule.
    Stateful,
    /// [`NR_BLOCKED`] rules for blocked sources before the rule that accepts. There is no
    /// connection tracking, so each packet is compared with each rule.
    Blocklist,
}

/// Rules of [`Ruleset::Blocklist`] that match no packet of the flows.
pub const NR_BLOCKED: u8 = 150;

const STATEFUL: &str = "
table inet filter {
	counter expected { }
	counter others { }
	set served {
		type inet_service
		elements = { 9, 53, 443 }
	}
	chain input {
		type filter hook input priority filter; policy drop;
		iif lo accept
		udp dport $vxlan accept
		ct state established,related accept
	}
	chain forward {
		type filter hook forward priority filter; policy drop;
		ct state established,related counter name expected accept
		ct state invalid drop
		udp dport @served counter name others accept
	}
}
";

impl Ruleset {
    /// The rules in nft's syntax.
    fn text(self) -> String {
        let Self::Blocklist = self else {
            return STATEFUL.replace("$vxlan", &VXLAN_PORT.to_string());
        };
        let rule = |n| {
            let (saddr, dport) = blocked(n);
            format!("\t\tip saddr {saddr} udp dport {dport} drop\n")
        };
        let rules: String = (1..=NR_BLOCKED).map(rule).collect();
        format!(
            "
table inet filter {{
	counter entered {{ }}
	counter expected {{ }}
	chain forward {{
		type filter hook forward priority filter; policy drop;
		counter name entered
{rules}		udp dport 9 counter name expected accept
	}}
}}
"
        )
    }
}

/// Source address and destination port that rule number `n` of [`Ruleset::Blocklist`] drops; `n`
/// counts from 1, addresses are in TEST-NET-2 (RFC 5737).
pub fn blocked(n: u8) -> (Ipv4Addr, u16) {
    (Ipv4Addr::new(198, 51, 100, n), 40_000 + u16::from(n))
}

/// Rate of the packets that establish connections, frames/s.
const WARM_UP: u64 = 50_000;

/// Limit on their arrival.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The firewall and the host behind the router; removed with their namespaces.
pub struct Router {
    ruleset: Ruleset,
    /// From the host (tester) to the router (dut).
    behind: Link,
    /// Drops and counts the packets at the host.
    end: Xdp,
}

/// Packets that the firewall passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// By the measured rule: of known connections in either direction, or after the whole list of
    /// blocked sources.
    pub expected: u64,
    /// By other rules: first packets of a connection, or before the reply; or packets that did not
    /// pass the whole list.
    pub others: u64,
}

impl Router {
    /// Turns the namespace of a device into a router with a firewall.
    ///
    /// # Errors
    /// [`Unfit`] when there is no `nft`, or the kernel lacks a feature that the rules need.
    pub fn new(outside: &End, ruleset: Ruleset) -> Result<Self> {
        let (router, host) = (&outside.netns, Netns::new("host")?);
        nft(router, &["-f", "-"], &ruleset.text())?;
        let config = LinkConfig {
            id: outside.id + 1,
            ..Default::default()
        };
        let behind = Link::new(&host, router, &config)?;
        router.forward()?;
        behind.tester.route_by(behind.dut.ipv4)?;
        let end = Xdp::drop(&behind.tester)?;
        Ok(Self {
            ruleset,
            behind,
            end,
        })
    }

    /// Flows to the host behind the router.
    pub fn flows(&self, outside: &End, nr_flows: u32) -> UdpFlows {
        UdpFlows {
            daddr: IpAddr::V4(self.host()),
            ..UdpFlows::to(outside, nr_flows)
        }
    }

    fn host(&self) -> Ipv4Addr {
        self.behind.tester.ipv4
    }

    /// Establishes every flow as a known connection, by a packet of `frames` and a reply: without a
    /// reply, each packet counts as new. The kernel forgets a connection after 30 s without a packet
    /// at the earliest (nf_conntrack_udp_timeout). Does nothing for a firewall without connection
    /// tracking.
    ///
    /// # Errors
    /// [`Unfit`] when the connections do not become known.
    pub fn establish(
        &self,
        outside: &Link,
        cpu: u32,
        flows: &UdpFlows,
        frames: Frames,
    ) -> Result<()> {
        if self.ruleset == Ruleset::Blocklist {
            return Ok(());
        }
        let all = u64::from(flows.nr_flows);
        let before = self.received();
        let config = GeneratorConfig::lossless(frames, Some(all)).at(WARM_UP);
        Generator::start(outside, cpu, &config)?.wait()?;
        until(|| Ok(self.received() - before), all, "packets")?;
        let before = self.passed()?.expected;
        self.behind.tester.netns.run(|| {
            let socket = UdpSocket::bind((self.host(), flows.dport))?;
            for flow in 0..flows.nr_flows {
                socket.send_to(&[0], flows.source(flow))?;
            }
            Ok(())
        })?;
        until(|| Ok(self.passed()?.expected - before), all, "replies")
    }

    /// Counters of the firewall.
    ///
    /// # Errors
    /// When `nft` fails.
    pub fn passed(&self) -> Result<Passed> {
        let command = ["-j", "list", "counters", "table", "inet", "filter"];
        let output = nft(&self.behind.dut.netns, &command, "")?;
        let listed: Value = serde_json::from_slice(&output).context("nft -j")?;
        let count = |name: &str| {
            let objects = listed["nftables"].as_array()?;
            let mut counters = objects.iter().map(|object| &object["counter"]);
            counters.find(|counter| counter["name"] == name)?["packets"].as_u64()
        };
        let count = |name: &str| count(name).with_context(|| format!("nft lists no {name}"));
        let expected = count("expected")?;
        let others = match self.ruleset {
            Ruleset::Stateful => count("others")?,
            Ruleset::Blocklist => count("entered")?.saturating_sub(expected),
        };
        Ok(Passed { expected, others })
    }
}

impl Destination for Router {
    fn received(&self) -> u64 {
        self.end.received(0)
    }

    /// Packets dropped at the ring towards the host.
    fn dropped(&self) -> Result<u64> {
        let device = &self.behind.dut;
        let path = format!("/sys/class/net/{}/statistics/tx_dropped", device.name);
        device
            .netns
            .run(|| Ok(fs::read_to_string(&path)?.trim().parse()?))
    }
}

/// Waits until `count` has reached `all`.
fn until(count: impl Fn() -> Result<u64>, all: u64, what: &str) -> Result<()> {
    let start = Instant::now();
    loop {
        let passed = count()?;
        if passed >= all {
            return Ok(());
        }
        fit!(
            start.elapsed() < TIMEOUT,
            "the router forwarded {passed} of {all} {what} that make its connections"
        );
        sleep(Duration::from_millis(10));
    }
}

/// Runs `nft` in a namespace, with `input` on stdin.
fn nft(netns: &Netns, arguments: &[&str], input: &str) -> Result<Vec<u8>> {
    let said = crate::lab::tool::NFT.run(netns, arguments, input);
    Ok(said.map_err(|e| Unfit(format!("{e:#}")))?)
}
