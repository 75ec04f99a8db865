// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reasons against steering a device, with a remedy for each.

use std::fmt;

use anyhow::{Result, bail};
use serde::Serialize;

use super::device::{AttachedXdp, Device, RxMode};
use super::ethtool::{NTUPLE, Offload, RX_HASH};
use super::remedy::Remedy;
use super::shell::{quoted, zero_queue_files};

/// A reason against steering a device, with a remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Objection {
    pub reason: String,
    pub remedy: Remedy,
    /// Steering would lose, reorder or misdirect packets, or would not work.
    pub fatal: bool,
}

impl fmt::Display for Objection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.reason, self.remedy)
    }
}

impl Objection {
    /// With the remedies that remain for steering which is `pinned`.
    pub fn if_pinned(self, pinned: bool) -> Self {
        match pinned {
            true => Self {
                remedy: self.remedy.pinned(),
                ..self
            },
            false => self,
        }
    }
}

impl Device {
    /// Reasons against steering this device in `mode`; fatal ones come first.
    pub fn objections(&self, mode: RxMode) -> Vec<Objection> {
        let mut objections = self.against(mode);
        objections.sort_by_key(|objection| !objection.fatal);
        objections
    }

    /// By the facts about the device alone.
    pub(super) fn against(&self, mode: RxMode) -> Vec<Objection> {
        if let Some(loopback) = self.loopback(mode) {
            return vec![loopback];
        }
        if let Some(elsewhere) = self.received_elsewhere(mode) {
            return vec![elsewhere];
        }
        [
            // In every mode flows are steered once.
            (mode == RxMode::Native || self.xdp.as_ref().is_some_and(AttachedXdp::is_rxsteers))
                .then(|| self.attached_xdp())
                .flatten(),
            self.kernel_rps_on(mode),
        ]
        .into_iter()
        .chain(match mode {
            RxMode::Native => [self.no_native_xdp(), self.tun(), None],
            RxMode::Softirq => [self.hash_stays(), self.hash_spreads(), self.filters()],
        })
        .chain([self.nameless_queues(mode), self.down()])
        .chain(self.losses(mode))
        .flatten()
        .collect()
    }

    /// Whether nothing fatal is against steering this device in `mode`.
    ///
    /// # Errors
    /// With the reason and its remedy.
    pub fn unobstructed(&self, mode: RxMode) -> Result<()> {
        let mut objections = self.objections(mode).into_iter();
        match objections.find(|objection| objection.fatal) {
            Some(objection) => bail!("{objection}"),
            None => Ok(()),
        }
    }

    /// The mode in which this device is steered if none is asked for: by the kernel's own hop, which changes
    /// least, and works with most devices; natively where that one can't be and nothing is lost.
    pub fn fitting_mode(&self) -> RxMode {
        let softirq = self.unobstructed(RxMode::Softirq).is_ok();
        match softirq || self.objection_to_native().is_some() {
            true => RxMode::Softirq,
            false => RxMode::Native,
        }
    }

    /// Why native mode is not a good choice for this device, if nothing is changed at it.
    pub fn objection_to_native(&self) -> Option<Objection> {
        let objections = self.objections(RxMode::Native);
        let fatal = objections.into_iter().find(|objection| objection.fatal);
        fatal
            .or_else(|| self.checksums_missing())
            .or_else(|| self.merging_ends())
    }

    /// Fails if an XDP program is attached to the device; rxsteer never replaces one.
    pub fn without_xdp(&self) -> Result<()> {
        match self.attached_xdp() {
            Some(objection) => bail!("{objection}"),
            None => Ok(()),
        }
    }

    fn attached_xdp(&self) -> Option<Objection> {
        let xdp = self.xdp.as_ref()?;
        let name = match xdp.name.as_str() {
            "" => String::new(),
            name => format!(" `{name}`"),
        };
        let (holder, remedy) = if xdp.holders.is_empty() && xdp.is_rxsteers() {
            let remedy = "it is pinned: go on with `rxsteer run --pin`, or end it: `rxsteer detach`, \
                          both with --pin=FOLDER if it is in another folder than the default";
            (String::new(), remedy.to_owned())
        } else if xdp.holders.is_empty() {
            let word = match xdp.mode.as_str() {
                "native" => "xdpdrv",
                "generic" => "xdpgeneric",
                "offloaded" => "xdpoffload",
                _ => "xdp",
            };
            let remedy = format!(
                "if it is not needed, detach it: `ip link set dev {} {word} off`",
                quoted(&self.name)
            );
            (String::new(), remedy)
        } else {
            let holders = xdp.holders.join(", ");
            (
                format!(", held by {holders}"),
                format!("stop {holders} first"),
            )
        };
        Some(Objection {
            reason: format!(
                "an XDP program is attached to {} already:{name} (id {}, {} mode{holder})",
                self.name, xdp.id, xdp.mode
            ),
            remedy: remedy.into(),
            fatal: true,
        })
    }

    /// Kernel RPS is on, by [`Self::kernel_rps`]. Softirq mode sets `rps_flow_cnt` itself.
    pub fn kernel_rps_on(&self, mode: RxMode) -> Option<Objection> {
        let steers = |file: &&String| mode == RxMode::Native || file.ends_with("rps_cpus");
        let on: Vec<_> = self.kernel_rps.iter().filter(steers).collect();
        let file = on.first()?;
        let more = match on.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        Some(Objection {
            reason: format!(
                "kernel RPS is on for {}, and queues packets a second time ({file}{more})",
                self.name
            ),
            remedy: format!(
                "turn it off: `{}`",
                zero_queue_files(&self.name, &["rx-*/rps_*"])
            )
            .into(),
            fatal: true,
        })
    }

    /// The driver, in a message.
    pub fn driver_name(&self) -> &str {
        match self.driver.as_str() {
            "" => "none",
            driver => driver,
        }
    }

    /// lo has neither queues nor NAPI of its own: its packets come in softirqs of their senders.
    fn loopback(&self, mode: RxMode) -> Option<Objection> {
        (self.loopback && mode == RxMode::Native).then(|| Objection {
            reason: format!("{} is the loopback device: no NAPI polls it", self.name),
            remedy: Remedy::softirq_mode(),
            fatal: true,
        })
    }

    /// The kernel asks nobody about packets that have a hash.
    fn hash_stays(&self) -> Option<Objection> {
        (self.rx_hash == Offload::Fixed).then(|| Objection {
            reason: format!(
                "{} gives packets a hash ({RX_HASH}), which its driver can't turn off",
                self.name
            ),
            remedy: "use `--mode native`".into(),
            fatal: true,
        })
    }

    /// Some drivers spread packets over their queues only while they give them a hash: each writes its
    /// indirection table anew, or clears its types of hashes, when `NETIF_F_RXHASH` changes.
    fn hash_spreads(&self) -> Option<Objection> {
        const SPREAD: [&str; 6] = ["i40e", "iavf", "ice", "idpf", "mvpp2", "virtio_net"];
        let spreads = self.rx_hash == Offload::On && SPREAD.contains(&&*self.driver);
        (spreads && self.rx_queues > 1).then(|| Objection {
            reason: format!(
                "softirq mode turns {RX_HASH} of {} off, and its driver ({}) then receives all packets in \
                 one of its {} queues",
                self.name, self.driver, self.rx_queues
            ),
            remedy: Remedy::with_the_process("use `--mode native --prepare`").or(format!(
                "leave it one queue: `ethtool -L {} combined 1`",
                quoted(&self.name)
            )),
            fatal: true,
        })
    }

    /// By accelerated RFS the driver would move flows to other queues, and the kernel's RPS with them.
    fn filters(&self) -> Option<Objection> {
        (self.ntuple != Offload::Off).then(|| Objection {
            reason: format!(
                "{} has filters for flows ({NTUPLE}), by which accelerated RFS would move flows too",
                self.name
            ),
            remedy: Remedy::from(format!("`ethtool -K {} ntuple off`", quoted(&self.name)))
                .or("use `--mode native`"),
            fatal: true,
        })
    }

    fn no_native_xdp(&self) -> Option<Objection> {
        (self.native_xdp == Some(false)).then(|| Objection {
            reason: format!(
                "the driver of {} ({}) does not run XDP programs",
                self.name,
                self.driver_name()
            ),
            remedy: Remedy::softirq_mode(),
            fatal: true,
        })
    }

    /// tun runs native XDP in the writer's context without NAPI: one queue on several CPUs at once.
    fn tun(&self) -> Option<Objection> {
        (self.driver == "tun").then(|| Objection {
            fatal: true,
            reason: format!(
                "{} is a tun or tap device: its frames are not received by NAPI polls, and their \
                 order can't be kept",
                self.name
            ),
            remedy: Remedy::softirq_mode(),
        })
    }

    fn down(&self) -> Option<Objection> {
        (!self.up).then(|| Objection {
            reason: format!("{} is down: there is nothing to steer yet", self.name),
            remedy: format!("`ip link set dev {} up`", quoted(&self.name)).into(),
            fatal: false,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::host::ethtool::Offload;
    use crate::host::lower::Lower;
    use crate::host::netdev::Napi;

    /// A network card without objections.
    pub(in crate::host) fn card() -> Device {
        Device {
            name: "eth0".into(),
            ifindex: 2,
            driver: "ice".into(),
            rx_queues: 8,
            mtu: 1500,
            up: true,
            hardware: true,
            xdp: None,
            native_xdp: Some(true),
            rx_vlan_offload: Offload::Off,
            rx_merge: Offload::Off,
            gro: true,
            peer: None,
            kernel_rps: Vec::new(),
            without_mac: false,
            unpolled: false,
            loopback: false,
            rx_hash: Offload::Off,
            ntuple: Offload::Off,
            lower: Lower::None,
            napis: Some(vec![Napi {
                id: 8193,
                irq: Some(40),
                ..Napi::default()
            }]),
        }
    }

    /// A veth whose other end can't be reached.
    pub(in crate::host) fn veth() -> Device {
        Device {
            name: "veth0".into(),
            driver: "veth".into(),
            hardware: false,
            napis: Some(Vec::new()),
            ..card()
        }
    }

    /// The only objection; asserts its `fatal`.
    pub(in crate::host) fn only(device: &Device, mode: RxMode, fatal: bool) -> String {
        let objections = device.against(mode);
        assert_eq!(objections.len(), 1, "{objections:?}");
        assert_eq!(objections[0].fatal, fatal, "{objections:?}");
        objections[0].to_string()
    }

    #[test]
    fn nothing_speaks_against_a_plain_card() {
        assert_eq!(card().objections(RxMode::Native), []);
    }

    #[test]
    fn the_loopback_device_is_not_for_native_mode() {
        let lo = Device {
            loopback: true,
            ..card()
        };
        assert!(only(&lo, RxMode::Native, true).contains("--mode softirq"));
        assert_eq!(lo.against(RxMode::Softirq), []);
    }

    /// Of a driver that needs the hash for its queues; one queue needs none.
    #[test]
    fn packets_stay_spread_over_queues() {
        let with = |rx_hash, rx_queues, driver: &str| Device {
            rx_hash,
            rx_queues,
            driver: driver.into(),
            ..card()
        };
        let text = only(&with(Offload::On, 8, "ice"), RxMode::Softirq, true);
        assert!(
            text.contains("one of its 8 queues") && text.contains("--prepare"),
            "{text}"
        );
        for free in [
            with(Offload::Off, 8, "ice"),
            with(Offload::On, 1, "ice"),
            with(Offload::On, 8, "igb"),
        ] {
            assert_eq!(free.against(RxMode::Softirq), []);
        }
    }

    #[test]
    fn native_mode_fits_where_softirq_mode_does_not() {
        let ice = Device {
            rx_hash: Offload::On,
            ..card()
        };
        assert_eq!(ice.fitting_mode(), RxMode::Native);
        assert_eq!(card().fitting_mode(), RxMode::Softirq);
        // Where neither does, what is said is about the hash.
        let tagged = Device {
            rx_vlan_offload: Offload::On,
            ..ice
        };
        assert_eq!(tagged.fitting_mode(), RxMode::Softirq);
    }

    #[test]
    fn a_hash_that_stays_is_not_for_softirq_mode() {
        let with = |rx_hash| Device {
            rx_hash,
            rx_queues: 1,
            ..card()
        };
        assert!(only(&with(Offload::Fixed), RxMode::Softirq, true).contains("--mode native"));
        assert_eq!(with(Offload::Fixed).against(RxMode::Native), []);
        assert_eq!(with(Offload::On).against(RxMode::Softirq), []);
        let filters = Device {
            ntuple: Offload::On,
            ..card()
        };
        assert!(only(&filters, RxMode::Softirq, true).contains("ntuple off"));
        assert_eq!(filters.against(RxMode::Native), []);
    }

    #[test]
    fn an_attached_program_is_named_with_its_holder() {
        let xdp = AttachedXdp {
            id: 41,
            name: "xdp_dispatcher".into(),
            mode: "generic".into(),
            holders: vec!["katran (pid 7)".into()],
        };
        let held = Device {
            xdp: Some(xdp.clone()),
            ..card()
        };
        let text = only(&held, RxMode::Native, true);
        for part in [
            "`xdp_dispatcher`",
            "id 41",
            "generic mode",
            "stop katran (pid 7)",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(held.against(RxMode::Softirq), []);
        let xdp = AttachedXdp {
            holders: Vec::new(),
            name: String::new(),
            ..xdp
        };
        let text = only(
            &Device {
                xdp: Some(xdp),
                ..card()
            },
            RxMode::Native,
            true,
        );
        assert!(
            text.contains("`ip link set dev eth0 xdpgeneric off`"),
            "{text}"
        );
    }

    #[test]
    fn kernel_rps_is_refused_in_both_modes() {
        let device = Device {
            kernel_rps: vec!["rx-3/rps_cpus".into()],
            ..card()
        };
        for mode in [RxMode::Native, RxMode::Softirq] {
            let text = only(&device, mode, true);
            assert!(
                text.contains("rx-3/rps_cpus") && text.contains("echo 0"),
                "{text}"
            );
        }
        let device = Device {
            kernel_rps: vec!["rx-3/rps_flow_cnt".into()],
            ..card()
        };
        assert!(only(&device, RxMode::Native, true).contains("rx-3/rps_flow_cnt"));
        assert_eq!(device.against(RxMode::Softirq), []);
    }

    #[test]
    fn native_mode_needs_a_driver_that_runs_it() {
        let device = Device {
            native_xdp: Some(false),
            ..card()
        };
        assert!(only(&device, RxMode::Native, true).contains("--mode softirq"));
        // Before 6.3 only attaching shows whether native mode works.
        let device = Device {
            native_xdp: None,
            ..card()
        };
        assert_eq!(device.objections(RxMode::Native), []);
    }

    #[test]
    fn packets_that_arrive_elsewhere_are_steered_there() {
        let with = |lower| Device { lower, ..veth() };
        let ports = with(Lower::Ports(vec!["eth0".into(), "eth1".into()]));
        let none = with(Lower::Ports(Vec::new()));
        let vf = with(Lower::VirtualFunction("enP1s1".into()));
        let vlan = with(Lower::Handed(vec!["eth0".into()]));
        assert!(only(&vlan, RxMode::Softirq, true).contains("`rxsteer run eth0`"));
        let mode = RxMode::Native;
        assert!(only(&ports, mode, false).contains("(eth0, eth1)"));
        assert!(only(&none, mode, true).contains("without ports"));
        assert!(only(&vf, mode, true).contains("`rxsteer run enP1s1`"));
    }

    #[test]
    fn queues_without_a_device_are_not_for_native_mode() {
        let device = Device {
            driver: "mtk_soc_eth".into(),
            napis: Some(Vec::new()),
            ..card()
        };
        assert!(only(&device, RxMode::Native, true).contains("--mode softirq"));
        assert_eq!(device.against(RxMode::Softirq), []);
    }

    #[test]
    fn softirq_mode_is_for_every_device() {
        let attached = AttachedXdp {
            id: 1,
            name: String::new(),
            mode: "native".into(),
            holders: Vec::new(),
        };
        let device = Device {
            driver: "tun".into(),
            xdp: Some(attached),
            native_xdp: Some(false),
            rx_vlan_offload: Offload::Fixed,
            ..veth()
        };
        assert_eq!(device.against(RxMode::Softirq), []);
        assert!(device.objection_to_native().is_some());
        assert!(veth().objection_to_native().is_some());
        assert_eq!(card().objection_to_native(), None);
    }

    #[test]
    fn a_device_that_is_down_is_a_warning() {
        let device = Device {
            up: false,
            ..card()
        };
        assert!(only(&device, RxMode::Native, false).contains("ip link set dev eth0 up"));
    }

    #[test]
    fn the_fatal_come_first() {
        let device = Device {
            up: false,
            rx_vlan_offload: Offload::On,
            ..veth()
        };
        let fatal: Vec<bool> = device
            .objections(RxMode::Native)
            .iter()
            .map(|o| o.fatal)
            .collect();
        assert_eq!(fatal, [true, false, false]);
    }
}
