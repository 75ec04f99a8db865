// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices on top of both ends of a link, such as the ends of a tunnel.

use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use nix::net::if_::if_nametoindex;
use rtnetlink::packet_route::link::{LinkMessage, MacVlanMode};
use rtnetlink::{
    Handle, LinkGre, LinkIpIp, LinkMacVlan, LinkUnspec, LinkVlan, LinkVxlan, LinkWireguard,
};

use super::bridge;
use super::link::{End, Link, VXLAN_PORT};
use super::netns::Netns;
use super::rtnl;
use super::tool::WG;

/// Prefix length of the devices' subnet.
const PREFIX: u8 = 24;

/// A kind of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The device under test is the bridge's only port; the other end has an address in its subnet.
    Bridge,
    /// IP in GRE: packets without a link layer header.
    Gre,
    /// IP in IP, likewise.
    IpIp,
    MacVlan,
    Vlan,
    Vxlan,
    /// Decrypted packets, without a link layer header.
    WireGuard,
}

impl Kind {
    pub const ALL: [Self; 7] = [
        Self::Bridge,
        Self::Gre,
        Self::IpIp,
        Self::MacVlan,
        Self::Vlan,
        Self::Vxlan,
        Self::WireGuard,
    ];

    fn has_mac(self) -> bool {
        !matches!(self, Self::Gre | Self::IpIp | Self::WireGuard)
    }

    /// The device on `end`; `None` if `end` itself is one.
    fn message(self, name: &str, end: &End, other: &End, tested: bool) -> Option<LinkMessage> {
        const VLAN: u16 = 7;
        const VNI: u32 = 7;
        let (local, remote) = (end.ipv4, other.ipv4);
        Some(match self {
            Self::Bridge if !tested => return None,
            Self::Bridge => bridge::message(name),
            Self::Gre => LinkGre::new(name).local(local).remote(remote).build(),
            Self::IpIp => LinkIpIp::new(name).local(local).remote(remote).build(),
            Self::MacVlan => LinkMacVlan::new(name, end.ifindex, MacVlanMode::Bridge).build(),
            Self::Vlan => LinkVlan::new(name, end.ifindex, VLAN).build(),
            Self::Vxlan => {
                let vxlan = LinkVxlan::new(name, VNI).port(VXLAN_PORT);
                vxlan.local(local).remote(remote).build()
            }
            Self::WireGuard => LinkWireguard::new(name).build(),
        })
    }
}

/// See the module's documentation. They live as long as the link's namespaces.
pub struct Stacked {
    /// The device under test.
    pub name: String,
    /// Its address.
    pub ipv4: Ipv4Addr,
    /// That of the other end.
    pub peer: Ipv4Addr,
}

impl Stacked {
    /// Makes such devices, with addresses and without ARP.
    ///
    /// # Errors
    /// When the kernel does not know the kind.
    pub fn new(link: &Link, kind: Kind) -> Result<Self> {
        let [near, far] = [1, 2].map(|host| Ipv4Addr::new(198, 19, 254, host));
        // Not gre0 and the like, which their modules make.
        let name = format!("{kind:?}").to_lowercase() + "7";
        let make = |end: &End, other: &End, tested, address| {
            let message = kind.message(&name, end, other, tested);
            let name = message.as_ref().map_or(&end.name, |_| &name).clone();
            end.netns
                .run(|| rtnl::run(async |handle| make(&handle, message, &name, address).await)?)
                .with_context(|| format!("cannot make a device of kind {kind:?}"))
        };
        let (dut, tester) = (&link.dut, &link.tester);
        make(dut, tester, true, near)?;
        make(tester, dut, false, far)?;
        if kind == Kind::WireGuard {
            wireguard(link, &name)?;
        }
        if kind == Kind::Bridge {
            dut.netns.run(|| bridge::join(&name, &[dut]))?;
        }
        if kind.has_mac() {
            let other = match kind {
                Kind::Bridge => &tester.name,
                _ => &name,
            };
            // A bridge has taken the address of its port.
            let near_mac = dut.netns.run(|| mac_of(&name))?;
            let far_mac = tester.netns.run(|| mac_of(other))?;
            dut.netns.run(|| neighbour(&name, far, &far_mac))?;
            tester.netns.run(|| neighbour(other, near, &near_mac))?;
        }
        Ok(Self {
            name,
            ipv4: near,
            peer: far,
        })
    }
}

/// The ends of a GRE tunnel over the loopback device of `netns`: a namespace for each address.
///
/// # Errors
/// When the kernel does not know GRE.
pub fn over_loopback(netns: &Netns, addresses: [Ipv4Addr; 2]) -> Result<[Netns; 2]> {
    const NAME: &str = "gre7";
    let locals = [1, 2].map(|host| Ipv4Addr::new(127, 0, 0, host));
    let ends = [Netns::new("near")?, Netns::new("far")?];
    for (own, end) in ends.iter().enumerate() {
        let (local, remote) = (locals[own], locals[1 - own]);
        let gre = LinkGre::new(NAME).local(local).remote(remote).build();
        // By default that of lo, with which TCP would need no segments.
        let there = LinkUnspec::new_with_name(NAME)
            .mtu(1500)
            .setns_by_fd(end.fd().as_raw_fd());
        let made = netns.run(|| {
            rtnl::run(async |handle| {
                handle.link().add(gre).execute().await?;
                handle.link().set(there.build()).execute().await
            })
        })?;
        made.context("cannot make a GRE tunnel")?;
        end.run(|| rtnl::run(async |handle| make(&handle, None, NAME, addresses[own]).await)?)?;
    }
    Ok(ends)
}

/// Makes the device, unless it is there, and gives it an address.
async fn make(
    handle: &Handle,
    message: Option<LinkMessage>,
    name: &str,
    address: Ipv4Addr,
) -> Result<()> {
    if let Some(message) = message {
        handle.link().add(message).execute().await?;
    }
    let index = if_nametoindex(name)?;
    let up = LinkUnspec::new_with_index(index).arp(false).up();
    handle.link().set(up.build()).execute().await?;
    let add = handle.address().add(index, address.into(), PREFIX);
    Ok(add.execute().await?)
}

/// The link layer address of a device of the calling thread's namespace.
pub(super) fn mac_of(device: &str) -> Result<Vec<u8>> {
    Ok(
        std::fs::read_to_string(format!("/sys/class/net/{device}/address"))?
            .trim()
            .split(':')
            .filter_map(|byte| u8::from_str_radix(byte, 16).ok())
            .collect(),
    )
}

/// Adds a permanent neighbour there.
pub(super) fn neighbour(device: &str, address: Ipv4Addr, mac: &[u8]) -> Result<()> {
    let index = if_nametoindex(device)?;
    rtnl::run(async |handle| {
        let neighbour = handle.neighbours().add(index, address.into());
        neighbour.link_layer_address(mac).execute().await
    })?
    .with_context(|| format!("no neighbour for {device}"))
}

/// Lets both ends' devices of this name exchange what the other one's key opens.
fn wireguard(link: &Link, name: &str) -> Result<()> {
    const PORT: u16 = 51820;
    let ends = [&link.dut, &link.tester];
    let wg = |end: &End, arguments: &[&str], input: &str| {
        let printed = WG.run(&end.netns, arguments, input)?;
        anyhow::Ok(String::from_utf8(printed)?.trim().to_owned())
    };
    let private = [wg(ends[0], &["genkey"], "")?, wg(ends[1], &["genkey"], "")?];
    for (end, own, other, theirs) in [
        (ends[0], &private[0], ends[1], &private[1]),
        (ends[1], &private[1], ends[0], &private[0]),
    ] {
        let public = wg(end, &["pubkey"], theirs)?;
        let config = format!(
            "[Interface]\nPrivateKey = {own}\nListenPort = {PORT}\n\
             [Peer]\nPublicKey = {public}\nAllowedIPs = 0.0.0.0/0\nEndpoint = {}:{PORT}\n",
            other.ipv4
        );
        wg(end, &["setconf", name, "/proc/self/fd/0"], &config)?;
    }
    Ok(())
}
