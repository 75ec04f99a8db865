// SPDX-License-Identifier: MIT OR Apache-2.0
//! A bridge, as container engines set up by default.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
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

/// Limit on waiting for a port.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Joins ends of one namespace by a bridge, which lives as long as the namespace. It forwards by
/// destination MAC, and to every port while it has not learned where an address is. Returns when its
/// ports forward.
///
/// # Errors
/// The kernel has no bridge, or the namespace has one by this function.
pub fn bridge(netns: &Netns, ports: &[&End]) -> Result<()> {
    const NAME: &str = "bridge";
    netns.run(|| {
        rtnl::run(async |handle| handle.link().add(message(NAME)).execute().await)?
            .context("cannot make a bridge: is CONFIG_BRIDGE there?")
    })?;
    netns.run(|| join(NAME, ports))
}

/// Makes ends ports of a bridge of the calling thread's network namespace; returns when they forward.
///
/// # Errors
/// When one can't be made a port.
pub(super) fn join(bridge: &str, ports: &[&End]) -> Result<()> {
    let indices: Vec<_> = ports.iter().map(|port| port.ifindex).collect();
    rtnl::join(bridge, &indices)?;
    ports.iter().try_for_each(|port| wait_for_port(&port.name))
}

/// Waits until a port forwards: not before the kernel's work queue has set the device's operational
/// state (br_add_if() in net/bridge/br_if.c). Frames are dropped before.
fn wait_for_port(name: &str) -> Result<()> {
    /// BR_STATE_FORWARDING (linux/if_bridge.h).
    const FORWARDING: &str = "3";
    let state = format!("/sys/class/net/{name}/brport/state");
    let start = Instant::now();
    while fs::read_to_string(&state)?.trim() != FORWARDING {
        ensure!(
            start.elapsed() < TIMEOUT,
            "{name} is the port of a bridge, and forwards nothing after {TIMEOUT:?}"
        );
        sleep(Duration::from_millis(1));
    }
    Ok(())
}
