// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a wire sends: UDP or TCP flows made from one template, or any frame as it is.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use etherparse::{
    EtherType, Ethernet2Header, IpNumber, Ipv4Header, Ipv6Header, SingleVlanHeader, TcpHeader,
    UdpHeader, VlanId,
};

use super::link::{self, End, VXLAN_PORT};
use crate::lab_skel::types::{generator_layout, generator_stamp};

/// A VLAN tag: its EtherType (0x8100, 0x88a8) and VLAN id.
pub type Tag = (u16, u16);

/// UDP flows. Flow i of `nr_flows` differs from flow 0 by: source address + i mod `nr_saddrs`,
/// source port + i / `nr_saddrs`, destination port + i mod `nr_dports`. Flows take turns.
///
/// A payload begins with a `generator_stamp` (bpf/lab.bpf.c), then zeros.
#[derive(Clone, Debug)]
pub struct UdpFlows {
    /// Ethernet addresses.
    pub smac: [u8; 6],
    /// Ethernet addresses.
    pub dmac: [u8; 6],
    /// Outermost first.
    pub tags: Vec<Tag>,
    /// Flow 0's source; the family of both addresses is the family of the frames.
    pub saddr: IpAddr,
    /// Every flow's destination.
    pub daddr: IpAddr,
    /// Flow 0's ports.
    pub sport: u16,
    /// Flow 0's ports.
    pub dport: u16,
    /// How many flows there are.
    pub nr_flows: u32,
    /// A power of two.
    pub nr_saddrs: u32,
    /// A power of two.
    pub nr_dports: u16,
    /// Frames of one flow in a row.
    pub run: u32,
    /// Frames of one more flow, number `nr_flows`, after each frame of the others. Only UDP.
    pub flood: u32,
    /// UDP payload, bytes; at least the stamp's 16.
    pub payload_len: usize,
    /// A valid UDP checksum. Without, it is zero, which IPv6 receivers refuse.
    pub checksum: bool,
}

impl UdpFlows {
    /// `nr_flows` flows over IPv4 to port 9 (discard) of an end, from up to 16 addresses in its
    /// subnet, the smallest payload, checksummed.
    pub fn to(dut: &End, nr_flows: u32) -> Self {
        Self {
            smac: [2, b'r', b'x', 1, dut.id, 0],
            dmac: dut.mac,
            tags: Vec::new(),
            saddr: link::ipv4(dut.id, FIRST_SOURCE).into(),
            daddr: dut.ipv4.into(),
            sport: FIRST_PORT,
            dport: 9,
            nr_flows,
            nr_saddrs: 16,
            nr_dports: 1,
            run: 1,
            flood: 0,
            payload_len: size_of::<generator_stamp>(),
            checksum: true,
        }
    }

    /// The same over IPv6.
    pub fn to_ipv6(dut: &End, nr_flows: u32) -> Self {
        Self {
            saddr: link::ipv6(dut.id, FIRST_SOURCE).into(),
            daddr: dut.ipv6.into(),
            ..Self::to(dut, nr_flows)
        }
    }

    /// Flow i's source.
    pub fn source(&self, flow: u32) -> SocketAddr {
        let saddr = match self.saddr {
            IpAddr::V4(v4) => Ipv4Addr::from(v4.to_bits() + flow % self.nr_saddrs).into(),
            IpAddr::V6(v6) => {
                Ipv6Addr::from(v6.to_bits() + u128::from(flow % self.nr_saddrs)).into()
            }
        };
        SocketAddr::new(saddr, self.sport + (flow / self.nr_saddrs) as u16)
    }

    /// The frame all others are made from, and where they differ: UDP, or segments of `tcp`.
    fn template(&self, tcp: Option<&TcpFlows>) -> Result<(Vec<u8>, generator_layout)> {
        let stamp = size_of::<generator_stamp>();
        ensure!(
            self.payload_len >= stamp,
            "a payload holds at least {stamp} bytes, not {}",
            self.payload_len
        );
        ensure!(
            self.nr_saddrs.is_power_of_two() && self.nr_dports.is_power_of_two(),
            "the numbers of source addresses and destination ports are powers of two"
        );
        let last = self.nr_flows.max(1) - u32::from(self.flood == 0);
        let ports = last / self.nr_saddrs;
        ensure!(
            tcp.is_none() || self.flood == 0,
            "TCP flows are all alike: none floods"
        );
        ensure!(
            self.nr_flows > 0
                && self.run > 0
                && u32::from(self.sport) + ports <= u32::from(u16::MAX)
                && self.dport.checked_add(self.nr_dports - 1).is_some(),
            "{} flows need more ports than there are above {} and {}",
            self.nr_flows,
            self.sport,
            self.dport
        );

        let mut frame = Vec::new();
        let network = match self.saddr {
            IpAddr::V4(_) => EtherType::IPV4,
            IpAddr::V6(_) => EtherType::IPV6,
        };
        let mut types = self
            .tags
            .iter()
            .map(|tag| EtherType(tag.0))
            .chain([network]);
        Ethernet2Header {
            source: self.smac,
            destination: self.dmac,
            ether_type: types.next().unwrap_or(network),
        }
        .write(&mut frame)?;
        for (&(_, id), ether_type) in self.tags.iter().zip(types) {
            let header = SingleVlanHeader {
                vlan_id: VlanId::try_new(id)?,
                ether_type,
                ..Default::default()
            };
            header.write(&mut frame)?;
        }
        let ip = frame.len();
        let mut transport = Vec::new();
        let (proto, checksum) = match tcp {
            None => {
                // Its checksum is zero here.
                UdpHeader::without_ipv4_checksum(self.sport, self.dport, self.payload_len)?
                    .write(&mut transport)?;
                (IpNumber::UDP, 6)
            }
            Some(tcp) => {
                let mut header = TcpHeader::new(self.sport, self.dport, 0, u16::MAX);
                header.ack = true;
                header.acknowledgment_number = tcp.ack;
                header.write(&mut transport)?;
                (IpNumber::TCP, 16)
            }
        };
        let transport_len = u16::try_from(transport.len() + self.payload_len)?;
        // `low`: the low 32 bits of the source address, which vary. `sum`: the pseudo-header.
        let (low, mut sum) = match (self.saddr, self.daddr) {
            (IpAddr::V4(saddr), IpAddr::V4(daddr)) => {
                let (saddr, daddr) = (saddr.octets(), daddr.octets());
                Ipv4Header::new(transport_len, 64, proto, saddr, daddr)?.write_raw(&mut frame)?;
                frame[ip + 10..ip + 12].fill(0);
                let rest = [&frame[ip..ip + 12], &frame[ip + 16..]].map(sum_words);
                let rest = fold(rest.iter().sum());
                frame[ip + 10..ip + 12].copy_from_slice(&rest.to_ne_bytes());
                (ip + 12, sum_words(&daddr))
            }
            (IpAddr::V6(saddr), IpAddr::V6(daddr)) => {
                let (saddr, daddr) = (saddr.octets(), daddr.octets());
                let header = Ipv6Header {
                    payload_length: transport_len,
                    next_header: proto,
                    hop_limit: 64,
                    source: saddr,
                    destination: daddr,
                    ..Default::default()
                };
                header.write(&mut frame)?;
                (ip + 20, sum_words(&saddr[..12]) + sum_words(&daddr))
            }
            _ => anyhow::bail!("{} and {} are of two families", self.saddr, self.daddr),
        };
        let ports = frame.len();
        let stamp_at = ports + transport.len();
        // Ports vary; the rest of the header counts as it is.
        sum += sum_words(&transport_len.to_be_bytes()) + sum_words(&[0, proto.0]);
        sum += sum_words(&transport[4..]);
        let check = if self.checksum { fold(sum) } else { 0 };
        transport[checksum..checksum + 2].copy_from_slice(&check.to_ne_bytes());
        frame.extend(transport);
        frame.resize(stamp_at + self.payload_len, 0);

        let layout = generator_layout {
            template_len: stamp_at as u32,
            ipv4: if self.saddr.is_ipv4() { ip as u32 } else { 0 },
            saddr: low as u32,
            ports: ports as u32,
            tcp_seq: tcp.map_or(0, |_| ports as u32 + 4),
            checksum: if self.checksum {
                (ports + checksum) as u32
            } else {
                0
            },
            stamp: stamp_at as u32,
            payload_len: self.payload_len as u32,
            first_seq: tcp.map_or(0, |tcp| tcp.first_seq),
            push: tcp.is_some_and(|tcp| tcp.push).into(),
            nr_flows: self.nr_flows,
            run: self.run,
            saddr_mask: self.nr_saddrs - 1,
            saddr_shift: self.nr_saddrs.trailing_zeros(),
            dport_mask: u32::from(self.nr_dports) - 1,
            flood: self.flood,
            ..Default::default()
        };
        Ok((frame, layout))
    }
}

/// Segments of established TCP connections: flow i's k-th has the sequence number
/// `first_seq` + k × payload, and ACK set. They have no timestamps.
#[derive(Clone, Debug)]
pub struct TcpFlows {
    /// Addresses, ports, payload: as of UDP.
    pub flows: UdpFlows,
    /// What the receivers expect first.
    pub first_seq: u32,
    /// What the receivers have sent.
    pub ack: u32,
    /// Sets PSH on the last segment of a run: what ends GRO's waiting for more.
    pub push: bool,
}

/// A VXLAN tunnel, seen from outside: one outer flow, without a checksum (RFC 7348).
#[derive(Clone, Debug)]
pub struct Vxlan {
    /// Ethernet addresses.
    pub smac: [u8; 6],
    /// Ethernet addresses.
    pub dmac: [u8; 6],
    /// Where it begins.
    pub saddr: Ipv4Addr,
    /// Where it ends.
    pub daddr: Ipv4Addr,
    /// Its number, 24 bits.
    pub vni: u32,
}

impl Vxlan {
    /// A tunnel to an end, from an address that nobody has.
    pub fn to(dut: &End, vni: u32) -> Self {
        Self {
            smac: [2, b'r', b'x', 1, dut.id, 0],
            dmac: dut.mac,
            saddr: link::ipv4(dut.id, FIRST_SOURCE),
            daddr: dut.ipv4,
            vni,
        }
    }

    /// What goes before an inner frame of `len` bytes.
    fn header(&self, len: usize) -> Result<Vec<u8>> {
        /// The I flag: the VNI is valid.
        const VALID_VNI: u32 = 0x0800_0000;
        let mut vxlan = VALID_VNI.to_be_bytes().to_vec();
        vxlan.extend((self.vni << 8).to_be_bytes());
        let udp = UdpHeader::without_ipv4_checksum(FIRST_PORT, VXLAN_PORT, vxlan.len() + len)?;
        let mut frame = Vec::new();
        Ethernet2Header {
            source: self.smac,
            destination: self.dmac,
            ether_type: EtherType::IPV4,
        }
        .write(&mut frame)?;
        let (saddr, daddr) = (self.saddr.octets(), self.daddr.octets());
        Ipv4Header::new(udp.length, 64, IpNumber::UDP, saddr, daddr)?.write(&mut frame)?;
        udp.write(&mut frame)?;
        frame.extend(vxlan);
        Ok(frame)
    }
}

/// Of flows and tunnels.
const FIRST_PORT: u16 = 1024;

/// The number, in its subnet, of the first source address: behind those of the ends.
const FIRST_SOURCE: u32 = 256;

/// The sum of 16-bit words in the machine's order, as RFC 1071 allows.
fn sum_words(bytes: &[u8]) -> u64 {
    bytes
        .chunks(2)
        .map(|pair| u64::from(u16::from_ne_bytes([pair[0], *pair.get(1).unwrap_or(&0)])))
        .sum()
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// What a wire sends.
#[derive(Clone, Debug)]
pub enum Frames {
    /// Datagrams.
    Udp(UdpFlows),
    /// Segments that receivers with a matching state take for their peer's.
    Tcp(TcpFlows),
    /// Datagrams in a tunnel.
    Vxlan(Vxlan, UdpFlows),
    /// This frame again and again. Its first 256 bytes are written anew each time.
    Raw(Vec<u8>),
}

impl Frames {
    /// Offset of the stamp in each frame, bytes; 0 where there is none.
    pub(super) fn stamp(&self) -> Result<u32> {
        Ok(self.template()?.1.stamp)
    }

    /// The first frame, and where the others differ.
    pub(super) fn template(&self) -> Result<(Vec<u8>, generator_layout)> {
        match self {
            Self::Udp(flows) => flows.template(None),
            Self::Tcp(tcp) => tcp.flows.template(Some(tcp)),
            Self::Vxlan(vxlan, flows) => flows.template(None).and_then(|(inner, layout)| {
                let mut frame = vxlan.header(inner.len())?;
                let layout = shift(layout, frame.len() as u32);
                frame.extend(inner);
                Ok((frame, layout))
            }),
            Self::Raw(frame) => Ok((frame.clone(), generator_layout::default())),
        }
        .context("such frames can't be sent")
    }
}

/// The layout of a frame that `by` bytes have been put before.
fn shift(mut layout: generator_layout, by: u32) -> generator_layout {
    layout.template_len += by;
    for offset in [
        &mut layout.ipv4,
        &mut layout.saddr,
        &mut layout.ports,
        &mut layout.tcp_seq,
        &mut layout.checksum,
        &mut layout.stamp,
    ] {
        // 0: there is no such field.
        *offset += if *offset == 0 { 0 } else { by };
    }
    layout
}
