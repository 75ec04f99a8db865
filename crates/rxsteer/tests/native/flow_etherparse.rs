// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parser against etherparse, an independent implementation, on random packets.

use crate::common::key::words;
use crate::fixture::address;
use etherparse::{Ipv6ExtensionSlice, NetSlice, SlicedPacket};
use proptest::prelude::*;
use rxsteer::datapath::native;
use rxsteer::types::{flow_key, flow_option};

const IPIP: u8 = 4;
const IPV6: u8 = 41;
const VXLAN_PORT: u16 = 4789;

/// The payload of an IP header.
#[derive(Clone, Debug)]
enum Body {
    Tcp(u16, u16),
    Udp(u16, u16, Vec<u8>),
    /// SCTP, DCCP or UDP-Lite: ports first
    Ports(u8, u16, u16),
    Esp(u32),
    Ah(u32),
    Plain(u8, Vec<u8>),
    /// a piece of UDP, at this offset in units of 8 bytes, with or without more to come
    Fragment(u16, bool),
    Ip(Box<Ip>),
    Vxlan(Vec<u16>, Box<Ip>),
}

#[derive(Clone, Debug)]
struct Ip {
    /// the low bytes of source and destination
    hosts: [u16; 2],
    version: Version,
    body: Body,
}

#[derive(Clone, Debug)]
enum Version {
    /// with this many words of options
    V4(u8),
    /// with these extension headers: their type and length in words of 8 bytes
    V6(Vec<(u8, u8)>),
}

impl Body {
    /// The protocol number and the bytes, under IPv6 or IPv4.
    fn write(&self, v6: bool) -> (u8, Vec<u8>) {
        let mut out = Vec::new();
        let ports = |out: &mut Vec<u8>, source: u16, dest: u16| {
            out.extend(source.to_be_bytes());
            out.extend(dest.to_be_bytes());
        };
        let proto = match self {
            Body::Tcp(source, dest) => {
                ports(&mut out, *source, *dest);
                out.extend([0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 2, 0, 0, 0, 0, 0]);
                6
            }
            Body::Udp(source, dest, payload) => {
                ports(&mut out, *source, *dest);
                out.extend((8 + payload.len() as u16).to_be_bytes());
                out.extend([0, 0]);
                out.extend(payload);
                17
            }
            Body::Ports(proto, source, dest) => {
                ports(&mut out, *source, *dest);
                out.extend([0; 12]);
                *proto
            }
            Body::Esp(spi) => {
                out.extend(spi.to_be_bytes());
                out.extend([0; 20]);
                50
            }
            Body::Ah(spi) => {
                out.extend([59, 4, 0, 0]);
                out.extend(spi.to_be_bytes());
                out.extend([0; 16]);
                51
            }
            Body::Plain(proto, payload) => {
                out.extend(payload);
                *proto
            }
            Body::Fragment(offset, more) if v6 => {
                out.extend([17, 0]);
                out.extend((offset << 3 | u16::from(*more)).to_be_bytes());
                out.extend([0, 0, 0, 9]);
                out.extend([0xee; 16]);
                44
            }
            Body::Fragment(..) => {
                out.extend([0xee; 16]);
                17
            }
            Body::Ip(ip) => {
                out.extend(ip.write());
                match ip.version {
                    Version::V4(_) => IPIP,
                    Version::V6(_) => IPV6,
                }
            }
            Body::Vxlan(tags, ip) => {
                let mut payload = vec![8, 0, 0, 0, 0, 0, 1, 0];
                payload.extend(ethernet(tags, ip));
                return Body::Udp(50_000, VXLAN_PORT, payload).write(v6);
            }
        };
        (proto, out)
    }
}

impl Ip {
    fn write(&self) -> Vec<u8> {
        match &self.version {
            Version::V4(options) => self.write_v4(usize::from(*options)),
            Version::V6(extensions) => self.write_v6(extensions),
        }
    }

    fn write_v4(&self, options: usize) -> Vec<u8> {
        let (proto, body) = self.body.write(false);
        let fragment = match self.body {
            Body::Fragment(offset, more) => offset | u16::from(more) << 13,
            _ => 0x4000,
        };
        let mut out = vec![0x45 + options as u8, 0];
        out.extend(((20 + 4 * options + body.len()) as u16).to_be_bytes());
        out.extend([0, 9]);
        out.extend(fragment.to_be_bytes());
        out.extend([64, proto, 0, 0]);
        for host in self.hosts {
            out.extend([10, 1]);
            out.extend(host.to_be_bytes());
        }
        out.extend(vec![1; 4 * options]);
        out.extend(body);
        out
    }

    fn write_v6(&self, extensions: &[(u8, u8)]) -> Vec<u8> {
        let (mut next, mut payload) = self.body.write(true);
        for &(kind, len) in extensions.iter().rev() {
            let mut header = vec![next, len];
            header.resize(8 + 8 * usize::from(len), 0);
            if kind == 44 {
                header = vec![next, 0, 0, 0, 1, 2, 3, 4]; // atomic
            }
            header.append(&mut payload);
            payload = header;
            next = kind;
        }
        let mut out = vec![0x60, 0, 0, 0];
        out.extend((payload.len() as u16).to_be_bytes());
        out.extend([next, 64]);
        for host in self.hosts {
            out.extend([0xfd, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
            out.extend(host.to_be_bytes());
        }
        out.extend(payload);
        out
    }
}

fn ethernet(tags: &[u16], ip: &Ip) -> Vec<u8> {
    let mut out = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    for tag in tags {
        out.extend(tag.to_be_bytes());
        out.extend([0, 7]);
    }
    out.extend(match ip.version {
        Version::V4(_) => [0x08, 0x00],
        Version::V6(_) => [0x86, 0xdd],
    });
    out.extend(ip.write());
    out
}

fn tags() -> impl Strategy<Value = Vec<u16>> {
    prop::collection::vec(prop::sample::select(vec![0x8100, 0x88a8, 0x9100]), 0..=3)
}

fn version() -> impl Strategy<Value = Version> {
    let extension = prop_oneof![
        4 => (prop::sample::select(vec![43u8, 60]), 0..5u8),
        1 => Just((44u8, 0u8)),
    ];
    // hop-by-hop options must be first; with a fragment header these are eight, the limit
    let v6 =
        (any::<bool>(), prop::collection::vec(extension, 0..=6)).prop_map(|(hop, mut more)| {
            if hop {
                more.insert(0, (0, 1));
            }
            Version::V6(more)
        });
    prop_oneof![(0..=10u8).prop_map(Version::V4), v6]
}

fn ip() -> impl Strategy<Value = Ip> {
    let leaf = prop_oneof![
        any::<(u16, u16)>().prop_map(|(s, d)| Body::Tcp(s, d)),
        any::<(u16, u16, Vec<u8>)>().prop_map(|(s, d, payload)| Body::Udp(s, d, payload)),
        (
            prop::sample::select(vec![132u8, 33, 136]),
            any::<(u16, u16)>()
        )
            .prop_map(|(proto, (s, d))| Body::Ports(proto, s, d)),
        any::<u32>().prop_map(Body::Esp),
        any::<u32>().prop_map(Body::Ah),
        (
            prop::sample::select(vec![89u8, 103, 112, 253]),
            any::<Vec<u8>>()
        )
            .prop_map(|(proto, payload)| Body::Plain(proto, payload)),
        (1..8000u16, any::<bool>()).prop_map(|(offset, more)| Body::Fragment(offset, more)),
        Just(Body::Fragment(0, true)),
    ];
    let packet = |body: BoxedStrategy<Body>| {
        (any::<[u16; 2]>(), version(), body).prop_map(|(hosts, version, body)| Ip {
            hosts,
            version,
            body,
        })
    };
    packet(leaf.boxed()).prop_recursive(3, 8, 1, move |inner| {
        let body = prop_oneof![
            inner.clone().prop_map(|ip| Body::Ip(Box::new(ip))),
            (tags(), inner).prop_map(|(tags, ip)| Body::Vxlan(tags, Box::new(ip))),
        ];
        packet(body.boxed())
    })
}

/// The expected key according to etherparse; None if it can't parse the packet.
fn reference(packet: &SlicedPacket, tunnels: u32, depth: usize) -> Option<flow_key> {
    let mut key = flow_key::default();
    let (source, dest, payload, mut fragmented, mut proto);
    let mut spi = None;
    match packet.net.as_ref()? {
        NetSlice::Ipv4(ip) => {
            (source, dest) = (
                ip.header().source_addr().into(),
                ip.header().destination_addr().into(),
            );
            payload = ip.payload();
            fragmented = ip.is_payload_fragmented();
            proto = ip.header().protocol().0;
            spi = ip
                .extensions()
                .auth
                .as_ref()
                .map(|auth| auth.spi())
                .filter(|_| !fragmented);
        }
        NetSlice::Ipv6(ip) => {
            (source, dest) = (
                std::net::IpAddr::from(ip.header().source_addr()),
                std::net::IpAddr::from(ip.header().destination_addr()),
            );
            payload = ip.payload();
            fragmented = ip.is_payload_fragmented();
            proto = payload.ip_number.0;
            for extension in ip.extensions().clone() {
                match extension {
                    Ipv6ExtensionSlice::Authentication(auth) => {
                        spi = Some(auth.spi());
                        proto = 51;
                        fragmented = false;
                        break;
                    }
                    Ipv6ExtensionSlice::Fragment(fragment) if fragment.is_fragmenting_payload() => {
                        proto = 44;
                        break;
                    }
                    _ => {}
                }
            }
        }
        NetSlice::Arp(_) => return None,
    }
    key.saddr = address(source);
    key.daddr = address(dest);
    key.proto = proto.into();
    if fragmented {
        return Some(key);
    }
    let asked = |tunnel: flow_option| depth < 2 && tunnels & tunnel.0 != 0;
    let inner = match proto {
        IPIP | IPV6 if asked(flow_option::FLOW_TUNNEL_IPIP) => {
            Some(SlicedPacket::from_ip(payload.payload))
        }
        17 if asked(flow_option::FLOW_TUNNEL_VXLAN)
            && payload.payload[2..4] == VXLAN_PORT.to_be_bytes()
            && payload.payload.get(8)? & 0x0c == 8 =>
        {
            Some(SlicedPacket::from_ethernet(payload.payload.get(16..)?))
        }
        _ => None,
    };
    if let Some(inner) = inner {
        return reference(&inner.ok()?, tunnels, depth + 1);
    }
    let first_word = |slice: &[u8]| Some(u32::from_be_bytes(slice.get(..4)?.try_into().ok()?));
    match (proto, spi) {
        (51, Some(spi)) => key.ports = spi.to_be(),
        (50, _) => key.ports = first_word(payload.payload)?.to_be(),
        (6 | 17 | 33 | 132 | 136, _) => {
            key.ports = first_word(payload.payload)?.to_be();
            key.daddr = [0; 4];
        }
        _ => {}
    }
    Some(key)
}

const TUNNELS: u32 = flow_option::FLOW_TUNNEL_IPIP.0 | flow_option::FLOW_TUNNEL_VXLAN.0;

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, max_global_rejects: 1 << 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn keys_agree_with_etherparse(tags in tags(), ip in ip(), tunnels in 0..=TUNNELS) {
        let tunnels = tunnels & TUNNELS;
        let bytes = ethernet(&tags, &ip);
        let sliced = SlicedPacket::from_ethernet(&bytes).expect("what is built here is valid");
        let expected = reference(&sliced, tunnels, 0).expect("what is built here is IP");
        let got = native::flow_parse(&bytes, bytes.len() as u32, tunnels);
        prop_assert_eq!(got.map(|key| words(&key)).map_err(|why| why.0), Ok(words(&expected)));
    }

    /// With spoiled bytes one parser may reject a packet; if neither does, the keys agree.
    #[test]
    fn keys_of_spoiled_packets_agree(
        tags in tags(),
        ip in ip(),
        tunnels in 0..=TUNNELS,
        spoiled in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..4),
    ) {
        let mut bytes = ethernet(&tags, &ip);
        for (at, byte) in spoiled {
            let at = at.index(bytes.len().min(160));
            bytes[at] = byte;
        }
        let sliced = SlicedPacket::from_ethernet(&bytes);
        let expected = sliced.ok().and_then(|sliced| reference(&sliced, tunnels & TUNNELS, 0));
        let got = native::flow_parse(&bytes, bytes.len() as u32, tunnels & TUNNELS);
        let (Some(expected), Ok(got)) = (expected, got) else {
            return Err(TestCaseError::reject("no packet for one of them"));
        };
        // etherparse takes mobility, HIP and shim6 headers for the payload
        prop_assume!(![135, 139, 140].contains(&expected.proto));
        prop_assert_eq!(words(&got), words(&expected));
    }
}
