// SPDX-License-Identifier: MIT OR Apache-2.0
//! A bridge, as container engines set up by default.

use anyhow::{Context, Result};
use rtnetlink::{LinkBridge, LinkUnspec};

use super::link::End;
use super::netns::Netns;
use super::rtnl;

/// Joins ends of one namespace by a bridge, which lives as long as the namespace. It forwards by
/// destination MAC, and to every port while it has not learned where an address is.
///
/// # Errors
/// The kernel has no bridge, or the namespace has one by this function.
pub fn bridge(netns: &Netns, ports: &[&End]) -> Result<()> {
    const NAME: &str = "bridge";
    netns.run(|| {
        let bridge = LinkBridge::new(NAME).build();
        rtnl::run(async |handle| handle.link().add(bridge).execute().await)?
            .context("cannot make a bridge: is CONFIG_BRIDGE there?")
    })?;
    join(netns, NAME, ports)
}

/// Makes ends ports of the bridge with this name.
///
/// # Errors
/// There is no such bridge.
pub(super) fn join(netns: &Netns, bridge: &str, ports: &[&End]) -> Result<()> {
    netns.run(|| {
        let index = nix::net::if_::if_nametoindex(bridge)?;
        rtnl::run(async |handle| {
            for port in ports {
                let port = LinkUnspec::new_with_index(port.ifindex).controller(index);
                handle.link().set(port.build()).execute().await?;
            }
            anyhow::Ok(())
        })?
    })
}
