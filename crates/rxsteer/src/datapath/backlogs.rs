// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backlogs' rings and threads: one cpumap per receive queue, an entry per CPU.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use super::bounds::{Admission, Ledger, Numbers, Place, RING_SLACK};
use super::config::Config;
use super::hops::Ways;
use crate::host::cpumask::CpuMask;
use crate::host::sched::Class;
use crate::host::topology::Topology;
use crate::host::{kthread, sched};

/// The largest ring that a cpumap entry may have, in frames (kernel/bpf/cpumap.c).
const RING_MAX: u32 = 16384;

/// Maximum of a backlog's limit, in frames.
pub const LIMIT_MAX: u32 = RING_MAX - RING_SLACK;

/// The cpumaps of all queues. An entry is never replaced, since two threads would then have frames
/// of one flow; empty entries are removed.
pub struct Backlogs {
    cpumaps: Vec<MapHandle>,
    ring_size: u32,
    sched: Class,
    /// In softirq mode: its queues' backlogs are the CPUs' softnet backlogs.
    ways: Option<Arc<Ways>>,
    ledger: Mutex<Ledger>,
}

impl Backlogs {
    pub(super) fn new(cpumaps: Vec<MapHandle>, config: &Config, ways: Option<Arc<Ways>>) -> Self {
        Self {
            cpumaps,
            ring_size: config.backlog_limit.min(LIMIT_MAX) + RING_SLACK,
            sched: config.backlog_sched,
            ways,
            ledger: Mutex::new(Ledger::new(config.most_backlogs)),
        }
    }

    /// Those of these cpumaps that exist already, in the scheduling class that is wanted now.
    ///
    /// # Errors
    /// When a cpumap can't be read.
    pub(super) fn adopt(cpumaps: Vec<MapHandle>, nr_cpus: u32, config: &Config) -> Result<Self> {
        let backlogs = Self::new(cpumaps, config, None);
        for (queue, cpumap) in (0..).zip(&backlogs.cpumaps) {
            for cpu in 0..nr_cpus {
                if cpumap.lookup(&cpu.to_ne_bytes(), MapFlags::ANY)?.is_some() {
                    backlogs.ledger().created((queue, cpu));
                }
            }
        }
        for ((_, cpu), pid) in backlogs.threads()? {
            if let Err(e) = backlogs.set_class(pid) {
                backlogs.say_class(cpu, &e);
            }
        }
        Ok(backlogs)
    }

    pub(crate) fn cpumap(&self, queue: u32) -> BorrowedFd<'_> {
        self.cpumaps[queue as usize].as_fd()
    }

    pub(crate) fn nr_queues(&self) -> usize {
        self.cpumaps.len()
    }

    /// Creates the backlog of `queue` for `cpu`, a ring and a kernel thread, if there is none, and
    /// if there are not too many. The kernel waits until the thread has run once, which takes time
    /// on a busy CPU.
    ///
    /// In softirq mode: the way there. If there is one, packets have come elsewhere, and its entry is written
    /// again. The other CPUs that may receive get their ways first: a flow may come to one of them next, and its
    /// packets would have to be dropped there until then (`rx_redirect()` in bpf/core/steer.h).
    ///
    /// # Errors
    /// When the CPU is offline, or memory is short.
    pub fn make(&self, queue: u32, cpu: u32) -> Result<()> {
        let Some(ways) = self.ways_of(queue) else {
            return self.make_one(queue, cpu);
        };
        if ways.exists(queue, cpu) {
            return ways.renew(queue, cpu);
        }
        let mut queues = ways.receiving()?;
        queues.retain(|other| *other != queue);
        queues.push(queue);
        queues
            .into_iter()
            .try_for_each(|queue| self.make_one(queue, cpu))
    }

    fn make_one(&self, queue: u32, cpu: u32) -> Result<()> {
        let place = (queue, cpu);
        let admission = self.ledger().admit(place);
        match admission {
            Admission::Create => {}
            Admission::Exists => return Ok(()),
            Admission::Refused { first } => {
                if first {
                    let Numbers { most, .. } = self.numbers();
                    tracing::warn!(
                        "{most} backlogs exist, the most that may exist: flows that want others \
                         stay where they are received, until idle backlogs are taken down"
                    );
                }
                return Ok(());
            }
        }
        let created = self.create(queue, cpu);
        match &created {
            Ok(()) => self.ledger().created(place),
            Err(_) => self.ledger().failed(place, Instant::now()),
        }
        created
    }

    fn ways_of(&self, queue: u32) -> Option<&Ways> {
        self.ways.as_deref().filter(|ways| queue >= ways.queue_base)
    }

    fn create(&self, queue: u32, cpu: u32) -> Result<()> {
        if let Some(ways) = self.ways_of(queue) {
            return ways.make(queue, cpu);
        }
        let cpumap = &self.cpumaps[queue as usize];
        let key = cpu.to_ne_bytes();
        if cpumap.lookup(&key, MapFlags::ANY)?.is_some() {
            return Ok(());
        }
        // For an offline CPU the kernel would create a thread that runs on any CPU.
        if !Topology::host().online()?.contains(cpu) {
            bail!("CPU {cpu} is offline");
        }
        cpumap
            .update(&key, &self.ring_size.to_ne_bytes(), MapFlags::ANY)
            .with_context(|| format!("no backlog for CPU {cpu}"))?;
        if let Err(e) = self.schedule(queue, cpu) {
            self.say_class(cpu, &e);
        }
        Ok(())
    }

    /// The name of the kernel thread of the backlog of `queue` for `cpu`, if there is one.
    ///
    /// # Errors
    /// When the cpumap can't be read.
    pub fn thread(&self, queue: u32, cpu: u32) -> Result<Option<String>> {
        let cpumap = &self.cpumaps[queue as usize];
        let exists = cpumap.lookup(&cpu.to_ne_bytes(), MapFlags::ANY)?.is_some();
        let name = |id| format!("{}{id}", thread_prefix(cpu));
        Ok(match exists {
            true => Some(name(cpumap.info()?.info.id)),
            false => None,
        })
    }

    /// Removes the backlog of `queue` for `cpu`, if there is one. Its thread ends after it has
    /// passed up all frames. The caller ensures that there are none, and that no more enter.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove(&self, queue: u32, cpu: u32) -> Result<()> {
        if let Some(ways) = self.ways_of(queue) {
            ways.remove(queue, cpu);
        } else {
            let cpumap = &self.cpumaps[queue as usize];
            let key = cpu.to_ne_bytes();
            if cpumap.lookup(&key, MapFlags::ANY)?.is_some() {
                cpumap.delete(&key)?;
            }
        }
        self.ledger().removed((queue, cpu));
        Ok(())
    }

    /// How many backlogs there are.
    pub fn numbers(&self) -> Numbers {
        self.ledger().numbers()
    }

    /// The backlogs that exist.
    pub fn exist(&self) -> Vec<Place> {
        self.ledger().exist()
    }

    /// Backlogs that could not be created and may be requested again: at least `after` has passed,
    /// or there is room now.
    pub(super) fn again(&self, after: Duration) -> Vec<Place> {
        self.ledger().again(Instant::now(), after)
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the threads of backlogs for `cpu` that are being created run before every other task
    /// there, so that the kernel no longer waits for them ([`Self::make`]). They sleep after that.
    /// Only before the end: a thread that waits in the kernel keeps a process from ending.
    pub fn hurry(&self, cpu: u32) {
        for (queue, cpumap) in (0..).zip(&self.cpumaps) {
            if !matches!(cpumap.lookup(&cpu.to_ne_bytes(), MapFlags::ANY), Ok(None)) {
                continue;
            }
            for pid in self.pids(queue, cpu) {
                if let Err(e) = sched::set_fifo(pid, sched::MAX_PRIORITY) {
                    tracing::warn!("the end waits until CPU {cpu} runs a thread: {e:#}");
                }
            }
        }
    }

    /// Whether the backlogs' threads are real-time threads.
    pub fn in_real_time(&self) -> bool {
        self.sched == Class::Fifo
    }

    /// The threads of the backlog of `queue` for `cpu`: that of a backlog that was removed just
    /// before may not have ended yet. Empty if they are not in /proc.
    pub fn pids(&self, queue: u32, cpu: u32) -> Vec<u32> {
        let Ok(info) = self.cpumaps[queue as usize].info() else {
            return Vec::new();
        };
        let threads = kthread::numbered(Path::new("/proc"), &thread_prefix(cpu)).into_iter();
        let pids = threads.filter_map(|(id, pid)| (id == info.info.id).then_some(pid));
        pids.collect()
    }

    /// CPUs that have been offline since their backlogs were created: these backlogs' threads are no
    /// longer bound to them.
    ///
    /// # Errors
    /// When the online CPUs can't be read.
    pub(super) fn displaced(&self) -> Result<CpuMask> {
        let online = Topology::host().online()?;
        let threads = self.threads()?.into_iter();
        let displaced =
            threads.filter(|&((_, cpu), pid)| !online.contains(cpu) || !is_bound(pid, cpu));
        Ok(displaced.map(|((_, cpu), _)| cpu).collect())
    }

    /// The threads of all backlogs that exist.
    fn threads(&self) -> Result<Vec<(Place, u32)>> {
        let mut queues = BTreeMap::new();
        for (queue, cpumap) in (0u32..).zip(&self.cpumaps) {
            queues.insert(cpumap.info()?.info.id, queue);
        }
        let cpus: BTreeSet<u32> = self.exist().into_iter().map(|(_, cpu)| cpu).collect();
        let of_cpu = |cpu: u32| {
            let threads = kthread::numbered(Path::new("/proc"), &thread_prefix(cpu));
            threads.into_iter().map(move |(map, pid)| (map, cpu, pid))
        };
        let threads = cpus.into_iter().flat_map(of_cpu);
        let known = |(map, cpu, pid)| Some(((*queues.get(&map)?, cpu), pid));
        Ok(threads.filter_map(known).collect())
    }

    /// Puts the backlog's thread into its scheduling class.
    fn schedule(&self, queue: u32, cpu: u32) -> Result<()> {
        let pids = self.pids(queue, cpu);
        ensure!(!pids.is_empty(), "it is not in /proc");
        pids.into_iter().try_for_each(|pid| self.set_class(pid))
    }

    fn set_class(&self, pid: u32) -> Result<()> {
        match self.sched.set(pid) {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    fn say_class(&self, cpu: u32, why: &anyhow::Error) {
        let class = self.sched;
        tracing::warn!("the backlog's thread on CPU {cpu} is not {class}: {why:#}");
    }
}

/// Whether a thread may run on this CPU alone. A thread that has ended is.
fn is_bound(pid: u32, cpu: u32) -> bool {
    let Ok(may) = sched_getaffinity(Pid::from_raw(pid as i32)) else {
        return true;
    };
    let other = |id: &usize| *id != cpu as usize && may.is_set(*id).unwrap_or(false);
    !(0..CpuSet::count()).any(|id| other(&id))
}

/// Prefix of the names of a CPU's cpumap threads; the map's id follows.
fn thread_prefix(cpu: u32) -> String {
    format!("cpumap/{cpu}/map:")
}

/// A cpumap without entries.
pub(crate) fn create_cpumap(nr_cpus: u32) -> Result<MapHandle> {
    let opts = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    MapHandle::create(MapType::Cpumap, Some("rps_backlog"), 4, 4, nr_cpus, &opts)
        .context("the kernel refused a cpumap")
}
