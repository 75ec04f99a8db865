// SPDX-License-Identifier: MIT OR Apache-2.0
//! One conversation with rtnetlink, from a thread that has no async runtime.

use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use nix::net::if_::if_nametoindex;
use rtnetlink::{Handle, LinkUnspec, LinkVeth, RouteMessageBuilder, RouteNextHopBuilder};

/// Runs `talk` with a connection to the calling thread's network namespace.
pub(super) fn run<T>(talk: impl AsyncFnOnce(Handle) -> T) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("no async runtime for rtnetlink")?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().context("no rtnetlink socket")?;
        tokio::spawn(connection);
        Ok(talk(handle).await)
    })
}

/// Sets a device of the calling thread's network namespace up or down.
///
/// # Errors
/// When there is no such device.
pub fn set_up(name: &str, up: bool) -> Result<()> {
    let link = LinkUnspec::new_with_name(name);
    let link = if up { link.up() } else { link.down() };
    run(async |handle| handle.link().set(link.build()).execute().await)?
        .with_context(|| format!("{name} can't be set up or down"))
}

/// Makes devices, by interface index, ports of a bridge or bond of the calling thread's network
/// namespace.
///
/// # Errors
/// When there is no such device, or it does not take one of them.
pub(super) fn join(device: &str, ports: &[u32]) -> Result<()> {
    let index = if_nametoindex(device).with_context(|| device.to_owned())?;
    run(async |handle| {
        for port in ports {
            let port = LinkUnspec::new_with_index(*port).controller(index);
            handle.link().set(port.build()).execute().await?;
        }
        Ok(())
    })?
}

/// Makes a device of the calling thread's network namespace the port of none.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn leave(port: u32) -> Result<()> {
    let port = LinkUnspec::new_with_index(port).nocontroller().build();
    run(async |handle| handle.link().set(port).execute().await)??;
    Ok(())
}

/// Renames a device of the calling thread's network namespace.
///
/// # Errors
/// When there is no such device, or another one has the name.
pub fn rename(from: &str, to: &str) -> Result<()> {
    let index = if_nametoindex(from).with_context(|| from.to_owned())?;
    let link = LinkUnspec::new_with_index(index).name(to.to_owned());
    run(async |handle| handle.link().set(link.build()).execute().await)?
        .with_context(|| format!("{from} can't be renamed {to}"))
}

/// Makes veth pairs in the calling thread's network namespace: PREFIX0 and peer0, PREFIX1 and so on.
///
/// # Errors
/// When one can't be made.
pub fn veths(prefix: &str, count: u32) -> Result<()> {
    run(async |handle| {
        for number in 0..count {
            let names = [prefix, "peer"].map(|name| format!("{name}{number}"));
            let pair = LinkVeth::new(&names[0], &names[1]);
            handle.link().add(pair.build()).execute().await?;
        }
        Ok(())
    })?
}

/// Adds a route to a host by these devices of the calling thread's network namespace, of which the kernel
/// takes one for each packet. Devices with ARP need a neighbour.
///
/// # Errors
/// A device is missing or down, or the kernel has no such routes (CONFIG_IP_ROUTE_MULTIPATH).
pub fn route(host: Ipv4Addr, devices: &[&str]) -> Result<()> {
    let hop = |device: &&str| {
        let hop = RouteNextHopBuilder::new_ipv4().interface(if_nametoindex(*device)?);
        Ok(hop.build())
    };
    let hops = devices.iter().map(hop).collect::<Result<_>>()?;
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(host, 32)
        .multipath(hops)
        .build();
    run(async |handle| handle.route().add(route).execute().await)?
        .with_context(|| format!("no route to {host} by {devices:?}"))
}
