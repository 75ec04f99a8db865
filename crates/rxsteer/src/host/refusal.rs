// SPDX-License-Identifier: MIT OR Apache-2.0
//! Refusals of the kernel to attach a program, as objections.

use std::io;

use super::device::{Device, RxMode};
use super::objection::Objection;
use super::remedy::Remedy;
use super::shell::quoted;

impl Device {
    /// Why attaching failed, from the error number and the kernel's extended acknowledgement, if
    /// any (libbpf prints it as `Kernel error message: …`).
    pub fn attach_objection(&self, mode: RxMode, errno: i32, extack: Option<&str>) -> Objection {
        let (name, word) = (&self.name, quoted(&self.name));
        let said = extack.unwrap_or_default().trim();
        let lower = said.to_ascii_lowercase();
        let mentions = |words: &[&str]| words.iter().any(|word| lower.contains(word));
        let error = io::Error::from_raw_os_error(errno);
        let why = if said.is_empty() {
            error.to_string()
        } else {
            said.to_string()
        };

        let remedy: Remedy = match errno {
            libc::EPERM | libc::EACCES => "run it as root".into(),
            libc::EBUSY | libc::EEXIST => {
                format!("see what else is attached: `ip -details link show dev {word}`").into()
            }
            _ if mentions(&["lro", "gro_hw", "gro-hw", "hw gro", "hw-gro"]) => {
                let by_hand =
                    format!("turn it off for good: `ethtool -K {word} lro off rx-gro-hw off`");
                Remedy::with_the_process("turn it off meanwhile by `--prepare`").or(by_hand)
            }
            _ if mentions(&["mtu", "multi-buff", "frags", "frame size"])
                || errno == libc::ERANGE =>
            {
                let lower = format!(
                    "the MTU is {}; lower it (`ip link set dev {word} mtu 1500`)",
                    self.mtu
                );
                Remedy::from(lower).or(Remedy::softirq_mode())
            }
            _ if mentions(&["queue", "channel", "ring"])
                || matches!(errno, libc::ENOMEM | libc::ENOSPC) =>
            {
                format!(
                    "the driver needs transmit queues of its own for XDP; use fewer channels: \
                     `ethtool -L {word} combined {}`",
                    (self.rx_queues / 2).max(1)
                )
                .into()
            }
            _ if mode == RxMode::Native => Remedy::softirq_mode(),
            _ => "see the kernel's log: `dmesg`".into(),
        };
        Objection {
            reason: format!("{name} takes no XDP program in {mode} mode: {why}"),
            remedy,
            fatal: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::objection::tests::card;

    #[test]
    fn errors_of_attaching_have_a_remedy() {
        let remedy = |errno, extack| {
            card()
                .attach_objection(RxMode::Native, errno, extack)
                .remedy
                .to_string()
        };
        assert!(remedy(libc::EOPNOTSUPP, None).contains("--mode softirq"));
        assert!(remedy(libc::EPERM, None).contains("root"));
        assert!(remedy(libc::EBUSY, None).contains("ip -details link"));
        assert!(remedy(libc::ENOMEM, None).contains("ethtool -L eth0 combined 4"));
        assert!(remedy(libc::ERANGE, None).contains("mtu 1500"));
        let cases = [
            ("Peer MTU is too large to set XDP", "mtu 1500"),
            ("MTU too large to enable XDP", "mtu 1500"),
            (
                "Can't set XDP while host is implementing GRO_HW/CSUM",
                "rx-gro-hw off",
            ),
            (
                "the Rx/Tx channel count should be at most half of the maximum",
                "ethtool -L",
            ),
            (
                "XDP expects number of rx queues not less than peer tx queues",
                "ethtool -L",
            ),
        ];
        for (said, part) in cases {
            let objection = card().attach_objection(RxMode::Native, libc::EINVAL, Some(said));
            assert!(objection.reason.contains(said), "{objection}");
            assert!(objection.to_string().contains(part), "{objection}");
        }
    }
}
