// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backlogs' rings and threads: one cpumap per receive queue, an entry per CPU.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use anyhow::{Context, Result, bail};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use nix::errno::Errno;

use super::config::Config;
use crate::host::kthread;
use crate::host::topology::Topology;

/// A ring gives consumed slots back in batches of 16 (`ptr_ring`): it must be this much larger
/// than what may be in it, in frames.
const RING_SLACK: u32 = 16;

/// The largest ring that a cpumap entry may have, in frames (kernel/bpf/cpumap.c).
const RING_MAX: u32 = 16384;

/// The most frames that a backlog can be told to hold.
pub const LIMIT_MAX: u32 = RING_MAX - RING_SLACK;

/// The cpumaps of all queues. Entries are never replaced, since two threads would have frames of one
/// flow; they are removed when empty.
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

    /// Makes the backlog of `queue` for `cpu`, a ring and a kernel thread, if there is none. The
    /// kernel waits until the thread has run once: on a CPU that is busy this takes time.
    ///
    /// # Errors
    /// When the CPU is not possible, or memory is short.
    pub fn make(&self, queue: u32, cpu: u32) -> Result<()> {
        let cpumap = &self.cpumaps[queue as usize];
        let key = cpu.to_ne_bytes();
        if cpumap.lookup(&key, MapFlags::ANY)?.is_some() {
            return Ok(());
        }
        // The kernel would make it, and let its thread run anywhere.
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

    /// Takes the backlog of `queue` for `cpu` away, if there is one: its thread ends when it has
    /// passed up what it has. The caller has seen to it that there is nothing, and that nothing
    /// comes.
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

    /// Gives the thread of a cpumap entry its nice value.
    fn renice(&self, cpu: u32, map_id: u32) -> Result<()> {
        let threads = kthread::numbered(Path::new("/proc"), &thread_prefix(cpu));
        let thread = threads.iter().find(|(id, _)| *id == map_id);
        let (_, pid) = thread.context("it is not in /proc")?;
        // SAFETY: takes numbers, returns one.
        let ret = unsafe { libc::setpriority(libc::PRIO_PROCESS, *pid, self.nice) };
        Errno::result(ret)?;
        Ok(())
    }
}

/// What the names of a CPU's cpumap threads begin with; the map's id follows.
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
