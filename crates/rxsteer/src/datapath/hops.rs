// SPDX-License-Identifier: MIT OR Apache-2.0
//! Softirq mode: the programs of its devices, and the ways from CPU to CPU by the kernel's own RPS
//! (`bpf/dissector.bpf.c`).

use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use anyhow::{Context, Result, ensure};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle};
use tracing::{error, warn};

use super::backlogged::grace_period;
use super::call;
use super::config::{Config, SoftirqKind, draw};
use super::hop_keys::{Key, Keys, nr_hashes};
use super::mapped::Mapped;
use super::shared::{constants, lend_maps, set_constants};
use super::tables::Tables;
use crate::bpf::dissector_skel::{DissectorSkel, DissectorSkelBuilder};
use crate::bpf::hops_skel::{HopsSkel, HopsSkelBuilder};
use crate::bpf::open;
use crate::bpf::trace_skel::TraceSkel;
use crate::host::anchors::Anchors;
use crate::host::asked::Asked;
use crate::host::flow_entries::FlowEntries;
use crate::host::gone::is_gone;
use crate::host::tc::{self, Hook, TcLink};
use crate::host::topology::Topology;
use crate::host::{netns, peer};
use crate::types::{
    backlog, backlog_closed, hop_hash, poll_cpu, rx_config, rx_queue, softirq_device, softnet_way,
};

/// The fewest entries of the kernel's table, of 4 bytes: all sockets of the host that receive by devices that are
/// not steered write into it too.
const ENTRIES_MIN: u32 = 1 << 20;

/// So many have ways to a CPU at once: each takes a socket.
const FEW_CPUS: usize = 16;

type HashOf = Box<dyn Fn(&[u8]) -> Result<u32> + Send>;

/// Makes ways: for the threads that make backlogs.
pub(super) struct Ways {
    pub(super) queue_base: u32,
    nr_cpus: u32,
    anchors: Anchors,
    keys: Mutex<Keys<HashOf>>,
    counts: Mapped<backlog>,
    queues: Mapped<rx_queue>,
    ways: Mapped<softnet_way>,
    hashes: Mapped<hop_hash>,
    polls: Mapped<poll_cpu>,
    /// What the kernel asks about, and its table; once a device is attached.
    asked: Mutex<Option<(Asked, FlowEntries)>>,
    /// For grace periods.
    cpumaps: MapHandle,
    cpumap: OwnedFd,
}

/// See the module's documentation.
pub(super) struct Hops {
    link: Option<OwnedFd>,
    program: DissectorSkel<'static>,
    /// How many devices were forgotten.
    forgotten: Mapped<u64>,
    pub(super) ways: Arc<Ways>,
    base: rx_config,
    _drops: Link,
    _downs: Link,
    /// While there are devices without polls.
    ends: Option<Link>,
    common: HopsSkel<'static>,
}

/// The programs of a steered device.
pub(super) struct Hooks {
    /// Of lo, or the other end of a veth.
    _sent: Option<TcLink>,
    _arrives: TcLink,
}

impl Ways {
    fn index(&self, queue: u32, cpu: u32) -> u32 {
        queue * self.nr_cpus + cpu
    }

    fn take(&self) -> Result<Key> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.take()
    }

    fn asked(&self) -> MutexGuard<'_, Option<(Asked, FlowEntries)>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_asked<T>(&self, f: impl FnOnce(&mut Asked) -> Result<T>) -> Result<T> {
        let mut asked = self.asked();
        let (asked, _) = asked.as_mut().context("softirq mode has ended")?;
        f(asked)
    }

    /// Makes the kernel's table large enough again, which is the host's. Returns whether it was not.
    ///
    /// # Errors
    /// When the setting can't be written.
    pub(super) fn enlarge_table(&self) -> Result<bool> {
        match &*self.asked() {
            Some((_, entries)) => entries.again(),
            None => Ok(false),
        }
    }

    /// The address of a CPU's `softnet_data`.
    fn softnet(&self, cpu: u32) -> Result<u64> {
        let known = || self.polls.get_field(cpu, offset_of!(poll_cpu, softnet));
        if known() == 0 {
            self.anchors.touch(cpu)?;
        }
        let softnet = known();
        ensure!(
            softnet != 0,
            "the softnet backlog of CPU {cpu} does not show itself"
        );
        Ok(softnet)
    }

    /// Learns the CPU's softnet backlog, where its packets are INLINE without NAPI.
    ///
    /// # Errors
    /// When the CPU is offline.
    pub(super) fn learn(&self, cpu: u32) -> Result<()> {
        let softnet = self.softnet(cpu)?;
        let index = cpu * (self.nr_cpus + 1) + self.nr_cpus;
        let offset = offset_of!(softnet_way, softnet);
        self.ways.set_field(index, offset, softnet);
        Ok(())
    }

    /// Whether there is a way from the CPU of this queue to another.
    pub(super) fn exists(&self, queue: u32, cpu: u32) -> bool {
        self.way(queue, cpu) != 0
    }

    /// Of the backlog: hash and key of its way; 0: none.
    fn way(&self, queue: u32, cpu: u32) -> u64 {
        let offset = offset_of!(backlog, way);
        self.counts.get_field(self.index(queue, cpu), offset)
    }

    /// The queues of the CPUs that may receive: where there are few, of all that are online.
    ///
    /// # Errors
    /// When /sys can't be read.
    pub(super) fn receiving(&self) -> Result<Vec<u32>> {
        let offset = offset_of!(rx_queue, nr_received);
        let received = |cpu: u32| -> u64 { self.queues.get_field(self.queue_base + cpu, offset) };
        let online = Topology::host().online()?;
        let few = online.len() <= FEW_CPUS;
        let may_receive = online.iter().filter(|cpu| few || received(*cpu) > 0);
        Ok(may_receive.map(|cpu| self.queue_base + cpu).collect())
    }

    /// Makes the way from the CPU of this queue to another.
    ///
    /// # Errors
    /// When the CPU is offline.
    pub(super) fn make(&self, queue: u32, cpu: u32) -> Result<()> {
        let index = self.index(queue, cpu);
        let key = self.take()?;
        self.anchors.add(key.hash, cpu)?;
        let way = (queue - self.queue_base) * (self.nr_cpus + 1) + cpu;
        let softnet = self.softnet(cpu)?;
        self.ways
            .set_field(way, offset_of!(softnet_way, softnet), softnet);
        let hash = hop_hash {
            hash: key.hash,
            index,
            cpu,
            pad: 0,
        };
        self.hashes
            .set(key.hash & (nr_hashes(self.nr_cpus) - 1), &hash);
        // Opens it.
        let opened = u64::from(key.hash) << 32 | u64::from(key.address);
        self.counts
            .set_field(index, offset_of!(backlog, way), opened);
        Ok(())
    }

    /// Writes the kernel's entry of a way again. Packets that were misdirected pass first: nothing is sent that
    /// way meanwhile.
    ///
    /// # Errors
    /// When the CPU is offline.
    pub(super) fn renew(&self, queue: u32, cpu: u32) -> Result<()> {
        let index = self.index(queue, cpu);
        self.set_misdirected(index, true);
        grace_period(&self.cpumaps, self.cpumap.as_fd())?;
        self.enlarge_table()?;
        self.anchors.renew((self.way(queue, cpu) >> 32) as u32)?;
        self.set_misdirected(index, false);
        Ok(())
    }

    fn set_misdirected(&self, index: u32, now: bool) {
        let bit = backlog_closed::BACKLOG_MISDIRECTED.0.into();
        let closed = offset_of!(backlog, closed);
        self.counts.set_bit(index, closed, bit, now);
    }

    /// Closes the way: only when all that was sent there has been passed up, and nothing more can be.
    pub(super) fn remove(&self, queue: u32, cpu: u32) {
        let index = self.index(queue, cpu);
        let way = self.way(queue, cpu);
        if way == 0 {
            return;
        }
        self.counts.set_field(index, offset_of!(backlog, way), 0u64);
        let hash = (way >> 32) as u32;
        self.anchors.remove(hash);
        let slot = hash & (nr_hashes(self.nr_cpus) - 1);
        self.hashes.set(slot, &hop_hash::default());
        // Of a CPU that went offline, whose entry could not be written.
        self.set_misdirected(index, false);
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.give_back(hash);
    }
}

impl Drop for Hops {
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            error!("{e:#}");
        }
    }
}

impl Hops {
    /// Loads what all devices have in common. `cpumap`: that of queue 0.
    ///
    /// # Errors
    /// When the kernel refuses a program.
    pub(super) fn new(
        trace: &TraceSkel<'_>,
        tables: &Tables,
        config: &Config,
        nr_cpus: u32,
        queue_base: u32,
        cpumap: &MapHandle,
    ) -> Result<Self> {
        let mut hops = open(HopsSkelBuilder::default())?;
        let of_hops = rx_config {
            queue_base,
            ..constants(config, nr_cpus, tables.sizes())
        };
        set_constants(hops.open_object_mut(), &of_hops)?;
        lend_maps(hops.open_object_mut(), trace.object(), tables)?;
        let common = hops
            .load()
            .context("the kernel refused the programs of softirq mode")?;
        let hash_of = common.progs.rxsteer_hash_of.as_fd().try_clone_to_owned()?;
        let hash_of: HashOf = Box::new(move |packet| call::on_packet(hash_of.as_fd(), packet));
        let mut keys = Keys::new(nr_hashes(nr_cpus), draw()? as u32, hash_of);
        let (stay, drop) = (keys.take()?, keys.take()?);
        let anchor = common.progs.rxsteer_anchor.as_fd().try_clone_to_owned()?;
        let current = Mapped::<u64>::of(&common.maps.bss)?;
        let anchors = Anchors::new(anchor, move |hash| {
            current.set(0, &u64::from(hash));
        })?;
        let base = rx_config {
            queue_base,
            nr_rx_queues: nr_cpus,
            inline_key: stay.address,
            inline_hash: stay.hash,
            drop_key: drop.address,
            drop_hash: drop.hash,
            netns: netns::cookie()?,
            ..Default::default()
        };
        let ways = Ways {
            queue_base,
            nr_cpus,
            anchors,
            keys: Mutex::new(keys),
            counts: Mapped::of(&trace.maps.backlogs)?,
            queues: Mapped::of(&trace.maps.rx_queues)?,
            ways: Mapped::of(&trace.maps.softnet_ways)?,
            hashes: Mapped::of(&trace.maps.hop_hashes)?,
            polls: Mapped::of(&trace.maps.poll_cpus)?,
            asked: Mutex::new(None),
            cpumaps: MapHandle::try_from(&trace.maps.cpumaps)?,
            cpumap: cpumap.as_fd().try_clone_to_owned()?,
        };
        let drops = common.progs.on_kfree_skb.attach_trace();
        let downs = common.progs.on_cpuhp_enter.attach_trace();
        let program = load(trace, tables, config, nr_cpus, &base)?;
        Ok(Self {
            link: None,
            forgotten: Mapped::of(&program.maps.bss)?,
            program,
            ways: Arc::new(ways),
            base,
            _drops: drops.context("attaching on_kfree_skb")?,
            _downs: downs.context("attaching on_cpuhp_enter")?,
            ends: None,
            common,
        })
    }

    /// The program that decides.
    pub(super) fn program(&self) -> BorrowedFd<'_> {
        self.program.progs.rxsteer_dissect.as_fd()
    }

    /// The program that says whether a way is empty.
    pub(super) fn settled(&self) -> BorrowedFd<'_> {
        self.program.progs.hop_settled.as_fd()
    }

    /// Attaches what all devices share, once: the dissector of the calling thread's network namespace, and
    /// the kernel's table. The tracepoints are attached.
    fn begin(&mut self) -> Result<()> {
        if self.link.is_some() {
            return Ok(());
        }
        self.learn_cpus()?;
        let slots = nr_hashes(self.ways.nr_cpus);
        let entries = FlowEntries::hold(slots.max(ENTRIES_MIN))?;
        *self.ways.asked() = Some((Asked::new(slots)?, entries));
        self.link = Some(attach_dissector(self.program())?);
        Ok(())
    }

    /// Learns the softnet backlogs of CPUs that are online, and were not before.
    ///
    /// # Errors
    /// When /sys can't be read.
    pub(super) fn learn_cpus(&self) -> Result<()> {
        for cpu in Topology::host().online()?.iter() {
            // Its packets stay where they are received.
            if let Err(e) = self.ways.learn(cpu) {
                warn!(cpu, "{e:#}");
            }
        }
        Ok(())
    }

    /// Forgets a device: the kernel's questions about its packets get the kernel's answers.
    pub(super) fn forget(&self, trace: &TraceSkel<'_>, ifindex: u32) {
        // It may not be attached.
        let _ = trace.maps.softirq_devices.delete(&ifindex.to_ne_bytes());
        self.forgotten.set(0, &(self.forgotten.get(0) + 1));
    }

    /// Steers a device of the calling thread's network namespace.
    ///
    /// # Errors
    /// When the kernel refuses a program, or a setting can't be changed.
    pub(super) fn attach(
        &mut self,
        trace: &TraceSkel<'_>,
        ifindex: u32,
        kind: SoftirqKind,
    ) -> Result<Hooks> {
        self.begin()?;
        if kind.unpolled && self.ends.is_none() {
            let ends = self.common.progs.on_receive_exit.attach_trace();
            self.ends = Some(ends.context("attaching on_receive_exit")?);
        }
        let arrives = self.program.progs.rxsteer_arrive.as_fd();
        let arrives = tc::attach(arrives, ifindex, Hook::Ingress)?;
        let sent = self.program.progs.rxsteer_sent.as_fd();
        let sent = match kind.loopback {
            true => Some(tc::attach(sent, ifindex, Hook::Egress)?),
            false if kind.veth => at_other_end(sent, ifindex)?,
            false => None,
        };
        let kind = match kind {
            SoftirqKind { loopback: true, .. } => softirq_device::SOFTIRQ_LOOPBACK,
            SoftirqKind { unpolled: true, .. } => softirq_device::SOFTIRQ_UNPOLLED,
            _ => softirq_device::SOFTIRQ_POLLED,
        };
        let devices = &trace.maps.softirq_devices;
        devices.update(&ifindex.to_ne_bytes(), &kind.0.to_ne_bytes(), MapFlags::ANY)?;
        self.ways.with_asked(|asked| {
            asked.without_hash(ifindex)?;
            asked.ask(ifindex)
        })?;
        Ok(Hooks {
            _sent: sent,
            _arrives: arrives,
        })
    }

    /// Has the kernel ask about a device's packets again, if that has changed; whether it has.
    ///
    /// # Errors
    /// When the device is gone, or the setting can't be written.
    pub(super) fn ask_again(&self, ifindex: u32) -> Result<bool> {
        Ok(self.ways.with_asked(|asked| asked.ask(ifindex))? > 0)
    }

    /// Ends the kernel's questions, and puts the settings back. The devices' programs are detached later:
    /// packets that were asked about have a hash that only these know.
    ///
    /// # Errors
    /// When a setting is not as before; the log says which.
    pub(super) fn end(&mut self) -> Result<()> {
        let asked = self.ways.asked().take();
        let outcome = asked.map_or(Ok(()), |(mut asked, _)| asked.put_back());
        self.link = None;
        outcome
    }

    /// Loads the program again, for other tables.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub(super) fn reload(
        &self,
        trace: &TraceSkel<'_>,
        tables: &Tables,
        config: &Config,
    ) -> Result<DissectorSkel<'static>> {
        load(trace, tables, config, self.ways.nr_cpus, &self.base)
    }

    /// Uses this program from now on; returns the one before.
    pub(super) fn replace(
        &mut self,
        program: DissectorSkel<'static>,
    ) -> Result<DissectorSkel<'static>> {
        let before = std::mem::replace(&mut self.program, program);
        if let Some(link) = &self.link {
            update_dissector(link, self.program())?;
        }
        Ok(before)
    }
}

fn load(
    trace: &TraceSkel<'_>,
    tables: &Tables,
    config: &Config,
    nr_cpus: u32,
    base: &rx_config,
) -> Result<DissectorSkel<'static>> {
    let common = constants(config, nr_cpus, tables.sizes());
    let constants = rx_config {
        queue_base: base.queue_base,
        nr_rx_queues: base.nr_rx_queues,
        inline_key: base.inline_key,
        inline_hash: base.inline_hash,
        drop_key: base.drop_key,
        drop_hash: base.drop_hash,
        netns: base.netns,
        ..common
    };
    let mut open = open(DissectorSkelBuilder::default())?;
    set_constants(open.open_object_mut(), &constants)?;
    lend_maps(open.open_object_mut(), trace.object(), tables)?;
    open.load()
        .context("the kernel refused the programs of softirq mode")
}

/// Attaches the program where a veth's packets are sent, if a path leads there.
///
/// # Errors
/// When the kernel refuses it.
fn at_other_end(program: BorrowedFd<'_>, ifindex: u32) -> Result<Option<TcLink>> {
    let attached = peer::at(ifindex, |peer| tc::attach_link(program, peer, Hook::Egress));
    match attached {
        // It has ended meanwhile.
        Err(e) if is_gone(&e) => Ok(None),
        attached => Ok(attached?.and_then(|(link, _)| link)),
    }
}

fn attach_dissector(program: BorrowedFd<'_>) -> Result<OwnedFd> {
    let netns = fs::File::open("/proc/thread-self/ns/net")?;
    // SAFETY: there are no options; the kernel checks the rest.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(
            program.as_raw_fd(),
            netns.as_raw_fd(),
            libbpf_sys::BPF_FLOW_DISSECTOR,
            std::ptr::null(),
        )
    };
    if fd == -libc::EEXIST || fd == -libc::EBUSY {
        anyhow::bail!(
            "another program dissects flows in this network namespace, or, if this is the initial one, in any: \
             `bpftool net` shows it. Detach it, or use --mode native"
        );
    }
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd)).context("the kernel refused the dissector");
    }
    // SAFETY: the kernel has just opened this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn update_dissector(link: &OwnedFd, program: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: there are no options; the kernel checks the rest.
    let error = unsafe {
        libbpf_sys::bpf_link_update(link.as_raw_fd(), program.as_raw_fd(), std::ptr::null())
    };
    match error {
        0 => Ok(()),
        e => Err(io::Error::from_raw_os_error(-e)).context("the kernel refused the dissector"),
    }
}
