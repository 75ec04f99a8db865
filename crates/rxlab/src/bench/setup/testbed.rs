// SPDX-License-Identifier: MIT OR Apache-2.0
//! One receive queue whose CPU is known, and an application elsewhere.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;

use anyhow::{Context, Result, ensure};
use indexmap::IndexMap;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use rxsteer::host::cpumask::CpuMask;
use rxsteer::host::device::{Device, XdpMode};
use rxsteer::host::topology::Topology;

use crate::bench::experiment::{Condition, Gro, Napi};
use crate::bench::setup::mode::{Active, Cpus, Mode, Way};
use crate::bench::setup::watch::{Seen, Watch};
use crate::lab::ethtool::Offload;
use crate::lab::generator::{Generator, GeneratorConfig};
use crate::lab::link::{Link, LinkConfig};
use crate::lab::netns::Netns;
use crate::lab::nic::Nic;
use crate::lab::xdp::Xdp;

/// The CPU that polls the queue.
pub const INTERRUPT_CPU: u32 = 0;

/// Rings for what the device under test sends: 500 servers may answer at once.
const REPLY_QUEUES: u32 = 4;

/// The lab of a scenario.
pub struct Testbed {
    /// From the generator to the steered device.
    pub link: Link,
    /// Without it, the queue is polled in softirq, on the CPU that sends.
    pub(in crate::bench) nic: Option<Nic>,
    masks: Masks,
    /// What this thread starts runs on the host under test.
    _confined: Option<Confined>,
}

/// The CPUs to choose from.
#[derive(Clone, Debug)]
pub struct Masks {
    /// Online, without the generators'.
    pub all: CpuMask,
    /// Without those that poll the queues; may be empty.
    pub others: CpuMask,
    /// rxsteer's own choice.
    pub auto: CpuMask,
    /// Those that poll the queues.
    pub polling: CpuMask,
    /// Left to generators, clients and the far end of the lab: no part of the host under test. Empty
    /// where there are too few.
    pub generators: CpuMask,
}

impl Masks {
    /// For the lab's queue, polled on [`INTERRUPT_CPU`].
    ///
    /// # Errors
    /// When the host has a single CPU.
    pub fn host() -> Result<Self> {
        let topology = Topology::host();
        let generators = generators(&topology, &topology.online()?);
        Self::around(&topology, &[Some(INTERRUPT_CPU)], generators)
    }

    /// For a device's queues, wherever their interrupts go.
    ///
    /// # Errors
    /// When the host has a single CPU.
    pub fn of_device(device: &Device) -> Result<Self> {
        let topology = Topology::host();
        let polling = (0..device.rx_queues).map(|queue| device.interrupt_cpu(&topology, queue));
        Self::around(&topology, &polling.collect::<Vec<_>>(), CpuMask::new())
    }

    /// For queues that these CPUs poll, as far as it is known.
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

    /// Generators, clients and the far end have CPUs of their own.
    pub fn apart(&self) -> bool {
        !self.generators.is_empty()
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

    /// The CPUs of a way, unless that chooses itself: of all CPUs, the generators' included.
    pub fn of(&self, way: Way) -> Option<&CpuMask> {
        match way.cpus {
            Cpus::Default => self.apart().then_some(&self.auto),
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

/// The CPUs that are left to generators where there are four or more: the last quarter, in whole cores,
/// since who shares a core shares its time; never the core of [`INTERRUPT_CPU`].
fn generators(topology: &Topology, online: &CpuMask) -> CpuMask {
    const FEWEST: usize = 4;
    let wanted = if online.len() < FEWEST {
        0
    } else {
        online.len() / 4
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

/// Keeps a thread, and those that it starts, to some CPUs until dropped; several at once, made and dropped
/// by one thread, keep it to the same.
struct Confined {
    /// It is about the thread that made it.
    _thread: PhantomData<*const ()>,
}

thread_local! {
    /// How many there are of this thread, and where it might run before.
    static CONFINED: RefCell<(usize, CpuSet)> = RefCell::new((0, CpuSet::new()));
}

impl Confined {
    fn to(cpus: &CpuMask) -> Result<Self> {
        CONFINED.with_borrow_mut(|(nr, before)| {
            if *nr == 0 {
                let this = Pid::from_raw(0);
                *before = sched_getaffinity(this)?;
                let mut set = CpuSet::new();
                for cpu in cpus.iter() {
                    set.set(cpu as usize)?;
                }
                sched_setaffinity(this, &set)
                    .with_context(|| format!("this can't run on CPUs {cpus}"))?;
            }
            *nr += 1;
            Ok(Self {
                _thread: PhantomData,
            })
        })
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        CONFINED.with_borrow_mut(|(nr, before)| {
            *nr -= 1;
            if *nr == 0
                && let Err(e) = sched_setaffinity(Pid::from_raw(0), before)
            {
                tracing::warn!("a thread stays on the CPUs of the lab's host: {e}");
            }
        });
    }
}

impl Testbed {
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
        let confined = masks
            .apart()
            .then(|| Confined::to(&masks.all))
            .transpose()?;
        let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
        let config = LinkConfig {
            gro: condition.gro == Gro::On,
            reply_queues: REPLY_QUEUES,
            ..Default::default()
        };
        let link = Link::new(&tester, &dut, &config)?;
        // A veth's softirq runs on the CPU that sends: not on the one that should poll, if the sender has
        // its own.
        let interrupt = condition.napi == Napi::Interrupt;
        let threaded = !interrupt || masks.apart();
        // An XDP program at the other end sees what is sent as it would be on a wire.
        link.dut.ethtool.set(Offload::TxChecksum, false)?;
        // Without GRO a NAPI comes and goes with the XDP program; start() binds the next ones.
        let _napi = Xdp::pass(&link.dut, XdpMode::Native)?;
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
            nic,
            masks,
            _confined: confined,
        })
    }

    /// Starts to send into the queue: from the generators' CPUs, or where there are none from the one
    /// that polls it.
    ///
    /// # Errors
    /// As [`Generator::start`] and [`Generator::apart`].
    pub(in crate::bench) fn send(&self, config: &GeneratorConfig) -> Result<Generator> {
        match self.masks.apart() {
            true => Generator::apart(&self.link, &self.masks.generators, config),
            false => Generator::start(&self.link, INTERRUPT_CPU, config),
        }
    }

    /// Binds the far end's NAPI threads, which need an XDP program there: to the generators' CPUs in
    /// turn; where there are none to the CPU that polls the queue, to stand for the wire and the
    /// interrupt.
    ///
    /// # Errors
    /// When there are none.
    pub(in crate::bench) fn far_end(&self) -> Result<Nic> {
        let tester = &self.link.tester;
        let cpus: Vec<u32> = match self.masks.apart() {
            true => self.masks.generators.iter().collect(),
            false => vec![INTERRUPT_CPU],
        };
        let cpus = cpus.into_iter().cycle().take(tester.queues as usize);
        Nic::new(tester, &cpus.collect::<Vec<_>>())
    }

    /// Watches the host under test.
    ///
    /// # Errors
    /// As [`Watch::begin`].
    pub fn watch(&self) -> Result<Watch> {
        Watch::begin(&self.link.dut.netns, &self.masks.all)
    }

    /// The CPUs to choose from.
    pub fn masks(&self) -> &Masks {
        &self.masks
    }

    /// What shapes all figures of a scenario: the masks, and if there is only one, its condition.
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

    /// A host of CPUs whose cores have so many threads, numbered as Linux does: `distance` apart.
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
            generators(&topology, &online).to_string()
        };
        for few in [1, 2, 3] {
            assert_eq!(of(few, 1, 1), "");
        }
        for (nr, expected) in [(4, "3"), (7, "6"), (8, "6-7"), (16, "12-15"), (32, "24-31")] {
            assert_eq!(of(nr, 1, 1), expected);
        }
        // Hyperthreads beside each other, or numbered after all first ones.
        assert_eq!(of(8, 2, 1), "6-7");
        assert_eq!(of(8, 2, 4), "3,7");
        assert_eq!(of(16, 2, 8), "6-7,14-15");
        // The last CPU may be a thread of the interrupt's core.
        assert_eq!(of(4, 2, 2), "1,3");
        assert_eq!(of(4, 4, 1), "");
        // What the kernel does not tell: every CPU is a core.
        let dir = tempfile::tempdir().unwrap();
        let cpus = CpuMask::from_iter(0..8);
        let unknown = generators(&Topology::at(dir.path()), &cpus);
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
        // As where there are none.
        let (all, none) = masks(&[]);
        let Ok(none) = none else { return };
        assert_eq!(none.all, all);
        assert!(none.of(Way::by_default(Mode::Rxsteer)).is_none());
        if all.len() < 3 {
            // One is too few.
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
    fn a_thread_is_confined_until_the_last_bed_is_gone() {
        let on = || sched_getaffinity(Pid::from_raw(0)).unwrap();
        let before = on();
        let cpu = Topology::host().online().unwrap().first().unwrap();
        let mut one = CpuSet::new();
        one.set(cpu as usize).unwrap();
        let confine = || Confined::to(&CpuMask::from_iter([cpu])).unwrap();
        let (first, second) = (confine(), confine());
        assert_eq!(on(), one);
        assert_eq!(std::thread::spawn(on).join().unwrap(), one);
        drop(first);
        assert_eq!(on(), one);
        drop(second);
        assert_eq!(on(), before);
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
