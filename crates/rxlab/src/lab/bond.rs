// SPDX-License-Identifier: MIT OR Apache-2.0
//! A bond: one device over several ports.

use anyhow::{Context, Result};
use rtnetlink::LinkBond;

use super::link::End;
use super::netns::Netns;
use super::rtnl;

/// Makes bond `name` without ports, which is up. It lives as long as the namespace.
///
/// # Errors
/// The kernel has no bonds, or the namespace has a device of that name.
pub fn bond(netns: &Netns, name: &str) -> Result<()> {
    let bond = LinkBond::new(name).up().build();
    netns.run(|| {
        rtnl::run(async |handle| handle.link().add(bond).execute().await)?
            .context("cannot make a bond: is CONFIG_BONDING there?")
    })
}

/// Makes `end` a port of the bond in its namespace. The bond takes its address, and takes only
/// devices that are down.
///
/// # Errors
/// There is no such bond.
pub fn add_port(bond: &str, end: &End) -> Result<()> {
    end.netns.run(|| {
        rtnl::set_up(&end.name, false)?;
        rtnl::join(bond, &[end.ifindex])
    })
}

/// Takes `end` out of its bond. The device is down then.
///
/// # Errors
/// When the kernel refuses.
pub fn remove_port(end: &End) -> Result<()> {
    end.netns.run(|| rtnl::leave(end.ifindex))
}
