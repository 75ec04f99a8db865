// SPDX-License-Identifier: MIT OR Apache-2.0
//! A container behind the device under test, as Docker sets one up: the host publishes a port of it
//! (DNAT), and its own connections leave with the host's address (masquerade).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, Ordering};

use anyhow::{Context, Result};

use super::frame::UdpFlows;
use super::link::{End, Link, LinkConfig};
use super::netns::Netns;
use super::tool::NFT;

/// The host's port, TCP and UDP.
pub const PUBLISHED: u16 = 80;

/// The container's.
pub const PORT: u16 = 8080;

/// See the module's documentation. It lives as long as the host's namespace.
pub struct Container {
    /// From the host (tester) to the container (dut).
    link: Link,
    /// Source ports of [`Self::published`] so far.
    ports: AtomicU16,
}

impl Container {
    /// Joins a container to the host whose device is `outside`.
    ///
    /// # Errors
    /// There is no `nft`, or the kernel has no NAT.
    pub fn new(outside: &End) -> Result<Self> {
        let config = LinkConfig {
            id: outside.id + 1,
            // As container engines leave it. With GRO, the packets of all CPUs would be processed on
            // the one that polls.
            gro: false,
            ..Default::default()
        };
        let link = Link::new(&outside.netns, &Netns::new("container")?, &config)?;
        link.dut.route_by(link.tester.ipv4)?;
        outside.netns.forward()?;
        // The ports differ from those of the container's sockets, as behind one address of many.
        let rules = format!(
            "
table ip nat {{
	chain prerouting {{
		type nat hook prerouting priority dstnat
		iifname {outside} meta l4proto {{ tcp, udp }} th dport {PUBLISHED} dnat to {}:{PORT}
	}}
	chain postrouting {{
		type nat hook postrouting priority srcnat
		oifname {outside} meta l4proto {{ tcp, udp }} masquerade to :5000-5999
	}}
}}
",
            link.dut.ipv4,
            outside = outside.name,
        );
        NFT.run(&outside.netns, &["-f", "-"], &rules)?;
        Ok(Self {
            link,
            ports: AtomicU16::new(0),
        })
    }

    /// Where its applications run.
    pub fn netns(&self) -> &Netns {
        &self.link.dut.netns
    }

    /// The address to which the host passes packets for [`PUBLISHED`].
    pub fn address(&self) -> SocketAddr {
        (self.link.dut.ipv4, PORT).into()
    }

    /// These flows, to the published port and from other source ports than those of the last call:
    /// the host remembers a connection after its end, and would take the first segments of the same
    /// one for old ones.
    ///
    /// # Errors
    /// All ports were used.
    pub fn published(&self, flows: UdpFlows) -> Result<UdpFlows> {
        let ports = flows.nr_flows.div_ceil(flows.nr_saddrs) as u16;
        let used = self.ports.fetch_add(ports, Ordering::Relaxed);
        let sport = flows.sport.checked_add(used);
        let sport = sport.filter(|sport| sport.checked_add(ports).is_some());
        Ok(UdpFlows {
            sport: sport.context("no source port is left: take fewer rounds")?,
            dport: PUBLISHED,
            ..flows
        })
    }

    /// [`Self::published`] flows, as the container receives them.
    pub fn inside(&self, flows: &UdpFlows) -> UdpFlows {
        let address = self.address();
        UdpFlows {
            daddr: address.ip(),
            dport: address.port(),
            ..flows.clone()
        }
    }
}
