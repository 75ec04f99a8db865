// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frames of a generator: UDP or TCP flows made from one template, or any fixed frame.

use std::mem::offset_of;
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
/// source port + i / `nr_saddrs`, destination port + i mod `nr_dports`. Flows are sent round robin.
///
/// A payload begins with a `generator_stamp` (bpf/lab.bpf.c), followed by zeros.
#[derive(Clone, Debug)]
pub struct UdpFlows {
    pub smac: [u8; 6],
    pub dmac: [u8; 6],
    /// VLAN tags, outermost first.
    pub tags: Vec<Tag>,
    /// Source of flow 0. Both addresses have the family of the frames.
    pub saddr: IpAddr,
    /// Destination of all flows.
    pub daddr: IpAddr,
    /// Source port of flow 0.
    pub sport: u16,
    /// Destination port of flow 0.
    pub dport: u16,
    /// Number of flows.
    pub nr_flows: u32,
    /// The number of flow 0 in stamps: generators that one witness watches have different ones.
    pub first_flow: u32,
    /// A power of two.
    pub nr_saddrs: u32,
    /// A power of two.
    pub nr_dports: u16,
    /// Consecutive frames of one flow.
    pub run: u32,
    /// Frames of one additional flow, number `nr_flows`, after each frame of the others. UDP only.
    pub flood: u32,
    /// UDP payload, bytes; at least 16 for the stamp.
    pub payload_len: usize,
    /// Fills in the UDP checksum. Otherwise it is zero, which IPv6 receivers refuse.
    pub checksum: bool,
}

impl UdpFlows {
    /// `nr_flows` flows over IPv4 to port 9 (discard) of an end, from up to 16 addresses in its
    /// subnet, with the smallest payload and a checksum.
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
            first_flow: 0,
            nr_saddrs: 16,
            nr_dports: 1,
            run: 1,
            flood: 0,
            payload_len: size_of::<generator_stamp>(),
            checksum: true,
        }
    }

    /// The same flows over IPv6.
    pub fn to_ipv6(dut: &End, nr_flows: u32) -> Self {
        Self {
            saddr: link::ipv6(dut.id, FIRST_SOURCE).into(),
            daddr: dut.ipv6.into(),
            ..Self::to(dut, nr_flows)
        }
    }

    /// Source of a flow.
    pub fn source(&self, flow: u32) -> SocketAddr {
        let saddr = match self.saddr {
            IpAddr::V4(v4) => Ipv4Addr::from(v4.to_bits() + flow % self.nr_saddrs).into(),
            IpAddr::V6(v6) => {
                Ipv6Addr::from(v6.to_bits() + u128::from(flow % self.nr_saddrs)).into()
            }
        };
        SocketAddr::new(saddr, self.sport + (flow / self.nr_saddrs) as u16)
    }

    /// Payload of a flow's first packet, if a socket sends it.
    pub(super) fn payload(&self, flow: u32) -> Vec<u8> {
        let mut payload = vec![0; self.payload_len];
        let at = offset_of!(generator_stamp, flow);
        payload[at..at + 4].copy_from_slice(&(self.first_flow + flow).to_be_bytes());
        payload
    }

    /// The template frame and its variable fields: UDP, or segments of `tcp`.
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
                // Leaves the checksum zero.
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
        // `low`: offset of the low 32 bits of the source address, which vary. `sum`: of the
        // pseudo-header.
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
        // Without the ports, which vary.
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
            first: generator_stamp {
                flow: self.first_flow.to_be(),
                ..Default::default()
            },
        };
        Ok((frame, layout))
    }
}

/// Segments of established TCP connections: segment k of a flow has the sequence number `first_seq`
/// + k × payload, and ACK set. There are no timestamps.
#[derive(Clone, Debug)]
pub struct TcpFlows {
    /// Addresses, ports and payload.
    pub flows: UdpFlows,
    /// First sequence number that the receivers expect.
    pub first_seq: u32,
    /// Acknowledgement number: next sequence number of the receivers.
    pub ack: u32,
    /// Sets PSH on the last segment of a run, which makes GRO flush.
    pub push: bool,
}

/// The outer header of a VXLAN tunnel: one flow, without a checksum (RFC 7348).
#[derive(Clone, Debug)]
pub struct Vxlan {
    pub smac: [u8; 6],
    pub dmac: [u8; 6],
    /// Outer source.
    pub saddr: Ipv4Addr,
    /// Outer destination, the end of the tunnel.
    pub daddr: Ipv4Addr,
    /// VXLAN network identifier, 24 bits.
    pub vni: u32,
}

impl Vxlan {
    /// A tunnel to an end, from an unused address.
    pub fn to(dut: &End, vni: u32) -> Self {
        Self {
            smac: [2, b'r', b'x', 1, dut.id, 0],
            dmac: dut.mac,
            saddr: link::ipv4(dut.id, FIRST_SOURCE),
            daddr: dut.ipv4,
            vni,
        }
    }

    /// Headers before an inner frame of `len` bytes.
    fn header(&self, len: usize) -> Result<Vec<u8>> {
        /// I flag: the VNI is valid.
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

/// First source port of flows and tunnels.
const FIRST_PORT: u16 = 1024;

/// Host number of the first source address, above those of the ends.
const FIRST_SOURCE: u32 = 256;

/// Sum of 16-bit words in host byte order, as RFC 1071 allows.
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

/// Frames of a generator.
#[derive(Clone, Debug)]
pub enum Frames {
    Udp(UdpFlows),
    /// Segments for receivers with a matching TCP state.
    Tcp(TcpFlows),
    /// Datagrams in a tunnel.
    Vxlan(Vxlan, UdpFlows),
    /// This frame, repeated. The program rewrites its first 256 bytes each time.
    Raw(Vec<u8>),
}

impl Frames {
    /// Offset of the stamp in each frame that reaches the end, bytes; 0 if there is none.
    pub(super) fn stamp(&self, end: &End) -> Result<u32> {
        let before = if end.without_mac {
            Ethernet2Header::LEN as u32
        } else {
            0
        };
        Ok(self.template()?.1.stamp.saturating_sub(before))
    }

    /// The template frame and its variable fields.
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

/// Adds `by` to all offsets, for a frame with `by` bytes prepended.
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
        // Offset 0: no such field.
        *offset += if *offset == 0 { 0 } else { by };
    }
    layout
}
