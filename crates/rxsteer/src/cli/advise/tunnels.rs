// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tunnels, as the flows that hide the flows in them.

use serde::Serialize;

use crate::daemon::options::Tunnel;
use crate::datapath::flow::Flow;
use crate::datapath::native;

/// Ports of tunnels that are encrypted: WireGuard's usual one, and ESP in UDP (RFC 3948).
const WIREGUARD: u16 = 51820;
const ESP_IN_UDP: u16 = 4500;

const IPPROTO_UDP: u8 = 17;
const IPPROTO_ESP: u8 = 50;

/// A kind of tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// 4in4, 6in4, 4in6, 6in6.
    Ipip,
    /// GRE.
    Gre,
    /// VXLAN.
    Vxlan,
    /// GENEVE.
    Geneve,
    /// GTP-U.
    GtpU,
    /// ESP, also in UDP.
    Esp,
    /// UDP to WireGuard's usual port.
    Wireguard,
}

impl Kind {
    /// The kind that a flow's protocol and port stand for.
    pub fn of(flow: &Flow) -> Option<Self> {
        let port = flow.local_port().unwrap_or_default();
        let parsed = [Self::Ipip, Self::Gre, Self::Vxlan, Self::Geneve, Self::GtpU];
        let bits = native::flow_tunnel_of(flow.proto(), port);
        let parsed = parsed
            .into_iter()
            .find(|kind| kind.option().is_some_and(|option| option.bits() == bits));
        parsed.or(match (flow.proto(), port) {
            (IPPROTO_ESP, _) | (IPPROTO_UDP, ESP_IN_UDP) => Some(Self::Esp),
            (IPPROTO_UDP, WIREGUARD) => Some(Self::Wireguard),
            _ => None,
        })
    }

    /// The value of `--tunnels` with which the flows inside are steered; `None` for encrypted ones.
    pub fn option(self) -> Option<Tunnel> {
        Some(match self {
            Self::Ipip => Tunnel::Ipip,
            Self::Gre => Tunnel::Gre,
            Self::Vxlan => Tunnel::Vxlan,
            Self::Geneve => Tunnel::Geneve,
            Self::GtpU => Tunnel::GtpU,
            Self::Esp | Self::Wireguard => return None,
        })
    }

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ipip => "IP in IP",
            Self::Gre => "GRE",
            Self::Vxlan => "VXLAN",
            Self::Geneve => "GENEVE",
            Self::GtpU => "GTP-U",
            Self::Esp => "ESP",
            Self::Wireguard => "WireGuard",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_by_protocol_and_port() {
        for (flow, kind) in [
            ("ipencap/192.0.2.1/192.0.2.2", Some(Kind::Ipip)),
            ("ipv6/192.0.2.1/192.0.2.2", Some(Kind::Ipip)),
            ("gre/192.0.2.1/192.0.2.2", Some(Kind::Gre)),
            ("udp/192.0.2.1:1/4789", Some(Kind::Vxlan)),
            ("udp/192.0.2.1:1/8472", Some(Kind::Vxlan)),
            ("udp/192.0.2.1:1/6081", Some(Kind::Geneve)),
            ("udp/192.0.2.1:1/2152", Some(Kind::GtpU)),
            ("esp/192.0.2.1/192.0.2.2/0x1001", Some(Kind::Esp)),
            ("udp/192.0.2.1:1/4500", Some(Kind::Esp)),
            ("udp/192.0.2.1:1/51820", Some(Kind::Wireguard)),
            ("tcp/192.0.2.1:1/4789", None),
            ("udp/192.0.2.1:1/53", None),
            ("icmp/192.0.2.1/192.0.2.2", None),
        ] {
            let flow: Flow = flow.parse().unwrap();
            assert_eq!(Kind::of(&flow), kind, "{flow}");
        }
    }
}
