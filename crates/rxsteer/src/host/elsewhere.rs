// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reasons against steering a device whose packets arrive elsewhere.

use super::device::{Device, RxMode};
use super::lower::Lower;
use super::objection::Objection;
use super::remedy::Remedy;
use super::shell::quoted;

/// Driver of MediaTek's Ethernet (drivers/net/ethernet/mediatek/mtk_eth_soc.c), as it calls itself.
const MEDIATEK: &str = "mtk_soc_eth";

impl Device {
    /// Objections to a device whose packets arrive elsewhere, instead of all others.
    pub(super) fn received_elsewhere(&self, mode: RxMode) -> Option<Objection> {
        let name = &self.name;
        match &self.lower {
            Lower::None => None,
            // Its native program is refused by the driver.
            Lower::Handed(_) if mode == RxMode::Native => None,
            Lower::Handed(lower) => Some(Objection {
                reason: format!(
                    "{name} gets its packets from {}, and the kernel chooses their CPU there",
                    lower.join(", ")
                ),
                remedy: format!(
                    "steer that instead: `rxsteer run {}`",
                    lower.iter().map(quoted).collect::<Vec<_>>().join(" ")
                )
                .into(),
                fatal: true,
            }),
            Lower::Ports(ports) if ports.is_empty() => Some(Objection {
                reason: format!("{name} is a bond without ports: there is nothing to steer"),
                remedy: format!(
                    "add ports first: `ip link set dev PORT master {}`",
                    quoted(name)
                )
                .into(),
                fatal: true,
            }),
            Lower::Ports(ports) => Some(Objection {
                reason: format!(
                    "the packets of {name} arrive on its ports ({})",
                    ports.join(", ")
                ),
                remedy: format!("`rxsteer run {}` steers those", quoted(name)).into(),
                fatal: false,
            }),
            Lower::VirtualFunction(vf) => Some(Objection {
                reason: format!(
                    "the packets of {name} arrive on its virtual function {vf}, in queues of its own"
                ),
                remedy: format!("steer that instead: `rxsteer run {}`", quoted(vf)).into(),
                fatal: true,
            }),
        }
    }

    /// MediaTek's driver registers the queues of all its devices for a device that does not exist:
    /// a native program can't tell whose they are.
    pub(super) fn nameless_queues(&self, mode: RxMode) -> Option<Objection> {
        (mode == RxMode::Native && self.driver == MEDIATEK).then(|| Objection {
            reason: format!(
                "the driver of {} ({MEDIATEK}) does not tell native programs on which device a \
                 packet arrived",
                self.name
            ),
            remedy: Remedy::softirq_mode(),
            fatal: true,
        })
    }
}
