// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two virtio_net devices of a virtual machine, joined by its host.

use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, ensure};
use nix::net::if_::if_nametoindex;
use rtnetlink::LinkUnspec;
use rxsteer::host::device::Device;

use super::netns::Netns;
use super::rtnl;

/// Environment variable with the names of both devices. scripts/guest-init.sh sets it: a host's own
/// device must never be taken.
const NAMES: &str = "RXSTEER_VIRTIO";

/// Prefix length of the subnet.
const PREFIX: u8 = 24;

/// One of the devices. It returns to the host's network namespace when `netns` is gone.
pub struct Port {
    pub netns: Netns,
    pub name: String,
    pub ipv4: Ipv4Addr,
}

/// See the module's documentation.
pub struct Pair {
    /// The end that sends.
    pub tester: Port,
    /// The device under test.
    pub dut: Port,
}

impl Pair {
    /// Moves both devices into namespaces of their own, with addresses in one subnet.
    ///
    /// # Errors
    /// This machine has no such devices.
    pub fn new() -> Result<Self> {
        let names = std::env::var(NAMES).unwrap_or_default();
        let names: Vec<_> = names.split_whitespace().collect();
        let [dut, tester] = names[..] else {
            anyhow::bail!("{NAMES} does not name two virtio_net devices, as in `make guest`");
        };
        Ok(Self {
            dut: Port::new(dut, Netns::new("dut")?, 1)?,
            tester: Port::new(tester, Netns::new("tester")?, 2)?,
        })
    }
}

impl Port {
    fn new(name: &str, netns: Netns, host: u8) -> Result<Self> {
        let driver = Device::open(name)?.driver;
        ensure!(driver == "virtio_net", "{name} has the driver {driver}");
        let link = LinkUnspec::new_with_name(name).setns_by_fd(netns.fd().as_raw_fd());
        rtnl::run(async |handle| handle.link().set(link.build()).execute().await)?
            .with_context(|| format!("cannot move {name}"))?;
        let ipv4 = Ipv4Addr::new(198, 19, 253, host);
        netns.run(|| {
            let index = if_nametoindex(name)?;
            rtnl::run(async |handle| {
                let address = handle.address().add(index, ipv4.into(), PREFIX);
                address.execute().await
            })?
            .with_context(|| format!("{name} takes no address"))?;
            rtnl::set_up(name, true)
        })?;
        Ok(Self {
            netns,
            name: name.to_owned(),
            ipv4,
        })
    }
}
