// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two network devices of a virtual machine, joined by its host.

use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::net::if_::if_nametoindex;
use rtnetlink::{LinkUnspec, LinkVlan};
use rxsteer::host::device::Device;

use super::ethtool::Ethtool;
use super::netns::Netns;
use super::rtnl;
use super::stacked::{mac_of, neighbour};

/// Environment variable with the names of both devices. scripts/guest-init.sh sets it: a host's own
/// device must never be taken.
const NAMES: &str = "RXSTEER_NICS";

/// Prefix length of the subnets.
const PREFIX: u8 = 24;

/// Limit on its return.
const RETURN: Duration = Duration::from_secs(10);

/// One of the devices. It returns to the host's network namespace when `netns` is gone.
pub struct Port {
    pub netns: Netns,
    pub name: String,
    pub ipv4: Ipv4Addr,
    pub driver: String,
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
            anyhow::bail!("{NAMES} does not name two network devices, as in `make guest`");
        };
        let pair = Self {
            dut: Port::new(dut, Netns::new("dut")?, 1)?,
            tester: Port::new(tester, Netns::new("tester")?, 2)?,
        };
        pair.know_each_other()?;
        Ok(pair)
    }

    /// Without ARP, which a device that restarts would lose.
    fn know_each_other(&self) -> Result<()> {
        for (port, other) in [(&self.dut, &self.tester), (&self.tester, &self.dut)] {
            let mac = other.netns.run(|| mac_of(&other.name))?;
            port.netns.run(|| neighbour(&port.name, other.ipv4, &mac))?;
        }
        Ok(())
    }

    /// The ends of a VLAN on both devices.
    ///
    /// # Errors
    /// When the kernel has none.
    pub fn vlan(&self, id: u16) -> Result<Pair> {
        let pair = Self {
            tester: self.tester.vlan(id, 2)?,
            dut: self.dut.vlan(id, 1)?,
        };
        pair.know_each_other()?;
        Ok(pair)
    }

    /// Sets the largest packets of both.
    ///
    /// # Errors
    /// When a driver refuses.
    pub fn set_mtu(&self, mtu: u32) -> Result<()> {
        [&self.tester, &self.dut]
            .into_iter()
            .try_for_each(|port| port.set_mtu(mtu))
    }
}

impl Port {
    fn new(name: &str, netns: Netns, host: u8) -> Result<Self> {
        // The namespace of the last test may still have it.
        let start = Instant::now();
        let driver = loop {
            match Device::open(name) {
                Ok(device) => break device.driver,
                Err(_) if start.elapsed() < RETURN => sleep(Duration::from_millis(20)),
                Err(error) => return Err(error),
            }
        };
        let link = LinkUnspec::new_with_name(name).setns_by_fd(netns.fd().as_raw_fd());
        rtnl::run(async |handle| handle.link().set(link.build()).execute().await)?
            .with_context(|| format!("cannot move {name}"))?;
        let port = Self {
            netns,
            name: name.to_owned(),
            ipv4: Ipv4Addr::new(198, 19, 253, host),
            driver,
        };
        port.set_up()?;
        port.receive_on_first_cpu()?;
        // A connection that a device has stopped would keep the namespace, and the device in it, for minutes.
        port.netns.run(|| {
            fs::write("/proc/sys/net/ipv4/tcp_orphan_retries", "1")
                .context("retransmissions of closed sockets")
        })?;
        Ok(port)
    }

    /// Delivers the interrupts of all queues to CPU 0, as a single queue's are.
    fn receive_on_first_cpu(&self) -> Result<()> {
        self.netns.run(|| {
            for folder in ["device/msi_irqs", "device/../msi_irqs"] {
                let folder = format!("/sys/class/net/{}/{folder}", self.name);
                for irq in fs::read_dir(folder).into_iter().flatten().flatten() {
                    let path = Path::new("/proc/irq").join(irq.file_name());
                    // Not all can be moved.
                    let _ = fs::write(path.join("smp_affinity"), "1");
                }
            }
            Ok(())
        })
    }

    fn vlan(&self, id: u16, host: u8) -> Result<Self> {
        let port = Self {
            netns: self.netns.clone(),
            name: format!("vlan{id}"),
            ipv4: Ipv4Addr::new(198, 19, 252, host),
            driver: self.driver.clone(),
        };
        self.netns.run(|| {
            let below = if_nametoindex(self.name.as_str())?;
            let vlan = LinkVlan::new(&port.name, below, id).build();
            rtnl::run(async |handle| handle.link().add(vlan).execute().await)?
                .with_context(|| format!("no VLAN on {}", self.name))
        })?;
        port.set_up()?;
        Ok(port)
    }

    fn set_up(&self) -> Result<()> {
        self.netns.run(|| {
            let index = if_nametoindex(self.name.as_str())?;
            rtnl::run(async |handle| {
                let address = handle.address().add(index, self.ipv4.into(), PREFIX);
                address.execute().await
            })?
            .with_context(|| format!("{} takes no address", self.name))?;
            rtnl::set_up(&self.name, true)
        })
    }

    fn set_mtu(&self, mtu: u32) -> Result<()> {
        let link = LinkUnspec::new_with_name(&self.name).mtu(mtu).build();
        self.netns.run(|| {
            rtnl::run(async |handle| handle.link().set(link).execute().await)?
                .with_context(|| format!("{} takes no MTU of {mtu}", self.name))
        })
    }

    /// Its queues, rings and counters.
    ///
    /// # Errors
    /// It is gone.
    pub fn ethtool(&self) -> Result<Ethtool> {
        self.netns.run(|| Ethtool::open(&self.name))
    }
}
