// SPDX-License-Identifier: MIT OR Apache-2.0
//! One receive queue whose CPU is known, and an application elsewhere.

use std::fmt;

use anyhow::{Result, ensure};
use indexmap::IndexMap;

use super::mode::{Active, Cpus, Mode, Way};
use super::watch::Seen;
use super::{Condition, Gro, Napi};
use crate::cpumask::CpuMask;
use crate::device::XdpMode;
use crate::lab::link::{Link, LinkConfig};
use crate::lab::netns::Netns;
use crate::lab::nic::Nic;
use crate::lab::xdp::Xdp;
use crate::topology::Topology;

/// The CPU that polls the queue.
pub const INTERRUPT_CPU: u32 = 0;

/// The lab of a scenario.
pub struct Bed {
    /// From the generator to the steered device.
    pub link: Link,
    /// Without it, the queue is polled in softirq, on the CPU that sends.
    pub(super) nic: Option<Nic>,
    masks: Masks,
}

/// The CPUs to choose from.
#[derive(Clone, Debug)]
pub struct Masks {
    /// Online.
    pub all: CpuMask,
    /// Without the one that polls the queue.
    pub others: CpuMask,
    /// rxsteer's own choice.
    pub auto: CpuMask,
}

impl Masks {
    /// This host's.
    ///
    /// # Errors
    /// When the host has a single CPU.
    pub fn host() -> Result<Self> {
        let topology = Topology::host();
        let all = topology.online()?;
        let others = all.without(&CpuMask::from_iter([INTERRUPT_CPU]));
        ensure!(
            !others.is_empty(),
            "one CPU has nothing to steer to: this takes two"
        );
        let auto = topology.auto_mask(Some(INTERRUPT_CPU))?.cpus;
        Ok(Self { all, others, auto })
    }

    /// Each mode over its own choice of CPUs, if it makes one, and over both masks that the kernel's
    /// documentation recommends (networking/scaling.rst). What would be the same is left out.
    pub fn ways(&self, modes: &[Mode]) -> Vec<Way> {
        let cpus = |mode| match mode {
            Mode::None => &[Cpus::Default][..],
            Mode::Rxsteer if self.auto == self.all => &[Cpus::Default, Cpus::Others],
            Mode::Rxsteer => &[Cpus::Default, Cpus::All, Cpus::Others],
            _ => &[Cpus::All, Cpus::Others],
        };
        modes
            .iter()
            .flat_map(|&mode| cpus(mode).iter().map(move |&cpus| Way { mode, cpus }))
            .collect()
    }

    /// The CPUs of a way, unless that chooses itself.
    pub fn of(&self, way: Way) -> Option<&CpuMask> {
        match way.cpus {
            Cpus::Default => None,
            Cpus::All => Some(&self.all),
            Cpus::Others => Some(&self.others),
        }
    }
}

impl fmt::Display for Masks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "all: CPUs {}; others: CPUs {}", self.all, self.others)
    }
}

impl Bed {
    /// Makes the lab.
    ///
    /// # Errors
    /// When the host does not allow it, or has a single CPU.
    pub fn new(condition: Condition) -> Result<Self> {
        let masks = Masks::host()?;
        let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
        let config = LinkConfig {
            gro: condition.gro == Gro::On,
            ..Default::default()
        };
        let link = Link::new(&tester, &dut, &config)?;
        let threaded = condition.napi == Napi::Thread;
        // Without GRO a NAPI comes and goes with the XDP program; start() binds the next ones.
        let _napi = Xdp::pass(&link.dut, XdpMode::Native)?;
        let nic = threaded.then(|| Nic::new(&link.dut, &[INTERRUPT_CPU]));
        let nic = nic.transpose()?;
        Ok(Self { link, nic, masks })
    }

    /// The CPUs to choose from.
    pub fn masks(&self) -> &Masks {
        &self.masks
    }

    /// What shapes all figures of a scenario: the masks, and if there is only one, its condition.
    pub fn conditions(&self, conditions: &[Condition]) -> IndexMap<String, String> {
        let mut map = IndexMap::new();
        if let [condition] = conditions {
            map.insert(
                "queue".to_owned(),
                format!("polled on CPU {INTERRUPT_CPU}; {condition}"),
            );
        }
        map.insert("masks".to_owned(), self.masks.to_string());
        map
    }

    /// Switches a way to steer on.
    ///
    /// # Errors
    /// When it can't be, with the reason.
    pub fn start(&self, way: Way) -> Result<Active<'_>> {
        let active = Active::start(&self.link.dut, way.mode, self.masks.of(way))?;
        if let Some(nic) = &self.nic {
            nic.bind()?;
        }
        Ok(active)
    }

    /// Whether a way was in effect for packets of many flows.
    ///
    /// # Errors
    /// [`Unfit`](super::Unfit), with the reason.
    pub fn verify(&self, active: &Active<'_>, way: Way, seen: &Seen) -> Result<()> {
        let cpus = self.masks.of(way).unwrap_or(&self.masks.auto);
        let polling = CpuMask::from_iter([INTERRUPT_CPU]);
        active.verify(seen, &cpus.without(&polling))
    }
}
