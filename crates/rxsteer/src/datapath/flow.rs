// SPDX-License-Identifier: MIT OR Apache-2.0
//! A flow's name, as commands print and accept it: `udp/198.18.1.0:1024/9` is the protocol, the
//! sender's address and port, and the local port. Without ports, `icmp/192.0.2.1/198.18.0.1` has
//! the addresses of sender and receiver, and `esp/192.0.2.1/198.18.0.1/0x1001` also the SPI.
//! `udp/198.18.1.0:1024/198.18.0.1:9` has both ends, which are the flow under `--hash symmetric`.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use serde_with::{DeserializeFromStr, SerializeDisplay};

use super::native;
use crate::types::flow_key;

/// Protocols with a name here: those of /etc/protocols, in lower case. Others are numbers.
const PROTOCOLS: [(&str, u8); 14] = [
    ("icmp", 1),
    ("igmp", 2),
    ("ipencap", 4),
    ("tcp", 6),
    ("udp", 17),
    ("dccp", 33),
    ("ipv6", 41),
    ("ipv6-frag", 44),
    ("gre", 47),
    ("esp", 50),
    ("ah", 51),
    ("ipv6-icmp", 58),
    ("sctp", 132),
    ("udplite", 136),
];

/// Protocols with ports.
const WITH_PORTS: [u8; 5] = [6, 17, 33, 132, 136];

/// A flow key in readable form (docs/hash.md). Addresses are never v4-mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, SerializeDisplay, DeserializeFromStr)]
pub enum Flow {
    /// Of a protocol with ports, for any local address.
    Ports {
        /// `IPPROTO_*`
        proto: u8,
        /// Address and port of the sender.
        remote: SocketAddr,
        /// The local port.
        local_port: u16,
    },
    /// Of a protocol with ports, with both ends; the key has them in an order of its own.
    Connection {
        /// `IPPROTO_*`
        proto: u8,
        /// One end: the sender if that is known.
        remote: SocketAddr,
        /// The other end.
        local: SocketAddr,
    },
    /// Without ports, or of fragments, which have none.
    Addresses {
        /// `IPPROTO_*`
        proto: u8,
        /// Address of the sender.
        remote: IpAddr,
        /// Address of the receiver.
        local: IpAddr,
        /// The SPI of ESP and AH, or 0.
        spi: u32,
    },
}

impl Flow {
    /// The flow of the packets that a socket receives.
    pub fn of_socket(proto: u8, remote: SocketAddr, local_port: u16) -> Self {
        Self::Ports {
            proto,
            remote: canonical(remote),
            local_port,
        }
    }

    /// The flow of the packets that a connected socket receives, with its own address.
    pub fn of_connection(proto: u8, remote: SocketAddr, local: SocketAddr) -> Self {
        Self::Connection {
            proto,
            remote: canonical(remote),
            local: canonical(local),
        }
    }

    /// The flow that packets have: without `--hash symmetric` the local address is no part of it.
    pub fn known_by(self, symmetric: bool) -> Self {
        match self {
            Self::Connection {
                proto,
                remote,
                local,
            } if !symmetric => Self::of_socket(proto, remote, local.port()),
            flow => flow,
        }
    }

    /// The flow of a key; `None` for an invalid key, such as that of a slot without a flow.
    pub fn from_key(key: &flow_key) -> Option<Self> {
        let proto = u8::try_from(key.proto).ok().filter(|proto| *proto > 0)?;
        let (remote, local) = (address(key.saddr), address(key.daddr));
        let ports = u32::from_be(key.ports);
        let (remote_port, local_port) = ((ports >> 16) as u16, ports as u16);
        let sender = SocketAddr::new(remote, remote_port);
        Some(match WITH_PORTS.contains(&proto) {
            true if key.daddr == [0; 4] => Self::of_socket(proto, sender, local_port),
            // Fragments have no ports.
            true if ports != 0 => {
                Self::of_connection(proto, sender, SocketAddr::new(local, local_port))
            }
            _ => Self::Addresses {
                proto,
                remote,
                local,
                spi: ports,
            },
        })
    }

    /// The key of the flow's packets.
    pub fn key(&self) -> flow_key {
        match *self {
            Self::Ports {
                proto,
                remote,
                local_port,
            } => native::flow_key_ports(remote, local_port, proto.into()),
            Self::Connection {
                proto,
                remote,
                local,
            } => native::flow_key_connection(remote, local, proto.into()),
            Self::Addresses {
                proto,
                remote,
                local,
                spi,
            } => flow_key {
                saddr: native::address_words(remote),
                daddr: native::address_words(local),
                ports: spi.to_be(),
                proto: proto.into(),
                ..flow_key::default()
            },
        }
    }

    /// `IPPROTO_*`
    pub fn proto(&self) -> u8 {
        match *self {
            Self::Ports { proto, .. }
            | Self::Connection { proto, .. }
            | Self::Addresses { proto, .. } => proto,
        }
    }

    /// The local port, of a protocol with ports.
    pub fn local_port(&self) -> Option<u16> {
        match *self {
            Self::Ports { local_port, .. } => Some(local_port),
            Self::Connection { local, .. } => Some(local.port()),
            Self::Addresses { .. } => None,
        }
    }

    /// Whether its local port is one of these; either port may be that of a connection.
    pub fn has_port(&self, ports: &[u16]) -> bool {
        match self {
            Self::Ports { local_port, .. } => ports.contains(local_port),
            Self::Connection { remote, local, .. } => {
                ports.contains(&remote.port()) || ports.contains(&local.port())
            }
            Self::Addresses { .. } => false,
        }
    }
}

fn canonical(end: SocketAddr) -> SocketAddr {
    SocketAddr::new(end.ip().to_canonical(), end.port())
}

fn address(words: [u32; 4]) -> IpAddr {
    let mut octets = [0; 16];
    for (bytes, word) in octets.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    IpAddr::from(Ipv6Addr::from(octets)).to_canonical()
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match PROTOCOLS.iter().find(|(_, n)| *n == self.proto()) {
            Some((name, _)) => f.write_str(name)?,
            None => write!(f, "{}", self.proto())?,
        }
        match self {
            Self::Ports {
                remote, local_port, ..
            } => write!(f, "/{remote}/{local_port}"),
            Self::Connection { remote, local, .. } => write!(f, "/{remote}/{local}"),
            Self::Addresses {
                remote,
                local,
                spi: 0,
                ..
            } => write!(f, "/{remote}/{local}"),
            Self::Addresses {
                remote, local, spi, ..
            } => write!(f, "/{remote}/{local}/{spi:#x}"),
        }
    }
}

/// Why a text names no flow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FlowError(String);

impl FromStr for Flow {
    type Err = FlowError;

    fn from_str(text: &str) -> Result<Self, FlowError> {
        let words: Vec<_> = text.split('/').collect();
        let [name, remote, local, ref spi @ ..] = words[..] else {
            return Err(FlowError(format!(
                "{text:?} is not a flow: write PROTOCOL/ADDRESS:PORT/LOCAL-PORT, as in \
                 udp/192.0.2.1:53/5353, or 0xHASH"
            )));
        };
        let proto = PROTOCOLS
            .iter()
            .find_map(|(known, n)| (*known == name).then_some(*n))
            .or_else(|| name.parse().ok().filter(|n| *n > 0))
            .ok_or_else(|| {
                FlowError(format!(
                    "{name:?} is not a protocol: write tcp, udp, icmp, … or its number, 1 to 255"
                ))
            })?;
        if let Ok(remote) = remote.parse::<SocketAddr>() {
            if !WITH_PORTS.contains(&proto) {
                return Err(FlowError(format!(
                    "{name} has no ports: write {name}/REMOTE-ADDRESS/LOCAL-ADDRESS"
                )));
            }
            return match (local.parse(), local.parse(), spi) {
                (Ok(local_port), _, []) => Ok(Self::of_socket(proto, remote, local_port)),
                (_, Ok(local), []) => Ok(Self::of_connection(proto, remote, local)),
                _ => Err(FlowError(format!(
                    "{:?} is neither a local port, 0 to 65535, nor a local address and port",
                    words[2..].join("/")
                ))),
            };
        }
        let address = |text: &str| match text.parse::<IpAddr>() {
            Ok(address) => Ok(address.to_canonical()),
            Err(_) => Err(FlowError(format!(
                "{text:?} is not an address{}: write 192.0.2.1{port} or {v6}",
                if WITH_PORTS.contains(&proto) {
                    " and port"
                } else {
                    ""
                },
                port = if WITH_PORTS.contains(&proto) {
                    ":53"
                } else {
                    ""
                },
                v6 = if WITH_PORTS.contains(&proto) {
                    "[2001:db8::1]:53"
                } else {
                    "2001:db8::1"
                },
            ))),
        };
        let (remote, local) = (address(remote)?, address(local)?);
        let spi = match spi {
            [] => 0,
            [spi] => spi
                .strip_prefix("0x")
                .and_then(|hex| u32::from_str_radix(hex, 16).ok())
                .ok_or_else(|| FlowError(format!("{spi:?} is not an SPI: write 0x1001")))?,
            _ => return Err(FlowError(format!("{text:?} says too much for a flow"))),
        };
        Ok(Self::Addresses {
            proto,
            remote,
            local,
            spi,
        })
    }
}

/// A flow's hash, `0x…`: also names the flow, until the running rxsteer ends.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, SerializeDisplay, DeserializeFromStr,
)]
pub struct FlowHash(pub u32);

impl fmt::Display for FlowHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

impl FromStr for FlowHash {
    type Err = FlowError;

    fn from_str(text: &str) -> Result<Self, FlowError> {
        text.strip_prefix("0x")
            .and_then(|hex| u32::from_str_radix(hex, 16).ok())
            .map(Self)
            .ok_or_else(|| {
                FlowError(format!(
                    "{text:?} is not a flow's hash: write 0x and up to 8 hex digits"
                ))
            })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A key's words, comparable.
    fn words(key: &flow_key) -> ([u32; 4], [u32; 4], u32, u32) {
        (key.saddr, key.daddr, key.ports, key.proto)
    }

    fn with_ports() -> impl Strategy<Value = Flow> {
        let proto = proptest::sample::select(&WITH_PORTS[..]);
        (proto, any::<IpAddr>(), any::<u16>(), any::<u16>()).prop_map(|(proto, ip, port, local)| {
            Flow::of_socket(proto, SocketAddr::new(ip, port), local)
        })
    }

    /// In a packet's key the local address is not `::`, to which no packet is sent.
    fn without_ports() -> impl Strategy<Value = Flow> {
        let local = any::<IpAddr>().prop_filter("::", |ip| !ip.is_ipv6() || !ip.is_unspecified());
        (1..=255u8, any::<IpAddr>(), local, any::<u32>()).prop_map(|(proto, remote, local, spi)| {
            Flow::Addresses {
                proto,
                remote: remote.to_canonical(),
                local: local.to_canonical(),
                // Fragments have neither ports nor an SPI.
                spi: if WITH_PORTS.contains(&proto) { 0 } else { spi },
            }
        })
    }

    proptest! {
        #[test]
        fn what_is_printed_is_understood(flow in prop_oneof![with_ports(), without_ports()]) {
            let text = flow.to_string();
            prop_assert_eq!(text.parse(), Ok(flow), "{}", text);
            prop_assert_eq!(serde_json::from_str::<Flow>(&serde_json::to_string(&flow)?)?, flow);
        }

        #[test]
        fn a_key_and_its_name_are_the_same(flow in prop_oneof![with_ports(), without_ports()]) {
            let key = flow.key();
            prop_assert_eq!(Flow::from_key(&key), Some(flow));
            let again: Flow = flow.to_string().parse()?;
            prop_assert_eq!(words(&again.key()), words(&key));
        }

        #[test]
        fn any_text_is_a_flow_or_refused_in_words(text in "[a-z0-9]{0,5}(/[0-9a-fx:.\\[\\]]{0,12}){0,4}") {
            match text.parse::<Flow>() {
                Ok(flow) => prop_assert_eq!(flow.to_string().parse(), Ok(flow)),
                Err(why) => prop_assert!(why.0.len() > 20),
            }
        }

        #[test]
        fn hashes_too(hash in any::<u32>()) {
            let hash = FlowHash(hash);
            prop_assert_eq!(hash.to_string().len(), 10);
            prop_assert_eq!(hash.to_string().parse(), Ok(hash));
        }
    }

    #[test]
    fn names_are_as_documented() {
        for text in [
            "udp/198.18.1.0:1024/9",
            "tcp/[2001:db8::1]:5000/443",
            "udp/192.0.2.1:53/198.18.0.1:5353",
            "icmp/192.0.2.1/198.18.0.1",
            "esp/2001:db8::1/2001:db8::2/0x1001",
            "udp/192.0.2.1/198.18.0.1",
            "89/192.0.2.1/224.0.0.5",
        ] {
            let flow: Flow = text.parse().expect(text);
            assert_eq!(flow.to_string(), text);
        }
        let mapped: Flow = "tcp/[::ffff:192.0.2.1]:5000/443".parse().unwrap();
        assert_eq!(mapped.to_string(), "tcp/192.0.2.1:5000/443");
    }

    #[test]
    fn what_is_no_name_is_refused_with_what_to_write() {
        for (text, why) in [
            ("", "write PROTOCOL/ADDRESS:PORT/LOCAL-PORT"),
            ("udp/192.0.2.1:53", "write PROTOCOL/ADDRESS:PORT/LOCAL-PORT"),
            ("upd/192.0.2.1:53/5353", "\"upd\" is not a protocol"),
            ("0/192.0.2.1/192.0.2.2", "\"0\" is not a protocol"),
            ("256/192.0.2.1/192.0.2.2", "\"256\" is not a protocol"),
            (
                "udp/192.0.2.1:53/65536",
                "\"65536\" is neither a local port",
            ),
            ("udp/192.0.2.1:53/192.0.2.2", "nor a local address and port"),
            (
                "udp/192.0.2.1:53/9/0x1",
                "\"9/0x1\" is neither a local port",
            ),
            ("icmp/192.0.2.1:53/9", "icmp has no ports"),
            (
                "udp/2001:db8::1:x/9",
                "write 192.0.2.1:53 or [2001:db8::1]:53",
            ),
            ("icmp/192.0.2/192.0.2.1", "write 192.0.2.1 or 2001:db8::1"),
            ("esp/192.0.2.1/192.0.2.2/12", "\"12\" is not an SPI"),
            ("esp/192.0.2.1/192.0.2.2/0x1/1", "says too much"),
        ] {
            let said = text.parse::<Flow>().expect_err(text).to_string();
            assert!(said.contains(why), "{text}: {said}");
        }
        for text in ["", "0x", "12345678", "0x123456789", "0xfg"] {
            assert!(text.parse::<FlowHash>().is_err(), "{text}");
        }
    }
}
