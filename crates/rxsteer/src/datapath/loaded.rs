// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loaded data path: maps, tracepoints, one XDP program per device, and the programs of softirq mode.
//!
//! The order is fixed: load, fill the maps, attach the tracepoints (they count frames that the XDP
//! programs redirect), attach the XDP programs. All of these are held by file descriptors alone, so
//! that the kernel removes them with the process, however the process ends; unless they are pinned
//! (`pin.rs`).

use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, ProgramMut};
use nix::time::{ClockId, clock_gettime};

use super::backlogs::{self, Backlogs};
use super::call;
use super::config::{Config, DeviceConfig};
use super::cpus::{self, Cpus};
use super::hasher::Hasher;
use super::hop_keys::nr_hashes;
use super::hops::Hops;
use super::load::WHOLE;
use super::mapped::Mapped;
use super::objects::{Device, load_device};
use super::pins::{COUNTING, Generation, MAPS, TABLES};
use super::policy::Policy;
use super::requests::Requests;
use super::rps_map::RpsMap;
use super::shared::{constants, lend_maps, set_constants};
use super::sockets::Sockets;
use super::tables::Tables;
use super::trial::Trial;
use super::waits::Waits;
use crate::bpf::open;
use crate::bpf::socket_skel::SocketSkelBuilder;
use crate::bpf::trace_skel::{TraceSkel, TraceSkelBuilder};
use crate::host::caps;
use crate::host::cpumask::CpuMask;
use crate::host::device::RxMode;
use crate::host::kthread;
use crate::host::softnet;
use crate::host::topology::Topology;
use crate::types::{
    self, backlog, backlog_wait, cpu, poll_cpu, rx_config, rx_load, rx_mixings, rx_policy,
    rx_pressure, rx_queue, rx_trial,
};

/// The first epoch; 0 is the epoch of unset slots.
pub(super) const FIRST_EPOCH: u16 = 1;

/// See the module's documentation.
pub struct Datapath {
    // Fields are dropped in this order: XDP programs first, so that no frame is redirected without
    // being counted by the tracepoints.
    pub(super) devices: Vec<Device>,
    pub(super) hasher: Option<Hasher>,
    /// If devices may be steered in softirq mode.
    pub(super) hops: Option<Hops>,
    pub(super) sockets: Option<Sockets>,
    pub(super) scheduler: Option<Cpus>,
    /// Those that count, by name.
    pub(super) tracepoints: Vec<(String, Link)>,
    pub(super) backlogs: Arc<Backlogs>,
    pub(super) trace: TraceSkel<'static>,
    pub(super) rx_queues: Mapped<rx_queue>,
    foreign_frames: Mapped<u64>,
    pub(super) mixings: Mapped<rx_mixings>,
    trials: Mapped<rx_trial>,
    poll_cpus: Mapped<poll_cpu>,
    rps_maps: Mapped<types::rps_map>,
    pub(super) backlog_counts: Mapped<backlog>,
    backlog_waits: Mapped<backlog_wait>,
    pub(super) tables: Tables,
    pub(super) config: Config,
    pub(super) epoch: u16,
    pub(super) nr_cpus: u32,
    /// Where all of this is pinned, if it is.
    pub(super) pins: Option<Generation>,
}

impl Datapath {
    /// Loads the programs, fills the maps with every location INLINE, and attaches the tracepoints.
    /// Attaches no program to a device. The queues of softirq mode, a queue for each CPU id, come after
    /// those of all devices.
    ///
    /// # Errors
    /// When the kernel refuses a map or a program: the verifier's messages are in the log.
    pub fn load(config: &Config, devices: &[DeviceConfig]) -> Result<Self> {
        Self::build(config, devices, None)
    }

    /// As [`Self::load`]; with the maps and the tracepoints of `pinned`, if given.
    pub(super) fn build(
        config: &Config,
        devices: &[DeviceConfig],
        pinned: Option<&Generation>,
    ) -> Result<Self> {
        let nr_cpus = Topology::host().nr_cpu_ids()?;
        let of_devices = devices.iter().filter(|d| d.mode != RxMode::Softirq);
        let of_devices: u32 = of_devices.map(|d| d.nr_rx_queues).sum();
        let softirq = config.more_devices || devices.iter().any(|d| d.mode == RxMode::Softirq);
        // Without devices, as while all of them are gone, there is a queue without packets.
        let nr_queues = (of_devices + u32::from(softirq) * nr_cpus).max(1);
        let nr_tables = nr_queues - u32::from(softirq) * (nr_cpus - 1);
        let tables = match pinned {
            None => Tables::new(config, nr_tables)?,
            Some(pinned) => Tables::pinned(config, nr_tables, |name| pinned.map(TABLES, name))?,
        };

        let mut open_trace = open(TraceSkelBuilder::default())?;
        {
            let maps = &mut open_trace.maps;
            maps.rx_queues.set_max_entries(nr_queues)?;
            maps.rps_maps.set_max_entries(nr_queues)?;
            maps.foreign_frames.set_max_entries(nr_queues)?;
            maps.backlogs.set_max_entries(nr_queues * nr_cpus)?;
            maps.backlog_waits.set_max_entries(nr_queues * nr_cpus)?;
            maps.backlog_kthreads.set_max_entries(nr_queues * nr_cpus)?;
            maps.cpumaps.set_max_entries(nr_queues)?;
            maps.cpumap_queues.set_max_entries(nr_queues)?;
            if softirq {
                maps.softnet_ways.set_max_entries(nr_cpus * (nr_cpus + 1))?;
                maps.hop_hashes.set_max_entries(nr_hashes(nr_cpus))?;
            }
            maps.poll_cpus.set_max_entries(nr_cpus)?;
            maps.cpus.set_max_entries(nr_cpus)?;
        }
        let base = constants(config, nr_cpus, tables.sizes());
        let constants = rx_config {
            napi_state_in_busy_poll: caps::napi_state_in_busy_poll().unwrap_or(0),
            ..base
        };
        set_constants(open_trace.open_object_mut(), &constants)?;
        for mut map in open_trace.open_object_mut().maps_mut() {
            let name = map.name().to_string_lossy().into_owned();
            let table = tables.named(&name).is_some();
            map.set_autocreate(!table)?;
            if let Some(pinned) = pinned.filter(|_| !table && is_shared(&name)) {
                map.reuse_fd(pinned.map(MAPS, &name)?.as_fd())?;
            }
        }
        cpus::choose(&mut open_trace.progs)?;
        if pinned.is_some() {
            // One program counts each frame: the pinned one.
            for mut prog in open_trace.open_object_mut().progs_mut() {
                if COUNTING.iter().any(|name| prog.name() == *name) {
                    prog.set_autoload(false);
                }
            }
        }
        let trace = open_trace
            .load()
            .context("the kernel refused the tracepoint programs")?;

        let rx_queues = Mapped::of(&trace.maps.rx_queues)?;
        let rps_maps = Mapped::of(&trace.maps.rps_maps)?;
        let cpumaps = match pinned {
            Some(pinned) => pinned.cpumaps()?,
            None => new_cpumaps(&trace, nr_queues, nr_cpus)?,
        };

        let hasher = match config.follow_nat {
            true => Some(Hasher::load(&trace, &tables, &base)?),
            false => None,
        };
        let hops = match softirq {
            true => Some(Hops::new(
                &trace,
                &tables,
                config,
                nr_cpus,
                of_devices,
                &cpumaps[0],
            )?),
            false => None,
        };
        let set_queue = |queue, ifindex| {
            let value = rx_queue {
                ifindex,
                epoch: FIRST_EPOCH,
                ..Default::default()
            };
            if pinned.is_none() {
                rps_maps.set(queue, RpsMap::inline().raw());
                rx_queues.set(queue, &value);
            }
        };
        (of_devices..nr_queues).for_each(|queue| set_queue(queue, 0));
        let mut queue = 0u32;
        let mut loaded = Vec::new();
        for device in devices {
            let mut queue_base = queue;
            match &hops {
                Some(hops) if device.mode == RxMode::Softirq => queue_base = hops.ways.queue_base,
                _ => queue += device.nr_rx_queues,
            }
            (queue_base..queue).for_each(|queue| set_queue(queue, device.ifindex));
            loaded.push(Device {
                config: device.clone(),
                queue_base,
                attached: None,
                hashed: None,
                loaded: load_device(&trace, &tables, config, nr_cpus, queue_base, device)?,
            });
        }

        let tracepoints = trace
            .object()
            .progs_mut()
            .map(|prog| (prog.name().to_string_lossy().into_owned(), prog))
            .filter(|(name, _)| COUNTING.contains(&&**name))
            .map(|(name, prog)| {
                let link = match pinned {
                    None => prog.attach_trace().map_err(Into::into),
                    Some(pinned) => pinned.tracepoint(&name),
                };
                Ok((
                    name.clone(),
                    link.with_context(|| format!("attaching {name}"))?,
                ))
            })
            .collect::<Result<_>>()?;

        let epoch = match pinned {
            None => FIRST_EPOCH,
            Some(_) => rx_queues.get(0).epoch,
        };
        let ways = hops.as_ref().map(|hops| Arc::clone(&hops.ways));
        Ok(Self {
            devices: loaded,
            hasher,
            hops,
            sockets: None,
            scheduler: None,
            tracepoints,
            backlogs: Arc::new(match pinned {
                None => Backlogs::new(cpumaps, config, ways),
                Some(_) => Backlogs::adopt(cpumaps, nr_cpus, config)?,
            }),
            backlog_counts: Mapped::of(&trace.maps.backlogs)?,
            backlog_waits: Mapped::of(&trace.maps.backlog_waits)?,
            foreign_frames: Mapped::of(&trace.maps.foreign_frames)?,
            mixings: Mapped::of(&trace.maps.mixings)?,
            trials: Mapped::of(&trace.maps.trials)?,
            poll_cpus: Mapped::of(&trace.maps.poll_cpus)?,
            rx_queues,
            rps_maps,
            trace,
            tables,
            config: config.clone(),
            epoch,
            nr_cpus,
            pins: None,
        })
    }

    /// Sets the policy of all queues. Returns the applications that can't be followed on this host,
    /// in words, if sockets begin to be watched.
    ///
    /// # Errors
    /// When a table needed for the policy has no entries, or the kernel refuses the programs that
    /// watch sockets or the scheduler.
    pub fn steer_by(&mut self, policy: Policy) -> Result<Option<Vec<String>>> {
        let mut unseen = None;
        let watched = |sockets: &Sockets| sockets.epoch == self.epoch;
        if policy.follows() && !self.sockets.as_ref().is_some_and(watched) {
            let (sockets, missed) = self.watch_sockets()?;
            self.sockets = Some(sockets);
            unseen = Some(missed);
        }
        let looks = policy.idle || policy.adapt || self.config.flow_limit > 0;
        let named = self.named_cpus();
        let known = |cpus: &Cpus| cpus.have(&named);
        if looks && !self.scheduler.as_ref().map_or(Ok(false), known)? {
            self.scheduler = Some(Cpus::learn(&self.trace, &named)?);
        }
        for queue in 0..self.nr_queues() {
            self.set_queue(queue, policy);
        }
        // Programs that can't be detached at once continue to write their table until others
        // replace them or rxsteer ends.
        let leaves = |sockets: &Sockets| policy.follows() || sockets.at_functions;
        self.sockets = self.sockets.take().filter(leaves);
        if !looks {
            self.scheduler = None;
        }
        self.pin_watchers()?;
        Ok(unseen)
    }

    /// CPUs have come online or gone offline: learns the facts about CPUs again, if the policy
    /// needs them.
    ///
    /// # Errors
    /// When the kernel refuses the programs that watch the scheduler.
    pub fn cpus_changed(&mut self) -> Result<()> {
        if self.scheduler.is_some() {
            self.scheduler = Some(Cpus::learn(&self.trace, &self.named_cpus())?);
        }
        if let Some(hops) = &self.hops {
            hops.learn_cpus()?;
        }
        self.pin_watchers()
    }

    /// Reads the host's settings on which the programs depend, and looks which network namespaces
    /// packets reach. Others may change both at any time, and no event shows it: call this now and then.
    ///
    /// # Errors
    /// When a setting can't be read.
    pub fn look_at_host(&mut self) -> Result<()> {
        let steered: Vec<u32> = self.devices.iter().map(|d| d.config.ifindex).collect();
        let Some(sockets) = &mut self.sockets else {
            return Ok(());
        };
        sockets.look_at_host()?;
        sockets.look_at_netnses(&steered)
    }

    fn watch_sockets(&self) -> Result<(Sockets, Vec<String>)> {
        if !self.config.can_follow() {
            bail!(
                "flows can't follow applications without tables: rps_sock_flow_entries and \
                 rps_flow_cnt must not be 0"
            );
        }
        let constants = constants(&self.config, self.nr_cpus, self.tables.sizes());
        let mut open = open(SocketSkelBuilder::default())?;
        set_constants(open.open_object_mut(), &constants)?;
        lend_maps(open.open_object_mut(), self.trace.object(), &self.tables)?;
        Sockets::attach(open, self.config.unconnected, self.epoch)
    }

    /// Sets a queue's policy and epoch.
    pub(super) fn set_queue(&self, queue: u32, policy: Policy) {
        let queues = &self.rx_queues;
        queues.set_field(queue, offset_of!(rx_queue, policy), policy.bits());
        queues.set_field(queue, offset_of!(rx_queue, epoch), self.epoch);
    }

    /// Whether the queue's flows follow their applications.
    pub fn follows(&self, queue: u32) -> bool {
        u32::from(self.rx_queue(queue).policy) & rx_policy::RX_FOLLOW.0 != 0
    }

    /// The tables of flows, and their keys.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// The parameters with which the data path was loaded.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The kernel's time in the unit of `rps_dev_flow.last_seen`: ticks, the low 32 bits.
    ///
    /// # Errors
    /// When the kernel can't run the program.
    pub fn jiffies(&self) -> Result<u32> {
        self.call(&self.trace.progs.jiffies_now, 0u32)
    }

    /// Runs a program that user space may call; returns the program's result.
    pub(super) fn call<T: Copy>(&self, program: &ProgramMut<'_>, argument: T) -> Result<u32> {
        Ok(call::call(program.as_fd(), &mut { argument })?)
    }

    /// The cpumaps, for the threads that create their entries.
    pub fn backlogs(&self) -> Arc<Backlogs> {
        Arc::clone(&self.backlogs)
    }

    /// Sets the queue's `rps_map`. Flows move under the rule of order.
    pub fn set_rps_map(&self, queue: u32, map: &RpsMap) {
        self.rps_maps.set(queue, map.raw());
    }

    /// The queue's present `rps_map`.
    pub fn rps_map(&self, queue: u32) -> RpsMap {
        RpsMap::from_raw(self.rps_maps.get(queue))
    }

    /// The CPUs of all present `rps_map`s.
    fn named_cpus(&self) -> CpuMask {
        let maps = (0..self.nr_queues()).map(|queue| self.rps_map(queue));
        maps.flat_map(|map| map.slots_per_cpu().into_keys())
            .collect()
    }

    /// The queue's present counters.
    pub fn rx_queue(&self, queue: u32) -> rx_queue {
        self.rx_queues.get(queue)
    }

    /// The last answer to the question whether it helps that flows move.
    pub fn trial(&self) -> Option<Trial> {
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).ok()?;
        Trial::of(&self.trials.get(0), now.into())
    }

    /// Packets of steered devices that UDP sockets had no room for.
    pub fn socket_full(&self) -> u64 {
        let cpus = 0..self.nr_cpus;
        cpus.map(|cpu| self.poll_cpus.get(cpu).nr_refused).sum()
    }

    /// Frames that the program of the device with this first queue has passed because they came
    /// from a queue that was unknown when it was loaded, or from another device below.
    pub fn foreign_frames(&self, first_queue: u32) -> u64 {
        self.foreign_frames.get(first_queue)
    }

    /// The counters of the queue's backlog for `cpu`. All are zero if the backlog has never
    /// existed.
    pub fn backlog(&self, queue: u32, cpu: u32) -> backlog {
        self.backlog_counts.get(queue * self.nr_cpus + cpu)
    }

    /// How long frames have waited in the queue's backlog for `cpu`.
    pub fn waits(&self, queue: u32, cpu: u32) -> Waits {
        Waits::from(&self.backlog_waits.get(queue * self.nr_cpus + cpu))
    }

    /// The name of the kernel thread of the queue's backlog for `cpu`, if it exists.
    pub fn thread_of(&self, queue: u32, cpu: u32) -> Option<String> {
        self.backlogs.thread(queue, cpu).ok().flatten()
    }

    /// Whether that thread wants to run, as far as the kernel tells. In softirq mode: whether packets wait
    /// in the CPU's softnet backlog.
    pub fn starves(&self, queue: u32, cpu: u32) -> bool {
        if self.softirq_queue().is_some_and(|first| queue >= first) {
            let softnet = softnet::read().unwrap_or_default();
            return softnet.iter().any(|s| s.cpu == cpu && s.waiting > 0);
        }
        let sleeps = |name: String| kthread::sleeps(Path::new("/proc"), &name);
        self.thread_of(queue, cpu).and_then(sleeps) != Some(true)
    }

    /// Number of queues of all devices.
    pub fn nr_queues(&self) -> u32 {
        u32::try_from(self.backlogs.nr_queues()).expect("made from a u32")
    }

    /// Number of `dev_flow_table`s: one per queue, and one for all queues of softirq mode.
    pub fn nr_tables(&self) -> u32 {
        let shared = self.softirq_queue().map_or(0, |_| self.nr_cpus - 1);
        self.nr_queues() - shared
    }

    /// Number of possible CPU ids, from 0 to this - 1. Some may stand for no CPU.
    pub fn nr_cpus(&self) -> u32 {
        self.nr_cpus
    }

    /// The program of a device, for `BPF_PROG_TEST_RUN`.
    ///
    /// # Errors
    /// When the data path was not prepared for such a device.
    pub fn program(&self, device: usize) -> Result<BorrowedFd<'_>> {
        self.devices[device].program(self.hops.as_ref())
    }

    /// Declares that no packet from before the epoch is undelivered: flows of this queue may move
    /// at once. Only true if no packet can have been received, as for a program that is never
    /// attached.
    pub fn settle(&self, queue: u32) {
        let first_epoch = offset_of!(rx_queue, first_epoch);
        self.rx_queues.set_field(queue, first_epoch, self.epoch);
    }

    /// Makes the queue's polling CPU saturated, with flows that may leave it, and every CPU full:
    /// each has been given more than its time. Only for a program that is never attached: no poll
    /// ends the window.
    ///
    /// # Errors
    /// When the CPUs' facts can't be mapped.
    pub fn saturate(&self, queue: u32) -> Result<()> {
        let queues = &self.rx_queues;
        let load = offset_of!(rx_queue, load);
        let pressure = rx_pressure::RX_SATURATED.0 as u16;
        queues.set_field(queue, load + offset_of!(rx_load, pressure), pressure);
        queues.set_field(queue, load + offset_of!(rx_load, saturated), u32::MAX);
        let cpus = Mapped::<cpu>::of(&self.trace.maps.cpus)?;
        for number in 0..self.nr_cpus {
            cpus.set_field(number, offset_of!(cpu, given), WHOLE);
        }
        Ok(())
    }

    /// Begins the queue's next window, in which each flow decides again; as [`Self::saturate`].
    pub fn next_window(&self, queue: u32) {
        let window = offset_of!(rx_queue, load) + offset_of!(rx_load, window);
        let next = self.rx_queue(queue).load.window.wrapping_add(1);
        self.rx_queues.set_field(queue, window, next);
    }

    /// The stream of requests for backlogs.
    ///
    /// # Errors
    /// When the ring buffer can't be mapped.
    pub fn requests(&self) -> Result<Requests> {
        Requests::of(&self.trace.maps.backlog_requests)
    }
}

/// Whether a map with this name is shared by all objects: an object's constants and variables, which
/// have a dot in their names, are not.
pub(super) fn is_shared(map: &str) -> bool {
    !map.contains('.')
}

/// Creates the cpumap of each queue.
fn new_cpumaps(trace: &TraceSkel<'_>, nr_queues: u32, nr_cpus: u32) -> Result<Vec<MapHandle>> {
    let cpumap = |queue: u32| {
        let cpumap = backlogs::create_cpumap(nr_cpus)?;
        let id = cpumap.info()?.info.id;
        let key = queue.to_ne_bytes();
        let fd = cpumap.as_fd().as_raw_fd().to_ne_bytes();
        let maps = &trace.maps;
        maps.cpumaps.update(&key, &fd, MapFlags::ANY)?;
        maps.cpumap_queues
            .update(&id.to_ne_bytes(), &key, MapFlags::ANY)?;
        Ok(cpumap)
    };
    (0..nr_queues).map(cpumap).collect()
}
