// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backlogs' rings and threads: one cpumap per receive queue, an entry per CPU.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use anyhow::{Context, Result, bail};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use nix::errno::Errno;

use super::config::Config;
use crate::host::topology::Topology;
use crate::host::{kthread, sched};

/// A ring releases consumed slots in batches of 16 (`ptr_ring`): it needs this number of slots
/// beyond the limit of frames.
const RING_SLACK: u32 = 16;

/// The largest ring that a cpumap entry may have, in frames (kernel/bpf/cpumap.c).
const RING_MAX: u32 = 16384;

/// Maximum of a backlog's limit, in frames.
pub const LIMIT_MAX: u32 = RING_MAX - RING_SLACK;

/// The cpumaps of all queues. An entry is never replaced, since two threads would then have frames
/// of one flow; empty entries are removed.
pub struct Backlogs {
    cpumaps: Vec<MapHandle>,
    ring_size: u32,
    nice: i32,
}

impl Backlogs {
    pub(crate) fn new(cpumaps: Vec<MapHandle>, config: &Config) -> Self {
        Self {
            cpumaps,
            ring_size: config.backlog_limit.min(LIMIT_MAX) + RING_SLACK,
            nice: config.backlog_nice,
        }
    }

    pub(crate) fn cpumap(&self, queue: u32) -> BorrowedFd<'_> {
        self.cpumaps[queue as usize].as_fd()
    }

    pub(crate) fn nr_queues(&self) -> usize {
        self.cpumaps.len()
    }

    /// Creates the backlog of `queue` for `cpu`, a ring and a kernel thread, if there is none. The
    /// kernel waits until the thread has run once, which takes time on a busy CPU.
    ///
    /// # Errors
    /// When the CPU is offline, or memory is short.
    pub fn make(&self, queue: u32, cpu: u32) -> Result<()> {
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
        if let Err(e) = self.renice(cpu, cpumap.info()?.info.id) {
            tracing::warn!("the backlog's thread on CPU {cpu} keeps its nice value: {e:#}");
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
        let cpumap = &self.cpumaps[queue as usize];
        let key = cpu.to_ne_bytes();
        if cpumap.lookup(&key, MapFlags::ANY)?.is_some() {
            cpumap.delete(&key)?;
        }
        Ok(())
    }

    /// Lets the threads of backlogs for `cpu` that are being created run before every other task
    /// there, so that the kernel no longer waits for them ([`Self::make`]). They sleep after that.
    /// Only before the end: a thread that waits in the kernel keeps a process from ending.
    pub fn hurry(&self, cpu: u32) {
        let threads = kthread::numbered(Path::new("/proc"), &thread_prefix(cpu));
        for cpumap in &self.cpumaps {
            let Ok(info) = cpumap.info() else { continue };
            let exists = cpumap.lookup(&cpu.to_ne_bytes(), MapFlags::ANY);
            let thread = threads.iter().find(|(id, _)| *id == info.info.id);
            if let (Ok(None), Some((_, pid))) = (exists, thread)
                && let Err(e) = sched::set_fifo(*pid, sched::MAX_PRIORITY)
            {
                tracing::warn!("the end waits until CPU {cpu} runs a thread: {e:#}");
            }
        }
    }

    /// Sets the nice value of a cpumap entry's thread.
    fn renice(&self, cpu: u32, map_id: u32) -> Result<()> {
        let threads = kthread::numbered(Path::new("/proc"), &thread_prefix(cpu));
        let thread = threads.iter().find(|(id, _)| *id == map_id);
        let (_, pid) = thread.context("it is not in /proc")?;
        // SAFETY: no memory is involved.
        let ret = unsafe { libc::setpriority(libc::PRIO_PROCESS, *pid, self.nice) };
        Errno::result(ret)?;
        Ok(())
    }
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
