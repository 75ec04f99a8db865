// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets that reach a veth outside of its NAPI instances.

use super::device::Device;
use super::ethtool::Offload;

impl Device {
    /// Why packets bypass the NAPI instances that GRO gives this veth, in a sentence with a remedy;
    /// `None` if they don't. veth_skb_is_eligible_for_gro() in drivers/net/veth.c: while the sending
    /// end segments TCP by itself, no packet of it is for GRO. With an XDP program all are polled.
    pub fn bypasses_napi(&self) -> Option<String> {
        if self.driver != "veth" || self.xdp.is_some() {
            return None;
        }
        let name = &self.name;
        Some(match &self.peer {
            Some(peer) if peer.segments == Offload::Off => return None,
            Some(peer) => format!(
                "packets bypass the NAPI instances of {name} while its other end leaves segments \
                 together; `{}` ends that",
                peer.ethtool("tso off")
            ),
            None => format!(
                "packets bypass the NAPI instances of {name} unless its other end, which can't be \
                 reached from here, segments TCP: `ethtool -K PEER tso off` there"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::host::device::{AttachedXdp, Device};
    use crate::host::objection::tests::{card, veth};

    #[test]
    fn a_card_and_a_veth_with_a_program_are_polled() {
        assert!(
            veth()
                .bypasses_napi()
                .is_some_and(|why| why.contains("PEER tso off"))
        );
        assert_eq!(card().bypasses_napi(), None);
        let xdp = AttachedXdp {
            id: 1,
            name: String::new(),
            mode: "native".into(),
            holders: Vec::new(),
        };
        let attached = Device {
            xdp: Some(xdp),
            ..veth()
        };
        assert_eq!(attached.bypasses_napi(), None);
    }
}
