// SPDX-License-Identifier: MIT OR Apache-2.0
//! A bridge, as container engines set up by default.

use anyhow::{Context, Result};
use rtnetlink::LinkBridge;
use rtnetlink::packet_route::link::{InfoBridge, LinkMessage};

use super::link::End;
use super::netns::Netns;
use super::rtnl;

/// A bridge that sends no packet of its own. One that snoops joins the group of all snoopers, and
/// reports that through its ports twice within about a second
/// (br_multicast_join_snoopers() in net/bridge/br_multicast.c).
pub(super) fn message(name: &str) -> LinkMessage {
    LinkBridge::new(name)
        .append_info_data(InfoBridge::MulticastSnooping(false))
        .build()
}

/// Joins ends of one namespace by a bridge, which lives as long as the namespace. It forwards by
/// destination MAC, and to every port while it has not learned where an address is.
///
/// # Errors
/// The kernel has no bridge, or the namespace has one by this function.
pub fn bridge(netns: &Netns, ports: &[&End]) -> Result<()> {
    const NAME: &str = "bridge";
    netns.run(|| {
        rtnl::run(async |handle| handle.link().add(message(NAME)).execute().await)?
            .context("cannot make a bridge: is CONFIG_BRIDGE there?")
    })?;
    let ports: Vec<_> = ports.iter().map(|port| port.ifindex).collect();
    netns.run(|| rtnl::join(NAME, &ports))
}
