// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lab of most scenarios: one receive queue polled on a known CPU, the application elsewhere.

use std::fmt;

use anyhow::{Result, bail, ensure};
use indexmap::IndexMap;
use nix::unistd::Pid;
use rxsteer::host::cpumask::CpuMask;
use rxsteer::host::device::Device;
use rxsteer::host::topology::Topology;

use crate::bench::experiment::{Condition, DeviceKind, Gro, Napi, Unfit};
use crate::bench::setup::confined::Confined;
use crate::bench::setup::mode::{Active, Cpus, Mode, Way};
use crate::bench::setup::watch::{Seen, Watch};
use crate::lab::bridge::bridge;
use crate::lab::container::Container;
use crate::lab::ethtool::Offload;
use crate::lab::frame::{Frames, UdpFlows, Vxlan};
use crate::lab::generator::{Generator, GeneratorConfig};
use crate::lab::link::{End, Link, LinkConfig};
use crate::lab::netns::{Netns, confine};
use crate::lab::nic::Nic;
use crate::lab::xdp::Xdp;

/// The CPU that polls the queue.
pub const INTERRUPT_CPU: u32 = 0;

/// Receive queues of the tester: 500 servers may answer at once.
const REPLY_QUEUES: u32 = 4;

pub struct Testbed {
    /// From the generator to the NIC, which is steered unless there is an inner device.
    pub link: Link,
    inner: Option<Inner>,
    /// Where the applications run, if the host passes packets for them on by NAT.
    container: Option<Container>,
    /// With an inner device, the program under which the NIC has its NAPI without GRO. Without, each
    /// mode has its own.
    _napi: Option<Xdp>,
    /// Threads that poll the queue; None: softirq polls it on the sending CPU.
    pub(in crate::bench) nic: Option<Nic>,
    masks: Masks,
    /// Keeps threads started by this one on the host under test.
    _confined: Option<Confined>,
}

/// The steered device, if frames reach it through the NIC.
struct Inner {
    end: End,
    /// The tunnel that ends there.
    vxlan: Option<Vxlan>,
}

impl Inner {
    /// `None` if the NIC itself is steered.
    fn new(kind: DeviceKind, nic: &End) -> Result<Option<Self>> {
        const ID: u8 = 1;
        const VNI: u32 = 42;
        let (mut end, vxlan) = match kind {
            DeviceKind::Nic => return Ok(None),
            DeviceKind::Vxlan => (nic.vxlan(ID, VNI)?, Some(Vxlan::to(nic, VNI))),
            DeviceKind::Plain => {
                let config = LinkConfig {
                    id: ID,
                    gro: false,
                    ..LinkConfig::default()
                };
                let link = Link::new(&nic.netns, &Netns::new("container")?, &config)?;
                bridge(&nic.netns, &[nic, &link.tester])?;
                (link.dut, None)
            }
            DeviceKind::Tun | DeviceKind::Lo => bail!("frames can't be generated for {kind:?}"),
        };
        end.pass = false;
        Ok(Some(Self { end, vxlan }))
    }
}

/// CPUs by role.
#[derive(Clone, Debug)]
pub struct Masks {
    /// Online CPUs without the generators'.
    pub all: CpuMask,
    /// `all` without `polling`; may be empty.
    pub others: CpuMask,
    /// rxsteer's default mask.
    pub auto: CpuMask,
    /// CPUs that poll a queue.
    pub polling: CpuMask,
    /// Reserved for generators, clients and the tester's end, and not part of the host under test.
    /// Empty if there are fewer than four CPUs.
    pub generators: CpuMask,
}

impl Masks {
    /// Masks of the lab, with the queue polled on [`INTERRUPT_CPU`].
    ///
    /// # Errors
    /// When the host has a single CPU.
    pub fn host() -> Result<Self> {
        Self::in_the_lab(4)
    }

    /// As [`Self::host`], with half of the CPUs for clients.
    ///
    /// # Errors
    /// When the host has a single CPU.
    pub fn half() -> Result<Self> {
        Self::in_the_lab(2)
    }

    /// With one CPU of `share` for generators.
    fn in_the_lab(share: usize) -> Result<Self> {
        let topology = Topology::host();
        let generators = generators(&topology, &topology.online()?, share);
        Self::around(&topology, &[Some(INTERRUPT_CPU)], generators)
    }

    /// Masks of a device, by the affinity of its interrupts.
    ///
    /// # Errors
    /// When the host has a single CPU.
    pub fn of_device(device: &Device) -> Result<Self> {
        let topology = Topology::host();
        let polling = (0..device.rx_queues).map(|queue| device.interrupt_cpu(&topology, queue));
        Self::around(&topology, &polling.collect::<Vec<_>>(), CpuMask::new())
    }

    /// Masks for queues polled by these CPUs, where known.
    fn around(topology: &Topology, polling: &[Option<u32>], generators: CpuMask) -> Result<Self> {
        let all = topology.online()?.without(&generators);
        ensure!(
            all.len() > 1,
            "one CPU has nothing to steer to: this takes two"
        );
        let auto: Vec<CpuMask> = polling
            .iter()
            .map(|&cpu| Ok(topology.auto_mask(cpu)?.cpus))
            .collect::<Result<_>>()?;
        let auto: CpuMask = auto.iter().flat_map(CpuMask::iter).collect();
        let polling: CpuMask = polling.iter().flatten().copied().collect();
        Ok(Self {
            others: all.without(&polling),
            auto: auto.without(&generators),
            all,
            polling,
            generators,
        })
    }

    /// Generators, clients and the tester's end have CPUs of their own.
    pub fn apart(&self) -> bool {
        !self.generators.is_empty()
    }

    /// The ways for these modes: over the mode's own choice of CPUs, if it has one, and over the
    /// masks that the kernel's documentation recommends (networking/scaling.rst). Duplicates are
    /// left out.
    pub fn ways(&self, modes: &[Mode]) -> Vec<Way> {
        let cpus = |mode| match mode {
            Mode::None | Mode::RxsteerRfs | Mode::RxsteerRfsIdle | Mode::RxsteerSoftirqRfs => {
                &[Cpus::Default][..]
            }
            Mode::RxsteerSoftirq | Mode::RxsteerSoftirqRfsNat => &[Cpus::Default],
            Mode::RxsteerRfsNat | Mode::RxsteerNat => &[Cpus::Default],
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

    /// Mask of a way; None if the mode chooses among all CPUs.
    pub fn of(&self, way: Way) -> Option<&CpuMask> {
        match way.cpus {
            Cpus::Default => self.apart().then_some(&self.auto),
            Cpus::All => Some(&self.all),
            Cpus::Others => Some(&self.others),
        }
    }

    /// CPUs that do not poll a queue and to which a way has moved some of `nr_flows` flows.
    pub fn elsewhere(&self, way: Way, nr_flows: u32) -> CpuMask {
        /// With this many flows, each CPU of a mask has some.
        const MANY: u32 = 16;
        let cpus = match self.of(way) {
            // The hash may select polling CPUs for all flows.
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

/// The last CPUs, one of `share`, if there are four or more. Whole cores, since siblings share the core's
/// time; never the core of [`INTERRUPT_CPU`].
fn generators(topology: &Topology, online: &CpuMask, share: usize) -> CpuMask {
    const FEWEST: usize = 4;
    let wanted = if online.len() < FEWEST {
        0
    } else {
        online.len() / share
    };
    let interrupt = topology.core(INTERRUPT_CPU);
    let mut taken = CpuMask::new();
    for cpu in online.iter().collect::<Vec<_>>().into_iter().rev() {
        if taken.len() >= wanted {
            break;
        }
        if !interrupt.contains(cpu) {
            let core = topology.core(cpu).intersect(online);
            taken = taken.iter().chain(core.iter()).collect();
        }
    }
    taken
}

impl Testbed {
    /// A testbed per condition.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn each(conditions: &[Condition]) -> Result<Vec<Self>> {
        conditions.iter().map(|c| Self::new(*c)).collect()
    }

    /// Creates namespaces, link and NAPI threads.
    ///
    /// # Errors
    /// The host does not allow a lab, or has a single CPU.
    pub fn new(condition: Condition) -> Result<Self> {
        Self::within(condition, Masks::host()?, REPLY_QUEUES)
    }

    /// As [`Self::new`], with as many CPUs for the clients as for the host under test, and a queue on each
    /// for what it sends: programs that cost the client about what they cost the server.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_programs(condition: Condition) -> Result<Self> {
        let masks = Masks::half()?;
        let reply_queues = masks.generators.len().max(1) as u32;
        Self::within(condition, masks, reply_queues)
    }

    fn within(condition: Condition, masks: Masks, reply_queues: u32) -> Result<Self> {
        let confined = masks
            .apart()
            .then(|| Confined::to(&masks.all))
            .transpose()?;
        let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
        let config = LinkConfig {
            gro: condition.gro == Gro::On,
            reply_queues,
            ..Default::default()
        };
        let link = Link::new(&tester, &dut, &config)?;
        // A veth's softirq runs on the sending CPU. If the sender has a CPU of its own, a thread
        // polls instead.
        let interrupt = condition.napi == Napi::Interrupt;
        let threaded = !interrupt || masks.apart();
        // The XDP program at the other end expects frames as on a wire.
        link.dut.ethtool.set(Offload::TxChecksum, false)?;
        let inner = Inner::new(condition.device, &link.dut)?;
        // Without GRO, the NAPI exists only under an XDP program. start() binds the threads again.
        let napi = Xdp::pass(&link.dut)?;
        let nic = threaded.then(|| {
            let nic = Nic::new(&link.dut, &[INTERRUPT_CPU])?;
            match interrupt {
                true => nic.before_others(),
                false => Ok(nic),
            }
        });
        let nic = nic.transpose()?;
        Ok(Self {
            link,
            _napi: inner.is_some().then_some(napi),
            inner,
            container: None,
            nic,
            masks,
            _confined: confined,
        })
    }

    /// As [`Self::new`], with the applications in a container behind the host.
    ///
    /// # Errors
    /// As [`Self::new`]; [`Unfit`](crate::bench::experiment::Unfit) when there is no `nft`, or the
    /// kernel has no NAT.
    pub fn behind_nat(condition: Condition) -> Result<Self> {
        let testbed = Self::new(condition)?;
        let container = Container::new(&testbed.link.dut);
        Ok(Self {
            container: Some(container.map_err(|e| Unfit(format!("{e:#}")))?),
            ..testbed
        })
    }

    /// Flows from the tester's end, as the tester sends them.
    pub fn flows(&self, nr_flows: u32) -> Result<UdpFlows> {
        let flows = UdpFlows::to(&self.link.dut, nr_flows);
        match &self.container {
            Some(container) => container.published(flows),
            None => Ok(flows),
        }
    }

    /// Where the applications run, and these flows as they see them.
    pub fn applications(&self, flows: &UdpFlows) -> (&Netns, UdpFlows) {
        match &self.container {
            Some(container) => (container.netns(), container.inside(flows)),
            None => (&self.link.dut.netns, flows.clone()),
        }
    }

    /// The steered device.
    pub fn device(&self) -> &End {
        self.inner
            .as_ref()
            .map_or(&self.link.dut, |inner| &inner.end)
    }

    /// The frames of flows to the steered device, as the NIC receives them.
    pub fn frames(&self, flows: &UdpFlows) -> Frames {
        let vxlan = self.inner.as_ref().and_then(|inner| inner.vxlan.clone());
        match vxlan {
            Some(vxlan) => Frames::Vxlan(vxlan, flows.clone()),
            None => Frames::Udp(flows.clone()),
        }
    }

    /// Starts a generator into the queue: on the generators' CPUs, or without those on the CPU that
    /// polls the queue.
    ///
    /// # Errors
    /// As [`Generator::start`] and [`Generator::apart`].
    pub(in crate::bench) fn send(&self, config: &GeneratorConfig) -> Result<Generator> {
        match self.masks.apart() {
            true => Generator::apart(&self.link, &self.masks.generators, config),
            false => Generator::start(&self.link, INTERRUPT_CPU, config),
        }
    }

    /// CPUs of whoever sends to the device: the generators', or without those the one that polls the
    /// queue.
    pub(in crate::bench) fn senders(&self) -> Vec<u32> {
        match self.masks.apart() {
            true => self.masks.generators.iter().collect(),
            false => vec![INTERRUPT_CPU],
        }
    }

    /// Binds the NAPI threads of the tester's end, which needs an XDP program, to `cpus` in turn, in
    /// place of wire and interrupt.
    ///
    /// # Errors
    /// When there are no such threads.
    pub(in crate::bench) fn far_end(&self, cpus: &[u32]) -> Result<Nic> {
        let tester = &self.link.tester;
        let cpus = cpus.iter().copied().cycle().take(tester.queues as usize);
        Nic::new(tester, &cpus.collect::<Vec<_>>())
    }

    /// Counts on the host under test from now on.
    ///
    /// # Errors
    /// As [`Watch::begin`].
    pub fn watch(&self) -> Result<Watch> {
        Watch::begin(&self.device().netns, &self.masks.all)
    }

    pub fn masks(&self) -> &Masks {
        &self.masks
    }

    /// Conditions of a scenario's figures: the masks and, if there is only one, the condition.
    pub fn conditions(&self, conditions: &[Condition]) -> IndexMap<String, String> {
        let mut map = IndexMap::new();
        if let [condition] = conditions {
            let by = match (self.masks.apart(), condition.napi) {
                (true, Napi::Interrupt) => " by a thread of priority SCHED_FIFO",
                _ => "",
            };
            map.insert(
                "queue".to_owned(),
                format!("polled on CPU {INTERRUPT_CPU}{by}; {condition}"),
            );
            if condition.device != DeviceKind::Nic {
                map.insert("device".to_owned(), condition.device.to_string());
            }
        }
        map.insert("masks".to_owned(), self.masks.to_string());
        let generators = match self.masks.apart() {
            true => format!(
                "CPUs {}, which are no part of the host: in no mask, and not in its CPU time",
                self.masks.generators
            ),
            false => format!("CPU {INTERRUPT_CPU}, which polls the queue"),
        };
        map.insert("generators".to_owned(), generators);
        map
    }

    /// Switches a mode on.
    ///
    /// # Errors
    /// When it can't be switched on.
    pub fn start(&self, way: Way) -> Result<Active<'_>> {
        self.start_on(&[self.device()], way)
    }

    /// Switches a mode on, also for other devices; under rxsteer's modes these are in the namespace of the steered one.
    ///
    /// # Errors
    /// When it can't be switched on.
    pub fn start_with<'a>(&'a self, others: &[&'a End], way: Way) -> Result<Active<'a>> {
        self.start_on(&[&[self.device()], others].concat(), way)
    }

    fn start_on<'a>(&'a self, devices: &[&'a End], way: Way) -> Result<Active<'a>> {
        // Steering, and what is started from now on, runs on the host under test, whichever testbed was made last.
        if self.masks.apart() {
            confine(Pid::from_raw(0), &self.masks.all)?;
        }
        let active = Active::start_on(devices, way.mode, self.masks.of(way))?;
        if let Some(nic) = &self.nic {
            nic.bind()?;
        }
        Ok(active)
    }

    /// Checks that a way was in effect for packets of `nr_flows` flows.
    ///
    /// # Errors
    /// [`Unfit`](crate::bench::experiment::Unfit), with the reason.
    pub fn verify(&self, active: &Active<'_>, way: Way, seen: &Seen, nr_flows: u32) -> Result<()> {
        active.verify(seen, &self.masks.elsewhere(way, nr_flows))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    /// A host with `nr` CPUs and `threads` per core; siblings are `distance` apart in Linux's
    /// numbering.
    fn host(nr: u32, threads: u32, distance: u32) -> (TempDir, Topology, CpuMask) {
        let dir = tempfile::tempdir().unwrap();
        for cpu in 0..nr {
            let first = cpu - cpu / distance % threads * distance;
            let core: Vec<String> = (0..threads)
                .map(|thread| (first + thread * distance).to_string())
                .collect();
            let path = dir
                .path()
                .join(format!("sys/devices/system/cpu/cpu{cpu}/topology"));
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("core_cpus_list"), core.join(",")).unwrap();
        }
        let topology = Topology::at(dir.path());
        (dir, topology, CpuMask::from_iter(0..nr))
    }

    #[test]
    fn the_last_quarter_of_the_cores_is_left_to_generators() {
        let of = |nr, threads, distance| {
            let (_dir, topology, online) = host(nr, threads, distance);
            generators(&topology, &online, 4).to_string()
        };
        for few in [1, 2, 3] {
            assert_eq!(of(few, 1, 1), "");
        }
        for (nr, expected) in [(4, "3"), (7, "6"), (8, "6-7"), (16, "12-15"), (32, "24-31")] {
            assert_eq!(of(nr, 1, 1), expected);
        }
        // Siblings numbered consecutively, or after all first threads.
        assert_eq!(of(8, 2, 1), "6-7");
        assert_eq!(of(8, 2, 4), "3,7");
        assert_eq!(of(16, 2, 8), "6-7,14-15");
        // The last CPU may be a sibling of the interrupt's core.
        assert_eq!(of(4, 2, 2), "1,3");
        assert_eq!(of(4, 4, 1), "");
        // No topology: every CPU counts as a core.
        let dir = tempfile::tempdir().unwrap();
        let cpus = CpuMask::from_iter(0..8);
        let unknown = generators(&Topology::at(dir.path()), &cpus, 4);
        assert_eq!(unknown, CpuMask::from_iter([6, 7]));
    }

    #[test]
    fn generators_are_in_no_mask() {
        let masks = |generators: &[u32]| {
            let all = Topology::host().online().unwrap();
            let generators = CpuMask::from_iter(generators.iter().copied());
            (
                all,
                Masks::around(&Topology::host(), &[Some(0)], generators),
            )
        };
        // Without generators.
        let (all, none) = masks(&[]);
        let Ok(none) = none else { return };
        assert_eq!(none.all, all);
        assert!(none.of(Way::by_default(Mode::Rxsteer)).is_none());
        if all.len() < 3 {
            // One remaining CPU is too few.
            assert!(masks(&[1]).1.is_err());
            return;
        }
        let masks = masks(&[1]).1.unwrap();
        for mask in [&masks.all, &masks.others, &masks.auto] {
            assert!(!mask.contains(1), "{masks}");
        }
        let default = masks.of(Way::by_default(Mode::Rxsteer));
        assert_eq!(default, Some(&masks.auto));
    }

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
                generators: CpuMask::new(),
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
