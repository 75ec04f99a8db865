// SPDX-License-Identifier: MIT OR Apache-2.0
//! A container behind the device under test, as Docker sets one up: the host publishes a port of it
//! (DNAT), and its own connections leave with the host's address (masquerade).

use std::net::SocketAddr;

use anyhow::Result;

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
        Ok(Self { link })
    }

    /// Where its applications run.
    pub fn netns(&self) -> &Netns {
        &self.link.dut.netns
    }

    /// The address to which the host passes packets for [`PUBLISHED`].
    pub fn address(&self) -> SocketAddr {
        (self.link.dut.ipv4, PORT).into()
    }
}
