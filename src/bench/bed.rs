// SPDX-License-Identifier: MIT OR Apache-2.0
//! One receive queue whose CPU is known, and an application elsewhere.

use std::fmt;

use anyhow::{Result, ensure};
use indexmap::IndexMap;

use super::mode::{Active, Cpus, Mode, Way};
use super::watch::Seen;
use super::{Condition, Gro, Napi};
use crate::cpumask::CpuMask;
use crate::device::{Device, XdpMode};
use crate::lab::ethtool::Offload;
use crate::lab::link::{Link, LinkConfig};
use crate::lab::netns::Netns;
use crate::lab::nic::Nic;
use crate::lab::xdp::Xdp;
use crate::topology::Topology;

/// The CPU that polls the queue.
pub const INTERRUPT_CPU: u32 = 0;

/// Rings for what the device under test sends: 500 servers may answer at once.
const REPLY_QUEUES: u32 = 4;

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
    /// Without those that poll the queues; may be empty.
    pub others: CpuMask,
    /// rxsteer's own choice.
    pub auto: CpuMask,
    /// Those that poll the queues.
    pub polling: CpuMask,
}

impl Masks {
    /// For the lab's queue, polled on [`INTERRUPT_CPU`].
    ///
    /// # Errors
    /// When the host has a single CPU.
    pub fn host() -> Result<Self> {
        Self::around(&[Some(INTERRUPT_CPU)])
    }

    /// For a device's queues, wherever their interrupts go.
    ///
    /// # Errors
    /// When the host has a single CPU.
    pub fn of_device(device: &Device) -> Result<Self> {
        let topology = Topology::host();
        let polling = (0..device.rx_queues).map(|queue| device.interrupt_cpu(&topology, queue));
        Self::around(&polling.collect::<Vec<_>>())
    }

    /// For queues that these CPUs poll, as far as it is known.
    fn around(polling: &[Option<u32>]) -> Result<Self> {
        let topology = Topology::host();
        let all = topology.online()?;
        ensure!(
            all.len() > 1,
            "one CPU has nothing to steer to: this takes two"
        );
        let auto: Vec<CpuMask> = polling
            .iter()
            .map(|&cpu| Ok(topology.auto_mask(cpu)?.cpus))
            .collect::<Result<_>>()?;
        let auto = auto.iter().flat_map(CpuMask::iter).collect();
        let polling: CpuMask = polling.iter().flatten().copied().collect();
        Ok(Self {
            others: all.without(&polling),
            all,
            auto,
            polling,
        })
    }

    /// Each mode over its own choice of CPUs, if it makes one, and over both masks that the kernel's
    /// documentation recommends (networking/scaling.rst). What would be the same is left out.
    pub fn ways(&self, modes: &[Mode]) -> Vec<Way> {
        let cpus = |mode| match mode {
            Mode::None | Mode::RxsteerRfs | Mode::RxsteerRfsIdle => &[Cpus::Default][..],
            Mode::Rxsteer if self.auto == self.all => &[Cpus::Default, Cpus::Others],
            Mode::Rxsteer => &[Cpus::Default, Cpus::All, Cpus::Others],
            _ => &[Cpus::All, Cpus::Others],
        };
        let differs = !self.others.is_empty() && self.others != self.all;
        modes
            .iter()
            .flat_map(|&mode| cpus(mode).iter().map(move |&cpus| Way { mode, cpus }))
            .filter(|way| way.cpus != Cpus::Others || differs)
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

    /// The CPUs that don't poll a queue, and where a way has put some of so many flows.
    pub fn elsewhere(&self, way: Way, nr_flows: u32) -> CpuMask {
        /// With so many flows, each CPU of a mask has some.
        const MANY: u32 = 16;
        let cpus = match self.of(way) {
            // The hash may choose the CPUs that poll for all of them.
            _ if nr_flows < MANY && way.cpus == Cpus::All => &self.polling,
            cpus => cpus.unwrap_or(&self.auto),
        };
        cpus.without(&self.polling)
    }
}

impl fmt::Display for Masks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "all: CPUs {}", self.all)?;
        match (self.polling.is_empty(), self.others.is_empty()) {
            (true, _) => write!(f, "; which of them poll is not known"),
            (_, true) => write!(f, ", which all poll"),
            _ => write!(f, "; others: CPUs {}", self.others),
        }
    }
}

impl Bed {
    /// Makes a lab for each condition.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn each(conditions: &[Condition]) -> Result<Vec<Self>> {
        conditions.iter().map(|c| Self::new(*c)).collect()
    }

    /// Makes the lab.
    ///
    /// # Errors
    /// When the host does not allow it, or has a single CPU.
    pub fn new(condition: Condition) -> Result<Self> {
        let masks = Masks::host()?;
        let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
        let config = LinkConfig {
            gro: condition.gro == Gro::On,
            reply_queues: REPLY_QUEUES,
            ..Default::default()
        };
        let link = Link::new(&tester, &dut, &config)?;
        let threaded = condition.napi == Napi::Thread;
        // An XDP program at the other end sees what is sent as it would be on a wire.
        link.dut.ethtool.set(Offload::TxChecksum, false)?;
        // Without GRO a NAPI comes and goes with the XDP program; start() binds the next ones.
        let _napi = Xdp::pass(&link.dut, XdpMode::Native)?;
        let nic = threaded.then(|| Nic::new(&link.dut, &[INTERRUPT_CPU]));
        let nic = nic.transpose()?;
        Ok(Self { link, nic, masks })
    }

    /// Makes the far end's NAPI threads, which need an XDP program there, stand for the wire and the
    /// interrupt: on the CPU that polls the queue.
    ///
    /// # Errors
    /// When there are none.
    pub(super) fn interrupt(&self) -> Result<Nic> {
        let tester = &self.link.tester;
        Nic::new(tester, &vec![INTERRUPT_CPU; tester.queues as usize])
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

    /// Whether a way was in effect for packets of so many flows.
    ///
    /// # Errors
    /// [`Unfit`](super::Unfit), with the reason.
    pub fn verify(&self, active: &Active<'_>, way: Way, seen: &Seen, nr_flows: u32) -> Result<()> {
        active.verify(seen, &self.masks.elsewhere(way, nr_flows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_that_would_be_the_same_are_left_out() {
        let masks = |polling: &[u32]| {
            let all = CpuMask::from_iter(0..4);
            let polling = polling.iter().copied().collect();
            Masks {
                others: all.without(&polling),
                auto: all.clone(),
                all,
                polling,
            }
        };
        let ways = |polling: &[u32]| {
            let ways = masks(polling).ways(&[Mode::None, Mode::KernelRps, Mode::Rxsteer]);
            ways.iter().map(Way::to_string).collect::<Vec<_>>()
        };
        let some = [
            "none",
            "kernel-rps (all)",
            "kernel-rps (others)",
            "rxsteer",
            "rxsteer (others)",
        ];
        assert_eq!(ways(&[0, 2]), some);
        for same in [&[][..], &[0, 1, 2, 3]] {
            assert_eq!(ways(same), ["none", "kernel-rps (all)", "rxsteer"]);
        }
        let way = Way::by_default(Mode::Rxsteer);
        assert_eq!(masks(&[0, 2]).elsewhere(way, 1), CpuMask::from_iter([1, 3]));
    }
}
