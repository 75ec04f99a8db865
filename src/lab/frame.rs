// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a wire sends: UDP flows made from one template, or any frame as it is.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use etherparse::{
    EtherType, Ethernet2Header, IpNumber, Ipv4Header, Ipv6Header, SingleVlanHeader, UdpHeader,
    VlanId,
};

use super::link::{self, End};
use crate::lab_skel::types::{wire_layout, wire_stamp};

/// A VLAN tag: its EtherType (0x8100, 0x88a8) and VLAN id.
pub type Tag = (u16, u16);

/// UDP flows. Flow i of `nr_flows` differs from flow 0 by: source address + i mod `nr_saddrs`,
/// source port + i / `nr_saddrs`, destination port + i mod `nr_dports`. Frames take turns.
///
/// A payload begins with a `wire_stamp` (bpf/lab.bpf.c), then zeros.
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
            sport: 1024,
            dport: 9,
            nr_flows,
            nr_saddrs: 16,
            nr_dports: 1,
            payload_len: size_of::<wire_stamp>(),
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

    /// The frame all others are made from, and where they differ.
    pub(super) fn template(&self) -> Result<(Vec<u8>, wire_layout)> {
        let stamp = size_of::<wire_stamp>();
        ensure!(
            self.payload_len >= stamp,
            "a payload holds at least {stamp} bytes, not {}",
            self.payload_len
        );
        ensure!(
            self.nr_saddrs.is_power_of_two() && self.nr_dports.is_power_of_two(),
            "the numbers of source addresses and destination ports are powers of two"
        );
        let ports = (self.nr_flows.max(1) - 1) / self.nr_saddrs;
        ensure!(
            self.nr_flows > 0
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
        let udp = UdpHeader::without_ipv4_checksum(self.sport, self.dport, self.payload_len)?;
        let udp_len = udp.length;
        // `low`: the low 32 bits of the source address, which vary. `sum`: the pseudo-header.
        let (low, mut sum) = match (self.saddr, self.daddr) {
            (IpAddr::V4(saddr), IpAddr::V4(daddr)) => {
                let (saddr, daddr) = (saddr.octets(), daddr.octets());
                Ipv4Header::new(udp_len, 64, IpNumber::UDP, saddr, daddr)?.write_raw(&mut frame)?;
                frame[ip + 10..ip + 12].fill(0);
                let rest = [&frame[ip..ip + 12], &frame[ip + 16..]].map(sum_words);
                let rest = fold(rest.iter().sum());
                frame[ip + 10..ip + 12].copy_from_slice(&rest.to_ne_bytes());
                (ip + 12, sum_words(&daddr))
            }
            (IpAddr::V6(saddr), IpAddr::V6(daddr)) => {
                let (saddr, daddr) = (saddr.octets(), daddr.octets());
                let header = Ipv6Header {
                    payload_length: udp_len,
                    next_header: IpNumber::UDP,
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
        let udp_offset = frame.len();
        udp.write(&mut frame)?;
        // The length counts twice: in the pseudo-header and in the header.
        sum += sum_words(&udp_len.to_be_bytes()) * 2 + sum_words(&[0, IpNumber::UDP.0]);
        let check = if self.checksum { fold(sum) } else { 0 };
        frame[udp_offset + 6..udp_offset + 8].copy_from_slice(&check.to_ne_bytes());
        frame.resize(frame.len() + self.payload_len, 0);

        let layout = wire_layout {
            template_len: (udp_offset + 8) as u32,
            ipv4: if self.saddr.is_ipv4() { ip as u32 } else { 0 },
            saddr: low as u32,
            udp: udp_offset as u32,
            udp_checksum: self.checksum.into(),
            nr_flows: self.nr_flows,
            saddr_mask: self.nr_saddrs - 1,
            saddr_shift: self.nr_saddrs.trailing_zeros(),
            dport_mask: u32::from(self.nr_dports) - 1,
            ..Default::default()
        };
        Ok((frame, layout))
    }
}

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
    /// Flows made from a template.
    Udp(UdpFlows),
    /// This frame again and again. Its first 256 bytes are written anew each time.
    Raw(Vec<u8>),
}

impl Frames {
    /// The first frame, and where the others differ.
    pub(super) fn template(&self) -> Result<(Vec<u8>, wire_layout)> {
        match self {
            Self::Udp(flows) => flows.template().context("such flows can't be sent"),
            Self::Raw(frame) => Ok((frame.clone(), wire_layout::default())),
        }
    }
}
