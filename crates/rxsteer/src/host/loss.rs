// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reasons against native mode because of what it loses: what is beside a frame, not in it, and merged
//! segments.

use super::device::{Device, RxMode};
use super::ethtool::Offload;
use super::objection::Objection;
use super::remedy::Remedy;
use super::shell::quoted;

impl Device {
    /// Objections because of what is lost in `mode`: softirq mode queues skbs.
    pub(super) fn losses(&self, mode: RxMode) -> [Option<Objection>; 3] {
        match mode {
            RxMode::Native => [
                self.tags_lost(),
                self.checksums_missing(),
                self.merging_ends(),
            ],
            RxMode::Softirq => [None, None, None],
        }
    }

    /// Tagged frames would arrive on the untagged interface.
    fn tags_lost(&self) -> Option<Objection> {
        let name = &self.name;
        let reason = format!(
            "{name} hands over VLAN tags outside of the frame, where a redirect loses them"
        );
        let reach = |by_hand| {
            Remedy::with_the_process("`--prepare` turns that off until the end").or(by_hand)
        };
        let (offload, remedy) = match (&self.peer, self.driver.as_str()) {
            // The sending end stores the tag; a veth itself takes none out of a frame.
            (Some(peer), _) => {
                let off = peer.ethtool("txvlan off tx-vlan-stag-hw-insert off");
                let off = format!("`{off}` at its other end");
                (peer.tags, reach(off))
            }
            // The setting of this end stands for the other one.
            (None, "veth") => {
                let off = format!(
                    "at the other end, which can't be reached from here, `ethtool -K PEER txvlan off \
                     tx-vlan-stag-hw-insert off`, then here `ethtool -K {} rxvlan off \
                     rx-vlan-stag-hw-parse off`",
                    quoted(name)
                );
                (self.rx_vlan_offload, off.into())
            }
            (None, _) => {
                let off = format!(
                    "`ethtool -K {} rxvlan off rx-vlan-stag-hw-parse off`",
                    quoted(name)
                );
                (self.rx_vlan_offload, reach(off))
            }
        };
        let remedy = match offload {
            Offload::Off => return None,
            Offload::On => remedy,
            Offload::Fixed => {
                Remedy::with_the_process("use `--mode softirq`: the driver can't turn it off")
            }
        };
        Some(Objection {
            reason,
            remedy,
            fatal: true,
        })
    }

    /// The sending end of a veth omits checksums (tx offload). A redirected frame loses the mark
    /// that says so, and is dropped as corrupt. Of an end out of reach that is not known.
    pub(super) fn checksums_missing(&self) -> Option<Objection> {
        let softirq_mode = Remedy::softirq_mode();
        let remedy = match self.peer.as_ref().map(|peer| (peer, peer.checksums)) {
            Some((_, Offload::Off)) => return None,
            Some((_, Offload::Fixed)) => softirq_mode,
            Some((peer, Offload::On)) => softirq_mode
                .or(Remedy::with_the_process(
                    "`--prepare`, which makes it fill them in until the end",
                ))
                .or(format!("`{}`", peer.ethtool("tx off"))),
            None => softirq_mode.or("make it fill them in: there `ethtool -K PEER tx off`"),
        };
        (self.driver == "veth").then(|| Objection {
            reason: format!(
                "what the other end of {} sends without checksums would be dropped",
                self.name
            ),
            remedy,
            fatal: self.peer.is_some(),
        })
    }

    /// The device hands over segments merged, up to 64 KiB, as virtio_net does what its host leaves
    /// unsegmented. Drivers that take an XDP program nevertheless turn that off meanwhile
    /// (virtnet_clear_guest_offloads() in drivers/net/virtio_net.c), and its state stays `on`.
    pub(super) fn merging_ends(&self) -> Option<Objection> {
        let name = &self.name;
        (self.rx_merge != Offload::Off).then(|| Objection {
            reason: format!(
                "{name} merges segments before the kernel sees them, and stops that under an XDP \
                 program: bulk TCP costs more CPU"
            ),
            remedy: Remedy::with_the_process(
                "use `--mode softirq` for hosts that receive much by TCP",
            ),
            fatal: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::objection::tests::{card, only, veth};
    use crate::host::peer::Peer;

    fn with_peer(tags: Offload, checksums: Offload) -> Device {
        let peer = Peer {
            name: "eth0".into(),
            netns: Some("/run/netns/blue".into()),
            tags,
            checksums,
            segments: checksums,
        };
        Device {
            peer: Some(peer),
            ..veth()
        }
    }

    #[test]
    fn offloaded_tags_are_refused_in_native_mode_alone() {
        let device = |rx_vlan_offload| Device {
            rx_vlan_offload,
            ..card()
        };
        let text = only(&device(Offload::On), RxMode::Native, true);
        assert!(text.contains("`ethtool -K eth0 rxvlan off"), "{text}");
        assert!(text.contains("--prepare"), "{text}");
        assert_eq!(device(Offload::On).against(RxMode::Softirq), []);
        let text = only(&device(Offload::Fixed), RxMode::Native, true);
        assert!(
            text.contains("--mode softirq") && !text.contains("--prepare"),
            "{text}"
        );
    }

    #[test]
    fn the_own_end_of_a_veth_stands_for_one_out_of_reach() {
        let device = Device {
            rx_vlan_offload: Offload::On,
            ..veth()
        };
        let first = device.objections(RxMode::Native)[0].clone();
        assert!(
            first.fatal && first.to_string().contains("PEER txvlan off"),
            "{first}"
        );
        assert!(!first.to_string().contains("--prepare"), "{first}");
        assert!(only(&veth(), RxMode::Native, false).contains("PEER tx off"));
    }

    #[test]
    fn auto_does_not_end_merging() {
        let device = |rx_merge| Device {
            rx_merge,
            driver: "virtio_net".into(),
            ..card()
        };
        for on in [Offload::On, Offload::Fixed] {
            let text = only(&device(on), RxMode::Native, false);
            assert!(text.contains("--mode softirq"), "{text}");
            assert!(device(on).objection_to_native().is_some());
            assert_eq!(device(on).against(RxMode::Softirq), []);
        }
        let prepared = device(Offload::On).prepared();
        assert_eq!(prepared.objection_to_native(), None);
        assert_eq!(device(Offload::Off).objection_to_native(), None);
    }

    #[test]
    fn of_a_veth_the_sending_end_decides() {
        let device = with_peer(Offload::Off, Offload::Off);
        assert_eq!(device.objection_to_native(), None);
        // What this end says of itself has no effect.
        let device = Device {
            rx_vlan_offload: Offload::On,
            ..device
        };
        assert_eq!(device.objection_to_native(), None);
        let text = only(&with_peer(Offload::On, Offload::Off), RxMode::Native, true);
        assert!(
            text.contains("`nsenter --net=/run/netns/blue ethtool -K eth0 txvlan off"),
            "{text}"
        );
        let text = only(&with_peer(Offload::Off, Offload::On), RxMode::Native, true);
        assert!(
            text.contains("--prepare") && text.contains("ethtool -K eth0 tx off"),
            "{text}"
        );
        let text = only(
            &with_peer(Offload::Off, Offload::Fixed),
            RxMode::Native,
            true,
        );
        assert!(
            text.contains("--mode softirq") && !text.contains("--prepare"),
            "{text}"
        );
    }
}
