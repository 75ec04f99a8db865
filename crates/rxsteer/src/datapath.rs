// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loaded data path: maps, tracepoints, and one XDP program per device.
//!
//! The order of things is fixed: load, fill the maps, attach the tracepoints (they count what the
//! XDP programs redirect), attach the XDP programs. Everything is held by file descriptors alone,
//! so that the kernel takes it down with the process, however it ends.

use std::cell::RefCell;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use libbpf_rs::{
    Link, MapCore, MapFlags, ProgramInput, ProgramMut, ProgramType, RingBuffer, RingBufferBuilder,
};

use crate::backlogs::{self, Backlogs};
use crate::caps;
use crate::cpus::{self, Cpus};
use crate::device::XdpMode;
use crate::load;
use crate::native;
use crate::policy::Policy;
use crate::rps_map::RpsMap;
use crate::rx::types::{
    backlog, backlog_closing, backlog_request, flow_secret, rodata, rps_map, rx_policy, rx_queue,
    rx_queue_setting,
};
use crate::rx::{OpenRxSkel, RxSkel, RxSkelBuilder};
use crate::sockets::Sockets;
use crate::tables::{self, Tables};
use crate::xdp;

/// Nice value of the backlogs' threads unless configured. A thread that shares its CPU with the
/// application must not take half of it for packets that the application then has no time to read
/// (docs/backlog.md has the measurement); nor must it starve beside a CPU-bound one.
pub const BACKLOG_NICE: i32 = 5;

/// The epoch of slots that have one; 0 is that of unset ones.
const FIRST_EPOCH: u16 = 1;

/// A flow with more than this part of its queue's frames, in percent, is large, unless configured:
/// no more than eight flows can be.
pub const FLOW_LIMIT: u32 = 12;

/// `rps_sock_flow_entries` unless configured: what the kernel's documentation suggests for a busy
/// host.
pub const RPS_SOCK_FLOW_ENTRIES: u32 = 32768;

/// `rps_flow_cnt` unless configured, in slots per queue: a queue's share of the above.
pub const RPS_FLOW_CNT: u32 = 4096;

/// What the data path is made for. Fixed from load to the end.
#[derive(Clone, Debug)]
pub struct Config {
    /// Frames a backlog may hold. More than [`crate::backlogs::LIMIT_MAX`] only where nothing is ever
    /// redirected in truth: no ring would hold it.
    pub backlog_limit: u32,
    /// Nice value of the backlogs' threads, -20 to 19.
    pub backlog_nice: i32,
    /// Entries of the `sock_flow_table`, rounded up to a power of two as the kernel does; 0: no
    /// flow follows its application.
    pub rps_sock_flow_entries: u32,
    /// Slots of each queue's `dev_flow_table`; likewise, but the rule of order needs a table, so
    /// that 0 stands for [`RPS_FLOW_CNT`] slots and flows that follow nobody.
    pub rps_flow_cnt: u32,
    /// Follow applications on unconnected UDP sockets too.
    pub unconnected: bool,
    /// Decide and count, move nothing.
    pub dry_run: bool,
    /// Bits of `enum flow_tunnel`: whose inner flow is the key.
    pub tunnels: u32,
    /// Steer by the hash that the device computed, where it has one.
    pub rx_hash: bool,
    /// Flows with a larger part of their queue's frames, in percent, are shed first; 0: none are.
    pub flow_limit: u32,
    /// The rule of order switched off: for tests and measurements that need a control.
    pub unguarded: bool,
    /// The key of the flow hash.
    pub secret: flow_secret,
}

/// A device to steer: what the tables need to know of it.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// In the network namespace of the thread that calls [`Datapath::attach`].
    pub ifindex: u32,
    /// Receive queues, `rx_queue_index` 0 to `nr_rx_queues` - 1.
    pub nr_rx_queues: u32,
    /// Where [`Datapath::attach`] is going to attach.
    pub mode: XdpMode,
}

/// A backlog that a flow wants and that does not exist yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Over all devices.
    pub queue: u32,
    /// The CPU that the flow wants.
    pub cpu: u32,
}

impl Config {
    /// Whether there are tables to follow applications with.
    pub fn can_follow(&self) -> bool {
        self.rps_sock_flow_entries > 0 && self.rps_flow_cnt > 0
    }
}

struct Device {
    config: DeviceConfig,
    queue_base: u32,
    rx_hash: bool,
    /// Dropping it detaches the program.
    link: Option<OwnedFd>,
    loaded: DeviceSkel,
}

/// A device's program. Fields are dropped in this order.
struct DeviceSkel {
    skel: RxSkel<'static>,
    _bound: Option<xdp::Bound>,
}

impl Device {
    fn program(&self) -> BorrowedFd<'_> {
        match self.rx_hash {
            true => self.loaded.skel.progs.rxsteer_rx_hash.as_fd(),
            false => self.loaded.skel.progs.rxsteer.as_fd(),
        }
    }
}

impl Device {
    /// Attaches its program in the place of the one that is attached, if there is one and the device
    /// is still there.
    fn update(&self) -> Result<()> {
        let Some(link) = &self.link else {
            return Ok(());
        };
        match xdp::update(link, self.program()) {
            Err(e) if e.raw_os_error() == Some(libc::ENOLINK) => Ok(()),
            other => Ok(other?),
        }
    }
}

/// See the module's documentation.
pub struct Datapath {
    // Fields are dropped in this order: XDP programs first, so that nothing is redirected that
    // the tracepoints no longer count.
    devices: Vec<Device>,
    sockets: Option<Sockets>,
    scheduler: Option<Cpus>,
    _tracepoints: Vec<Link>,
    backlogs: Arc<Backlogs>,
    shared: RxSkel<'static>,
    tables: Tables,
    config: Config,
    epoch: u16,
    nr_cpus: u32,
}

fn open() -> Result<OpenRxSkel<'static>> {
    // The skeleton borrows the object's memory for as long as it lives; there is one per device
    // and process, so it is given away rather than tied into a self-referential struct.
    let object = Box::leak(Box::new(MaybeUninit::uninit()));
    Ok(RxSkelBuilder::default().open(object)?)
}

/// Draws the flow hash's secret from the kernel's random number generator.
///
/// # Errors
/// When the kernel has no entropy to give.
pub fn draw_secret() -> Result<flow_secret> {
    let mut secret = flow_secret::default();
    let words = std::iter::once(&mut secret.addend).chain(secret.multiplier.iter_mut());
    for word in words {
        let mut bytes = [0u8; 8];
        // SAFETY: writes at most 8 bytes into an 8 byte buffer.
        let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if n != 8 {
            bail!(
                "the kernel gives no random numbers: {}",
                std::io::Error::last_os_error()
            );
        }
        *word = u64::from_ne_bytes(bytes);
    }
    Ok(secret)
}

impl Datapath {
    /// Loads the programs and fills the maps; every queue's map says INLINE. Attaches nothing.
    ///
    /// # Errors
    /// When the kernel refuses a map or a program: the verifier's words are in the log.
    pub fn load(config: &Config, devices: &[DeviceConfig]) -> Result<Self> {
        let nr_queues: u32 = devices.iter().map(|d| d.nr_rx_queues).sum();
        let nr_cpus = u32::try_from(libbpf_rs::num_possible_cpus()?)?;
        let tables = Tables::new(config, nr_queues)?;

        let mut open_shared = open()?;
        {
            let maps = &mut open_shared.maps;
            maps.rx_queues.set_max_entries(nr_queues)?;
            maps.rps_maps.set_max_entries(nr_queues)?;
            maps.backlogs.set_max_entries(nr_queues * nr_cpus)?;
            maps.backlog_kthreads.set_max_entries(nr_queues * nr_cpus)?;
            maps.cpumaps.set_max_entries(nr_queues)?;
            maps.cpumap_queues.set_max_entries(nr_queues)?;
            maps.poll_cpus.set_max_entries(nr_cpus)?;
            maps.cpus.set_max_entries(nr_cpus)?;
        }
        set_constants(&mut open_shared, config, nr_cpus, &tables).napi_state_in_busy_poll =
            caps::napi_state_in_busy_poll().unwrap_or(0);
        for mut prog in open_shared.open_object_mut().progs_mut() {
            if Sockets::owns(&prog.name().to_string_lossy()) {
                prog.set_autoload(false);
            }
        }
        let gone = caps::missing_tracepoints(&["xdp_redirect_map_err"])?;
        open_shared
            .progs
            .on_redirect_map_err
            .set_autoload(gone.is_empty());
        cpus::choose(&mut open_shared.progs)?;
        let shared = open_shared
            .load()
            .context("the kernel refused the tracepoint programs")?;

        let mut cpumaps = Vec::new();
        for queue in 0..nr_queues {
            let cpumap = backlogs::create_cpumap(nr_cpus)?;
            let id = cpumap.info()?.info.id;
            let key = queue.to_ne_bytes();
            let fd = cpumap.as_fd().as_raw_fd().to_ne_bytes();
            shared.maps.cpumaps.update(&key, &fd, MapFlags::ANY)?;
            shared
                .maps
                .cpumap_queues
                .update(&id.to_ne_bytes(), &key, MapFlags::ANY)?;
            shared
                .maps
                .rps_maps
                .update(&key, &bytes_of(RpsMap::inline().raw()), MapFlags::ANY)?;
            cpumaps.push(cpumap);
        }

        let mut queue = 0u32;
        let mut loaded = Vec::new();
        for device in devices {
            let queue_base = queue;
            for _ in 0..device.nr_rx_queues {
                let value = rx_queue {
                    ifindex: device.ifindex,
                    epoch: FIRST_EPOCH,
                    ..Default::default()
                };
                shared.maps.rx_queues.update(
                    &queue.to_ne_bytes(),
                    &bytes_of(&value),
                    MapFlags::ANY,
                )?;
                queue += 1;
            }
            loaded.push(Device {
                config: device.clone(),
                queue_base,
                rx_hash: config.rx_hash,
                link: None,
                loaded: load_device(&shared, &tables, config, nr_cpus, queue_base, device)?,
            });
        }

        let tracepoints = shared
            .object()
            .progs_mut()
            .filter(|prog| prog.autoload() && prog.prog_type() == ProgramType::Tracing)
            .filter(|prog| !cpus::owns(&prog.name().to_string_lossy()))
            .map(|prog| {
                prog.attach_trace()
                    .with_context(|| format!("attaching {}", prog.name().display()))
            })
            .collect::<Result<_>>()?;

        Ok(Self {
            devices: loaded,
            sockets: None,
            scheduler: None,
            _tracepoints: tracepoints,
            backlogs: Arc::new(Backlogs::new(cpumaps, config)),
            shared,
            tables,
            config: config.clone(),
            epoch: FIRST_EPOCH,
            nr_cpus,
        })
    }

    /// Lets the flows of all queues want to be where the policy says. Returns what can't be followed
    /// on this host, in words, when applications begin to be watched.
    ///
    /// # Errors
    /// When there are no tables for it, or the kernel refuses the programs that watch sockets or the
    /// scheduler.
    pub fn steer_by(&mut self, policy: Policy) -> Result<Option<Vec<String>>> {
        let mut unseen = None;
        if policy.follows() && self.sockets.is_none() {
            let (sockets, missed) = self.watch_sockets()?;
            self.sockets = Some(sockets);
            unseen = Some(missed);
        }
        let looks = policy.idle || policy.adapt || self.config.flow_limit > 0;
        if looks && self.scheduler.is_none() {
            self.scheduler = Some(Cpus::learn(&self.shared)?);
        }
        for queue in 0..self.nr_queues() {
            self.set_queue(queue, policy)?;
        }
        if !policy.follows() {
            self.sockets = None;
        }
        if !looks {
            self.scheduler = None;
        }
        Ok(unseen)
    }

    /// CPUs have come online or gone: what is known of them, if a policy looks at them, is learnt
    /// anew.
    ///
    /// # Errors
    /// When the kernel refuses the programs that watch the scheduler.
    pub fn cpus_changed(&mut self) -> Result<()> {
        if self.scheduler.is_some() {
            self.scheduler = Some(Cpus::learn(&self.shared)?);
        }
        Ok(())
    }

    fn watch_sockets(&self) -> Result<(Sockets, Vec<String>)> {
        if !self.config.can_follow() {
            bail!(
                "flows can't follow applications without tables: rps_sock_flow_entries and \
                 rps_flow_cnt must not be 0"
            );
        }
        let mut open = open()?;
        set_constants(&mut open, &self.config, self.nr_cpus, &self.tables);
        self.tables.lend_to(&mut open)?;
        Sockets::attach(open, self.config.unconnected)
    }

    fn set_queue(&self, queue: u32, policy: Policy) -> Result<()> {
        let setting = rx_queue_setting {
            queue,
            policy: policy.bits(),
            epoch: self.epoch,
        };
        self.call(&self.shared.progs.rx_queue_set, setting)?;
        Ok(())
    }

    /// Whether the queue's flows follow their applications.
    ///
    /// # Errors
    /// When the map can't be read.
    pub fn follows(&self, queue: u32) -> Result<bool> {
        Ok(u32::from(self.rx_queue(queue)?.policy) & rx_policy::RX_FOLLOW.0 != 0)
    }

    /// The `sock_flow_table`'s entry for a hash, and the location in it: a CPU, `RPS_INLINE` for an
    /// application that polls, or `RPS_NO_CPU`.
    ///
    /// # Errors
    /// When the map can't be read.
    pub fn application(&self, hash: u32) -> Result<(u32, u16)> {
        let entry = self.tables.sock_flow(hash)?;
        let mask = tables::cpu_mask(self.nr_cpus);
        Ok((entry, native::sock_flow_location(entry, hash, mask)))
    }

    /// The tables of flows, and their keys.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// What it was loaded with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Puts tables of another size in the place of those that there are. Every flow comes home to
    /// INLINE first ([`Self::bring_home`]) and starts anew under a new epoch: as at attach, none
    /// moves before all that came earlier has been delivered. Afterwards every map says INLINE and
    /// no flow follows: it is the caller's to fill in both again, also after an error.
    /// (The maps may say INLINE_SHED, where backlogs were slow to drain.)
    ///
    /// # Errors
    /// When the flows did not come home, or the kernel refuses maps or programs of these sizes; the
    /// old tables are in use then.
    pub fn resize(
        &mut self,
        rps_sock_flow_entries: u32,
        rps_flow_cnt: u32,
        patience: Duration,
    ) -> Result<()> {
        let config = Config {
            rps_sock_flow_entries,
            rps_flow_cnt,
            ..self.config.clone()
        };
        let tables = Tables::new(&config, self.nr_queues())?;
        let load = |d: &Device| {
            load_device(
                &self.shared,
                &tables,
                &config,
                self.nr_cpus,
                d.queue_base,
                &d.config,
            )
        };
        let loaded = self.devices.iter().map(load).collect::<Result<Vec<_>>>()?;
        if !self.bring_home(patience)? {
            bail!("some backlogs did not drain: the tables stay as they are; try again");
        }
        let before = (
            std::mem::replace(&mut self.tables, tables),
            std::mem::replace(&mut self.config, config),
        );
        let swapped = self.swap(loaded);
        if swapped.is_err() {
            (self.tables, self.config) = before;
        }
        self.epoch = self.epoch.wrapping_add(1).max(FIRST_EPOCH);
        self.steer_by(Policy::OFF)?;
        // The epoch is another for every program before any flow may want to move again.
        self.grace_period()?;
        swapped
    }

    /// Puts these programs in the place of the attached ones: all of them, or none.
    fn swap(&mut self, loaded: Vec<DeviceSkel>) -> Result<()> {
        let mut old = Vec::new();
        let mut outcome = Ok(());
        for (device, loaded) in self.devices.iter_mut().zip(loaded) {
            old.push(std::mem::replace(&mut device.loaded, loaded));
            outcome = device.update();
            if outcome.is_err() {
                break;
            }
        }
        if outcome.is_err() {
            for (device, loaded) in self.devices.iter_mut().zip(old) {
                device.loaded = loaded;
                device.update()?;
            }
        }
        outcome
    }

    /// Whether anybody may want to be in the backlogs for a CPU: not while it is offline.
    ///
    /// # Errors
    /// When the map can't be written.
    pub fn close_cpu(&self, cpu: u32, closed: bool) -> Result<()> {
        for queue in 0..self.nr_queues() {
            let closing = backlog_closing {
                index: queue * self.nr_cpus + cpu,
                closed: closed.into(),
            };
            self.call(&self.shared.progs.backlog_close, closing)?;
        }
        Ok(())
    }

    /// Takes the entries of a CPU's backlogs out of the cpumaps, for new ones to be made when they
    /// are wanted again. Only once they are closed and [`Drain`]ed.
    ///
    /// # Errors
    /// When a map can't be written.
    pub fn remove_cpu(&self, cpu: u32) -> Result<()> {
        for queue in 0..self.nr_queues() {
            self.backlogs.remove(queue, cpu)?;
            self.call(
                &self.shared.progs.backlog_forget,
                queue * self.nr_cpus + cpu,
            )?;
        }
        Ok(())
    }

    /// Returns when every program that was running has ended, and with it, since polls run with
    /// softirqs off, the poll that it ran in.
    fn grace_period(&self) -> Result<()> {
        // An update of a map of maps waits for one (maybe_wait_bpf_programs() in
        // kernel/bpf/syscall.c): this one changes nothing.
        let queue = 0u32;
        let fd = self.backlogs.cpumap(queue).as_raw_fd().to_ne_bytes();
        Ok(self
            .shared
            .maps
            .cpumaps
            .update(&queue.to_ne_bytes(), &fd, MapFlags::ANY)?)
    }

    /// Whether all that has entered the backlog of `queue` for `cpu` is delivered, as far as that can
    /// be proven now (docs/order.md).
    ///
    /// # Errors
    /// When the kernel does not run the question.
    pub fn drained(&self, queue: u32, cpu: u32) -> Result<bool> {
        let index = queue * self.nr_cpus + cpu;
        Ok(self.call(&self.shared.progs.backlog_drained, index)? == 1)
    }

    /// The kernel's time, as flows are stamped with it: ticks, the low 32 bits.
    ///
    /// # Errors
    /// When the kernel does not run the question.
    pub fn jiffies(&self) -> Result<u32> {
        self.call(&self.shared.progs.jiffies_now, 0u32)
    }

    /// Runs a program that user space may call; returns what it returned.
    fn call<T: Copy>(&self, program: &ProgramMut<'_>, argument: T) -> Result<u32> {
        let mut context = bytes_of(&argument);
        let input = ProgramInput {
            context_in: Some(&mut context),
            ..Default::default()
        };
        Ok(program.test_run(input)?.return_value)
    }

    /// Attaches the XDP program to the device, by its place in what [`Self::load`] was given.
    ///
    /// # Errors
    /// The kernel's, untranslated: `EBUSY` when a program is attached already, `EOPNOTSUPP` when
    /// the driver has no native XDP.
    pub fn attach(&mut self, device: usize, mode: XdpMode) -> Result<()> {
        let device = &mut self.devices[device];
        if device.config.mode != mode {
            device.config.mode = mode;
            device.loaded = load_device(
                &self.shared,
                &self.tables,
                &self.config,
                self.nr_cpus,
                device.queue_base,
                &device.config,
            )?;
        }
        device.link = Some(xdp::attach(device.program(), device.config.ifindex, mode)?);
        Ok(())
    }

    /// Detaches every XDP program. What is in the backlogs is still delivered.
    pub fn detach(&mut self) {
        for device in &mut self.devices {
            device.link = None;
        }
    }

    /// The cpumaps, for whoever makes their entries.
    pub fn backlogs(&self) -> Arc<Backlogs> {
        Arc::clone(&self.backlogs)
    }

    /// Changes where the queue's flows want to be. They move under the rule of order.
    ///
    /// # Errors
    /// When the map can't be written.
    pub fn set_rps_map(&self, queue: u32, map: &RpsMap) -> Result<()> {
        Ok(self.shared.maps.rps_maps.update(
            &queue.to_ne_bytes(),
            &bytes_of(map.raw()),
            MapFlags::ANY,
        )?)
    }

    /// What the queue's map says now.
    ///
    /// # Errors
    /// When the map can't be read.
    pub fn rps_map(&self, queue: u32) -> Result<RpsMap> {
        Ok(RpsMap::from_raw(lookup::<rps_map>(
            &self.shared.maps.rps_maps,
            queue,
        )?))
    }

    /// The queue's counters, as they are at this moment.
    ///
    /// # Errors
    /// When the map can't be read.
    pub fn rx_queue(&self, queue: u32) -> Result<rx_queue> {
        lookup(&self.shared.maps.rx_queues, queue)
    }

    /// The counters of the queue's backlog for `cpu`. All zero if it does not exist.
    ///
    /// # Errors
    /// When the map can't be read.
    pub fn backlog(&self, queue: u32, cpu: u32) -> Result<backlog> {
        lookup(&self.shared.maps.backlogs, queue * self.nr_cpus + cpu)
    }

    /// Queues over all devices.
    pub fn nr_queues(&self) -> u32 {
        u32::try_from(self.backlogs.nr_queues()).expect("made from a u32")
    }

    /// CPUs the kernel can ever have: numbers 0 to this - 1.
    pub fn nr_cpus(&self) -> u32 {
        self.nr_cpus
    }

    /// The XDP program of a device, for `BPF_PROG_TEST_RUN`.
    pub fn program(&self, device: usize) -> BorrowedFd<'_> {
        self.devices[device].program()
    }

    /// Declares that nothing from before is on its way: flows of this queue may go anywhere at
    /// once. Only true where no packet can have come, as for a program that is never attached.
    ///
    /// # Errors
    /// When the map can't be written.
    pub fn settle(&self, queue: u32) -> Result<()> {
        let mut value = self.rx_queue(queue)?;
        value.first_epoch = self.epoch;
        Ok(self.shared.maps.rx_queues.update(
            &queue.to_ne_bytes(),
            &bytes_of(&value),
            MapFlags::ANY,
        )?)
    }

    /// Brings every flow home to INLINE, so that plain traffic can't overtake what is still
    /// queued. For half of `patience` flows move when their frames have been delivered; after
    /// that, frames of flows that can't move yet are dropped (and counted as shed) until they can.
    ///
    /// Returns whether everything came home.
    ///
    /// # Errors
    /// When a map can't be read or written.
    pub fn bring_home(&self, patience: Duration) -> Result<bool> {
        for queue in 0..self.nr_queues() {
            self.set_queue(queue, Policy::OFF)?;
        }
        for (map, wait) in [
            (RpsMap::inline(), patience / 2),
            (RpsMap::inline_shed(), patience / 2),
        ] {
            for queue in 0..self.nr_queues() {
                self.set_rps_map(queue, &map)?;
            }
            if self.drain(wait)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits until every backlog is [`Drain`]ed.
    fn drain(&self, patience: Duration) -> Result<bool> {
        let deadline = Instant::now() + patience;
        let drain = Drain::of(0..self.nr_cpus);
        while !drain.check(self)? {
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(Drain::TICK);
        }
        Ok(true)
    }

    /// The stream of [`Request`]s.
    ///
    /// # Errors
    /// When the ring buffer can't be mapped.
    pub fn requests(&self) -> Result<Requests> {
        let pending = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&pending);
        let mut builder = RingBufferBuilder::new();
        builder.add(&self.shared.maps.backlog_requests, move |bytes| {
            if let Some(r) = read::<backlog_request>(bytes) {
                sink.borrow_mut().push(Request {
                    queue: r.queue,
                    cpu: r.cpu,
                });
            }
            0
        })?;
        Ok(Requests {
            ring: builder.build()?,
            pending,
        })
    }
}

/// Whether CPUs' backlogs have become empty: all that entered has been delivered, and nothing
/// enters any more.
///
/// A program that was running when they were found empty may have found a flow held just before,
/// and let it stay: so after the end of all that were running, they must be as they were.
pub struct Drain {
    cpus: std::ops::Range<u32>,
}

impl Drain {
    /// Between two checks.
    pub const TICK: Duration = Duration::from_millis(1);

    /// The backlogs of all queues for these CPUs.
    pub fn of(cpus: std::ops::Range<u32>) -> Self {
        Self { cpus }
    }

    /// Checks; returns whether they are empty. Takes a grace period of RCU if it seems so, some
    /// tens of milliseconds.
    ///
    /// # Errors
    /// When a map can't be read.
    pub fn check(&self, datapath: &Datapath) -> Result<bool> {
        let Some(entered) = self.drained(datapath)? else {
            return Ok(false);
        };
        datapath.grace_period()?;
        Ok(self.drained(datapath)? == Some(entered))
    }

    /// The frames that ever entered, if all have been delivered.
    fn drained(&self, datapath: &Datapath) -> Result<Option<u64>> {
        let mut entered = 0;
        for queue in 0..datapath.nr_queues() {
            for cpu in self.cpus.clone() {
                entered += datapath.backlog(queue, cpu)?.tail;
                if !datapath.drained(queue, cpu)? {
                    return Ok(None);
                }
            }
        }
        Ok(Some(entered))
    }
}

/// Backlogs that flows want: readable ([`Self::fd`]) when there are some.
pub struct Requests {
    ring: RingBuffer<'static>,
    pending: Rc<RefCell<Vec<Request>>>,
}

impl Requests {
    /// For `poll`: readable when [`Self::take`] has something.
    pub fn fd(&self) -> RawFd {
        self.ring.epoll_fd()
    }

    /// What has come since the last call.
    ///
    /// # Errors
    /// When the ring buffer is damaged.
    pub fn take(&self) -> Result<Vec<Request>> {
        self.ring.consume()?;
        Ok(self.pending.take())
    }
}

/// Sets the constants that all devices share; returns them for the rest.
fn set_constants<'a>(
    open: &'a mut OpenRxSkel<'_>,
    config: &Config,
    nr_cpus: u32,
    tables: &Tables,
) -> &'a mut rodata {
    let rodata = open
        .maps
        .rodata_data
        .as_deref_mut()
        .expect("the object has constants");
    rodata.nr_cpus = nr_cpus;
    rodata.backlog_limit = config.backlog_limit.into();
    rodata.flow_limit = config.flow_limit * load::WHOLE / 100;
    rodata.flow_tunnels = config.tunnels;
    rodata.flow_secret = config.secret;
    rodata.flow_shift = tables.flow_shift();
    rodata.sock_flow_mask = tables.sock_flow_mask();
    rodata.sock_flow_cpu_mask = tables::cpu_mask(nr_cpus);
    rodata.dry_run = config.dry_run;
    rodata.unguarded = config.unguarded;
    rodata
}

fn load_device(
    shared: &RxSkel<'_>,
    tables: &Tables,
    config: &Config,
    nr_cpus: u32,
    queue_base: u32,
    device: &DeviceConfig,
) -> Result<DeviceSkel> {
    let mut open = open()?;
    let rodata = set_constants(&mut open, config, nr_cpus, tables);
    rodata.queue_base = queue_base;
    rodata.nr_rx_queues = device.nr_rx_queues;
    rodata.ifindex = device.ifindex;
    rodata.generic = device.mode == XdpMode::Generic;
    // Drivers refuse a jumbo MTU without frags. For generic mode the kernel, since 6.9, copies an
    // skb with too little headroom for XDP, and all skbs of several pieces, for programs that
    // declare them; the copy lacks its mac_len (skb_pp_cow_data() in net/core/skbuff.c), by which
    // cpu_map_generic_redirect() finds the network header: every redirected copy would be dropped
    // as corrupt. For other programs the skb is made fit in place, whatever its length.
    let mut flags = match device.mode {
        XdpMode::Native => libbpf_sys::BPF_F_XDP_HAS_FRAGS,
        XdpMode::Generic => 0,
    };
    let mut chosen = "rxsteer";
    if config.rx_hash {
        ensure!(
            caps::has_device_hash()?,
            "this kernel does not hand devices' hashes to XDP programs: `--hash device` needs Linux 6.3"
        );
        chosen = "rxsteer_rx_hash";
        flags |= libbpf_sys::BPF_F_XDP_DEV_BOUND_ONLY;
    }
    for mut prog in open.open_object_mut().progs_mut() {
        let chosen = prog.name() == chosen;
        prog.set_autoload(chosen);
        if chosen {
            prog.set_flags(flags);
        }
        if chosen && config.rx_hash {
            prog.set_ifindex(device.ifindex);
        }
    }
    for mut map in open.open_object_mut().maps_mut() {
        // Constants are the device's own, the tables their owner's; every other map is shared.
        if let Some(same) = shared.object().maps().find(|m| m.name() == map.name())
            && !map.name().to_string_lossy().contains(".rodata")
        {
            map.reuse_fd(same.as_fd())?;
        }
    }
    tables.lend_to(&mut open)?;
    let skel = open.load().context("the kernel refused the XDP program")?;
    let bound = match config.rx_hash {
        true => Some(xdp::Bound::with(&skel.maps.rodata)?),
        false => None,
    };
    Ok(DeviceSkel {
        skel,
        _bound: bound,
    })
}

/// The bytes of a value that has come from, or goes to, a map of that type.
pub(crate) fn bytes_of<T: Copy>(value: &T) -> Vec<u8> {
    // SAFETY: `T` is one of the skeleton's plain C structs, whose padding is named in types.h.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }.to_vec()
}

/// The value in a map's bytes, if there are enough of them.
fn read<T: Copy>(bytes: &[u8]) -> Option<T> {
    (bytes.len() >= size_of::<T>())
        // SAFETY: long enough, and `T` is a plain C struct of integers.
        .then(|| unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}

pub(crate) fn lookup<T: Copy>(map: &impl MapCore, index: u32) -> Result<T> {
    let bytes = map.lookup(&index.to_ne_bytes(), MapFlags::ANY)?;
    bytes
        .as_deref()
        .and_then(read)
        .ok_or_else(|| anyhow!("no entry {index} in {}", map.name().display()))
}
