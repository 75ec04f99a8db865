// SPDX-License-Identifier: MIT OR Apache-2.0
//! A veth pair between two namespaces that carries no packets of its own.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use nix::ifaddrs::getifaddrs;
use rtnetlink::packet_route::link::{InfoData, InfoVeth, LinkAttribute, LinkMessage};
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVeth, LinkVxlan, RouteMessageBuilder};
use rxsteer::host::device::Device;
use rxsteer::host::tc::TcLink;

use super::ethtool::{Ethtool, Offload};
use super::netns::Netns;
use super::rtnl;
use super::wire;

/// VXLAN's UDP port (IANA).
pub const VXLAN_PORT: u16 = 4789;

/// Configuration of a [`Link`].
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// 0…31; selects subnet and MACs, which differ between links that meet in one namespace.
    pub id: u8,
    /// Receive queues of the device under test. A frame sent on CPU c arrives in queue c modulo
    /// this number (veth_select_rxq() in drivers/net/veth.c).
    pub queues: u32,
    /// Receive queues of the tester, selected by flow. More than one if replies exceed a ring of
    /// 256 frames.
    pub reply_queues: u32,
    /// MTU of both ends, bytes.
    pub mtu: u32,
    /// Assigns IPv6 addresses; otherwise IPv6 is off on both ends.
    pub ipv6: bool,
    /// GRO at the device under test. With GRO, its NAPI exists from the start and survives changes
    /// of the XDP program, as on a real NIC. Without, the NAPI exists only under an XDP program, and packets
    /// keep the hash of their sender's socket, as a container's do.
    pub gro: bool,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            id: 0,
            queues: 1,
            reply_queues: 1,
            mtu: 1500,
            ipv6: false,
            gro: true,
        }
    }
}

/// One end of a [`Link`], or a device of the host.
pub struct End {
    pub netns: Netns,
    /// Device name. In the lab it is unique on the host, so that the NAPI threads can be found by
    /// it.
    pub name: String,
    pub ifindex: u32,
    pub mac: [u8; 6],
    /// In the lab in 198.18.0.0/15, the range for benchmarks (RFC 2544, RFC 6815); unspecified if
    /// there is none.
    pub ipv4: Ipv4Addr,
    /// In the lab in 2001:2::/48, the range for benchmarks (RFC 5180), even if IPv6 is off;
    /// unspecified if a device of the host has none.
    pub ipv6: Ipv6Addr,
    /// Number of receive queues.
    pub queues: u32,
    /// The link's number, see [`LinkConfig::id`].
    pub id: u8,
    /// Its counters and offloads.
    pub ethtool: Ethtool,
    /// Its packets begin with the IP header.
    pub without_mac: bool,
    /// Modes without an XDP program of their own run under one that passes every frame: the receive
    /// path of a veth differs without one.
    pub pass: bool,
}

/// A veth pair. It lives as long as its two namespaces. Addresses and neighbours are permanent, ARP
/// and neighbour discovery are off, so all packets on it come from the caller.
pub struct Link {
    /// The end that sends.
    pub tester: End,
    /// The device under test.
    pub dut: End,
    _wire: Option<TcLink>,
}

/// Prefix of the names of devices under test.
const DUT: &str = "nic";

/// Prefix lengths of a link's subnets.
const PREFIX_V4: u8 = 20;
const PREFIX_V6: u8 = 64;

/// The address numbered `host` in the IPv4 subnet of link `id`.
pub(super) fn ipv4(id: u8, host: u32) -> Ipv4Addr {
    let base = u32::from(Ipv4Addr::new(198, 18, 0, 0));
    Ipv4Addr::from(base + (u32::from(id) << (32 - PREFIX_V4)) + host)
}

/// The address numbered `host` in the IPv6 subnet of link `id`.
pub(super) fn ipv6(id: u8, host: u32) -> Ipv6Addr {
    let [high, low] = [(host >> 16) as u16, host as u16];
    Ipv6Addr::new(0x2001, 2, 0, u16::from(id), 0, 0, high, low)
}

/// Properties of an end before its device exists.
struct Plan<'a> {
    netns: &'a Netns,
    name: String,
    mac: [u8; 6],
    host: u32,
    rx_queues: u32,
    tx_queues: u32,
}

impl Plan<'_> {
    /// Adds attributes that the builder does not support.
    fn message(&self, mut message: LinkMessage, config: &LinkConfig) -> LinkMessage {
        message.attributes.extend([
            LinkAttribute::Address(self.mac.to_vec()),
            LinkAttribute::Mtu(config.mtu),
            LinkAttribute::NumTxQueues(self.tx_queues),
            LinkAttribute::NumRxQueues(self.rx_queues),
        ]);
        message
    }

    /// Brings the device up, with its addresses and a neighbour entry for `peer`.
    fn configure(&self, config: &LinkConfig, peer: &Plan) -> Result<End> {
        let (ifindex, ethtool) = self.netns.run(|| {
            let ethtool = Ethtool::open(&self.name)?;
            if config.ipv6 {
                let path = format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", self.name);
                fs::write(&path, "0").with_context(|| format!("no IPv6 here: {path}"))?;
            }
            let ifindex = nix::net::if_::if_nametoindex(self.name.as_str())?;
            rtnl::run(async |handle| self.address(&handle, ifindex, config, peer).await)??;
            Ok((ifindex, ethtool))
        })?;
        Ok(End {
            netns: self.netns.clone(),
            name: self.name.clone(),
            ifindex,
            mac: self.mac,
            ipv4: ipv4(config.id, self.host),
            ipv6: ipv6(config.id, self.host),
            queues: self.rx_queues,
            id: config.id,
            ethtool,
            without_mac: false,
            pass: true,
        })
    }

    async fn address(
        &self,
        handle: &rtnetlink::Handle,
        ifindex: u32,
        config: &LinkConfig,
        peer: &Plan<'_>,
    ) -> Result<()> {
        // Without ARP, IPv6 also joins no solicited-node groups and sends no MLD reports.
        let up = LinkUnspec::new_with_index(ifindex)
            .arp(false)
            .multicast(false)
            .up();
        handle.link().set(up.build()).execute().await?;
        let id = config.id;
        let mut pairs: Vec<(IpAddr, u8, IpAddr)> = vec![(
            ipv4(id, self.host).into(),
            PREFIX_V4,
            ipv4(id, peer.host).into(),
        )];
        if config.ipv6 {
            let (own, other) = (ipv6(id, self.host), ipv6(id, peer.host));
            pairs.push((own.into(), PREFIX_V6, other.into()));
        }
        for (own, prefix, other) in pairs {
            let address = handle.address().add(ifindex, own, prefix);
            address.execute().await?;
            let neighbour = handle.neighbours().add(ifindex, other);
            neighbour.link_layer_address(&peer.mac).execute().await?;
        }
        Ok(())
    }
}

impl End {
    /// A device in the caller's network namespace, with its first address of each family. The
    /// device is not changed.
    ///
    /// # Errors
    /// There is no such device, it is down or has no address.
    pub fn of_host(name: &str) -> Result<Self> {
        let device = Device::open(name)?;
        ensure!(
            device.up,
            "{name} is down: nothing can be received; `ip link set dev {name} up`"
        );
        let (mut ipv4, mut ipv6, mut mac) = (None, None, None);
        for address in getifaddrs().context("cannot list addresses")? {
            let Some(is) = address.address.filter(|_| address.interface_name == name) else {
                continue;
            };
            if let Some(v4) = is.as_sockaddr_in() {
                ipv4 = ipv4.or(Some(v4.ip()));
            } else if let Some(v6) = is.as_sockaddr_in6() {
                // A link-local address is valid only with its interface.
                ipv6 = ipv6.or(Some(v6.ip()).filter(|ip| !ip.is_unicast_link_local()));
            } else if let Some(link) = is.as_link_addr() {
                mac = link.addr();
            }
        }
        ensure!(
            ipv4.is_some() || ipv6.is_some(),
            "{name} has no address to send to: `ip address add ADDRESS/PREFIX dev {name}`"
        );
        Ok(Self {
            netns: Netns::current()?,
            name: name.to_owned(),
            ifindex: device.ifindex,
            mac: mac.unwrap_or_default(),
            ipv4: ipv4.unwrap_or(Ipv4Addr::UNSPECIFIED),
            ipv6: ipv6.unwrap_or(Ipv6Addr::UNSPECIFIED),
            queues: device.rx_queues,
            id: 0,
            ethtool: Ethtool::open(name)?,
            without_mac: device.without_mac,
            pass: false,
        })
    }

    /// Address of the peer's family.
    ///
    /// # Errors
    /// The end has none.
    pub fn address_towards(&self, peer: IpAddr) -> Result<IpAddr> {
        let address: IpAddr = match peer {
            IpAddr::V4(_) => self.ipv4.into(),
            IpAddr::V6(_) => self.ipv6.into(),
        };
        ensure!(
            !address.is_unspecified(),
            "{} has no address of the family of {peer}",
            self.name
        );
        Ok(address)
    }

    /// Adds a default route.
    ///
    /// # Errors
    /// There is a default route already, or the router is not on this link.
    pub fn route_by(&self, router: Ipv4Addr) -> Result<()> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new()
            .gateway(router)
            .build();
        self.netns.run(|| {
            rtnl::run(async |handle| handle.route().add(route).execute().await)?
                .with_context(|| format!("cannot route by {router}"))
        })
    }

    /// Creates the inner end of a VXLAN tunnel that terminates here. `id` selects its subnet; no
    /// link may have it.
    ///
    /// # Errors
    /// The kernel has no VXLAN.
    pub fn vxlan(&self, id: u8, vni: u32) -> Result<Self> {
        let plan = |prefix: &str, host| Plan {
            netns: &self.netns,
            name: format!("{prefix}{}", self.name.trim_start_matches("nic")),
            mac: [2, b'r', b'x', 0, id, host as u8],
            host,
            rx_queues: 1,
            tx_queues: 1,
        };
        let (inner, peer) = (plan("vx", 1), plan("", 2));
        let mut message = LinkVxlan::new(&inner.name, vni)
            .port(VXLAN_PORT)
            .local(self.ipv4)
            .learning(false)
            .build();
        let mac = LinkAttribute::Address(inner.mac.to_vec());
        message.attributes.push(mac);
        self.netns.run(|| {
            rtnl::run(async |handle| handle.link().add(message).execute().await)?
                .context("cannot make a tunnel: is CONFIG_VXLAN there?")
        })?;
        let config = LinkConfig {
            id,
            ..Default::default()
        };
        inner.configure(&config, &peer)
    }
}

impl Link {
    /// Joins two namespaces, or one with itself.
    ///
    /// # Errors
    /// The kernel has no veth, or a namespace has a link with the same id.
    pub fn new(tester: &Netns, dut: &Netns, config: &LinkConfig) -> Result<Self> {
        ensure!(config.id < 32, "a link's id is 0…31, not {}", config.id);
        ensure!(config.queues > 0, "a link needs a queue");
        // NAPI threads are found by device name on the whole host: the pid makes the name unique.
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed) & 0xfff;
        Self::named(
            &format!("{:x}-{serial:x}", std::process::id()),
            tester,
            dut,
            config,
        )
    }

    /// Deletes the pair, with everything that is attached to it.
    ///
    /// # Errors
    /// It is deleted already.
    pub fn delete(&self) -> Result<()> {
        let End { netns, ifindex, .. } = &self.tester;
        netns.run(|| {
            rtnl::run(async |handle| handle.link().del(*ifindex).execute().await)?
                .context("cannot delete a link")
        })
    }

    /// Makes the pair again after [`Self::delete`], with the same names. `config.id` is that of
    /// before.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn again(&self, config: &LinkConfig) -> Result<Self> {
        let (tester, dut) = (&self.tester, &self.dut);
        let unique = dut.name.trim_start_matches(DUT);
        Self::named(unique, &tester.netns, &dut.netns, config)
    }

    /// With `unique` in the names of both ends.
    fn named(unique: &str, tester: &Netns, dut: &Netns, config: &LinkConfig) -> Result<Self> {
        let plan = |prefix: &str, netns, host, rx_queues, tx_queues| Plan {
            netns,
            name: format!("{prefix}{unique}"),
            mac: [2, b'r', b'x', 0, config.id, host as u8],
            host,
            rx_queues,
            tx_queues,
        };
        // An end with an XDP program has a receive queue per transmit queue of its peer.
        let (queues, replies) = (config.queues, config.queues.max(config.reply_queues));
        let dut = plan(DUT, dut, 1, queues, replies);
        let tester = plan("tst", tester, 2, replies, queues);

        tester.netns.run(|| {
            let peer = LinkMessageBuilder::<LinkUnspec>::new()
                .name(&dut.name)
                .setns_by_fd(dut.netns.fd().as_raw_fd());
            let peer = InfoData::Veth(InfoVeth::Peer(dut.message(peer.build(), config)));
            let pair = LinkVeth::new(&tester.name, &dut.name).set_info_data(peer);
            let pair = tester.message(pair.build(), config);
            rtnl::run(async |handle| handle.link().add(pair).execute().await)?
                .context("cannot make a veth pair: is CONFIG_VETH there?")
        })?;
        let (tester, dut) = (
            tester.configure(config, &dut)?,
            dut.configure(config, &tester)?,
        );
        let link = Self {
            _wire: config
                .gro
                .then(|| wire::without_hash(&tester.netns, tester.ifindex))
                .transpose()?,
            tester,
            dut,
        };
        link.dut.ethtool.set(Offload::Gro, config.gro)?;
        // As on a wire: VLAN tags inside the frame, checksums filled in.
        link.tester
            .ethtool
            .set_features(&["tx-vlan-hw-insert", "tx-vlan-stag-hw-insert"], false)?;
        link.tester.ethtool.set(Offload::TxChecksum, false)?;
        link.dut
            .ethtool
            .set_features(&["rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"], false)?;
        Ok(link)
    }
}
