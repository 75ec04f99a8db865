// SPDX-License-Identifier: MIT OR Apache-2.0
//! Modes of steering, each in effect during the lifetime of its [`Active`].
//!
//! A [`Mode`] and the CPUs that it may use are a [`Way`].

use std::fmt;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indexmap::IndexMap;
use rxsteer::api::client;
use rxsteer::api::status::{Queue, Status};
use rxsteer::daemon;
use rxsteer::daemon::options::{Mode as Xdps, Options, RpsCpus};
use rxsteer::daemon::told::Told;
use rxsteer::datapath::policy::Policy;
use rxsteer::datapath::waits::Waits;
use rxsteer::datapath::{RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES};
use rxsteer::host::cpumask::CpuMask;
use rxsteer::host::device::Device;
use rxsteer::host::flow_entries::FlowEntries;
use rxsteer::host::setting::Setting;

use crate::bench::experiment::{DeviceKind, Values, detail, fit};
use crate::bench::report::document::{Better, Metric};
use crate::bench::setup::watch::Seen;
use crate::lab::link::End;
use crate::lab::netns::Thread;
use crate::lab::xdp::Xdp;

/// Ring size of the naive cpumap, frames.
const CPUMAP_RING: u32 = 2048;

/// Limit on switching a mode on. An emulated machine takes seconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A mode of steering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Packets are processed where they are received.
    None,
    /// `rps_cpus`.
    KernelRps,
    /// `rps_cpus` with `rps_flow_cnt` and `rps_sock_flow_entries`.
    KernelRfs,
    /// A cpumap by hash, and nothing else.
    Cpumap,
    /// rxsteer with `--policy rps`.
    RxsteerRps,
    /// rxsteer with `--policy rfs`.
    RxsteerRfs,
    /// rxsteer with `--policy rps` and [`FLOW_LIMIT`].
    RxsteerRpsLimit,
    /// rxsteer with `--policy rfs` and [`FLOW_LIMIT`].
    RxsteerRfsLimit,
    /// rxsteer with `--policy rfs+idle`.
    RxsteerRfsIdle,
    /// rxsteer with its default policy.
    Rxsteer,
    /// rxsteer with `--policy rfs --follow-nat`.
    RxsteerRfsNat,
    /// rxsteer with its default policy and `--follow-nat`.
    RxsteerNat,
    /// rxsteer in softirq mode with `--policy rps`.
    RxsteerSoftirqRps,
    /// rxsteer in softirq mode with `--policy rfs`.
    RxsteerSoftirqRfs,
    /// rxsteer in softirq mode with `--policy rfs --follow-nat`.
    RxsteerSoftirqRfsNat,
    /// rxsteer in softirq mode with its default policy.
    RxsteerSoftirq,
}

impl Mode {
    /// Steering by the kernel.
    pub fn is_kernels(self) -> bool {
        matches!(self, Self::KernelRps | Self::KernelRfs)
    }

    /// Whether rxsteer steers after GRO.
    fn is_softirq(self) -> bool {
        matches!(
            self,
            Self::RxsteerSoftirqRps
                | Self::RxsteerSoftirqRfs
                | Self::RxsteerSoftirqRfsNat
                | Self::RxsteerSoftirq
        )
    }

    /// Whether flows follow their applications behind NAT.
    fn follows_nat(self) -> bool {
        matches!(
            self,
            Self::RxsteerRfsNat | Self::RxsteerNat | Self::RxsteerSoftirqRfsNat
        )
    }

    /// Percentage above which a flow is large; 0: no flow is.
    fn flow_limit(self) -> u32 {
        match self {
            Self::RxsteerRpsLimit | Self::RxsteerRfsLimit => FLOW_LIMIT,
            _ => 0,
        }
    }

    /// Those of the modes that this device can have.
    pub fn on(device: DeviceKind, modes: &[Self]) -> Vec<Self> {
        let by_xdp =
            |mode: &Self| *mode == Self::Cpumap || (mode.policy().is_some() && !mode.is_softirq());
        let can = |mode: &&Self| device == DeviceKind::Nic || !by_xdp(mode);
        modes.iter().filter(can).copied().collect()
    }

    /// Policy of rxsteer's modes, None for the others.
    fn policy(self) -> Option<Policy> {
        match self {
            Self::None | Self::KernelRps | Self::KernelRfs | Self::Cpumap => None,
            Self::RxsteerRps | Self::RxsteerRpsLimit | Self::RxsteerSoftirqRps => Some(Policy::RPS),
            Self::RxsteerRfs | Self::RxsteerRfsLimit | Self::RxsteerRfsNat => Some(Policy::RFS),
            Self::RxsteerSoftirqRfs | Self::RxsteerSoftirqRfsNat => Some(Policy::RFS),
            Self::RxsteerRfsIdle => Some(Policy {
                idle: true,
                ..Policy::RFS
            }),
            Self::Rxsteer | Self::RxsteerNat | Self::RxsteerSoftirq => Some(Policy::default()),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::KernelRps => "kernel-rps",
            Self::KernelRfs => "kernel-rfs",
            Self::Cpumap => "cpumap",
            Self::RxsteerRps => "rxsteer-rps",
            Self::RxsteerRfs => "rxsteer-rfs",
            Self::RxsteerRpsLimit => "rxsteer-rps+limit",
            Self::RxsteerRfsLimit => "rxsteer-rfs+limit",
            Self::RxsteerRfsIdle => "rxsteer-rfs+idle",
            Self::Rxsteer => "rxsteer",
            Self::RxsteerRfsNat => "rxsteer-rfs+nat",
            Self::RxsteerNat => "rxsteer-adaptive+nat",
            Self::RxsteerSoftirqRps => "rxsteer-softirq-rps",
            Self::RxsteerSoftirqRfs => "rxsteer-softirq-rfs",
            Self::RxsteerSoftirqRfsNat => "rxsteer-softirq-rfs+nat",
            Self::RxsteerSoftirq => "rxsteer-softirq",
        })
    }
}

/// Percentage of its queue's packets above which a flow is large, in the modes that limit large flows.
const FLOW_LIMIT: u32 = 12;

/// The CPUs over which a mode spreads flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cpus {
    /// The mode's own choice.
    Default,
    /// All online CPUs, without the generators'.
    All,
    /// All but those that poll a queue.
    Others,
}

/// A mode and its CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Way {
    pub mode: Mode,
    pub cpus: Cpus,
}

impl Way {
    /// A mode that chooses its CPUs itself, or has none.
    pub fn by_default(mode: Mode) -> Self {
        let cpus = Cpus::Default;
        Self { mode, cpus }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cpus {
            Cpus::Default => write!(f, "{}", self.mode),
            Cpus::All => write!(f, "{} (all)", self.mode),
            Cpus::Others => write!(f, "{} (others)", self.mode),
        }
    }
}

/// A mode in effect on a device. Kernel RPS and RFS are off in all other modes; their settings are
/// restored at the end.
pub struct Active<'a> {
    end: &'a End,
    mode: Mode,
    /// rxsteer, in its modes.
    steering: Option<Steering>,
    /// The XDP programs of the other modes.
    programs: Vec<Xdp>,
    /// Restored after everything else was stopped.
    settings: Vec<Setting>,
    /// Of kernel RFS.
    entries: Option<FlowEntries>,
}

struct Steering {
    stop: OwnedFd,
    thread: Option<Thread<Result<()>>>,
}

impl<'a> Active<'a> {
    /// Switches `mode` on, with every queue over `cpus` or over the mode's own choice; returns once
    /// it is in effect.
    ///
    /// # Errors
    /// When the mode can't be switched on.
    pub fn start(end: &'a End, mode: Mode, cpus: Option<&CpuMask>) -> Result<Self> {
        Self::start_on(&[end], mode, cpus)
    }

    /// As [`Self::start`], on several devices of one namespace: rxsteer takes native mode where it can.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_on(ends: &[&'a End], mode: Mode, cpus: Option<&CpuMask>) -> Result<Self> {
        let spread_over = || cpus.with_context(|| format!("{mode} over which CPUs?"));
        let mut active = Self {
            end: ends.first().context("which device?")?,
            mode,
            steering: None,
            programs: Vec::new(),
            settings: Vec::new(),
            entries: None,
        };
        for end in ends {
            let device = end.netns.run(|| Device::open(&end.name))?;
            device.without_xdp()?;
            if !mode.is_kernels() && !device.kernel_rps.is_empty() {
                active.settings.push(rps_off(end, &device.kernel_rps)?);
            }
            match (mode, mode.policy()) {
                (Mode::Cpumap, _) => {
                    let cpus: Vec<u32> = spread_over()?.iter().collect();
                    active.programs.push(Xdp::cpumap(end, &cpus, CPUMAP_RING)?);
                }
                (_, policy) if end.pass && (policy.is_none() || mode.is_softirq()) => {
                    active.programs.push(Xdp::pass(end)?);
                }
                _ => {}
            }
        }
        if let Some(policy) = mode.policy() {
            let mut options = Options::new(ends.iter().map(|end| end.name.as_str()));
            if let Some(cpus) = cpus {
                options.rps_cpus = RpsCpus::Mask(cpus.clone());
            }
            options.mode = match ends {
                _ if mode.is_softirq() => Xdps::Softirq,
                [_] => Xdps::Native,
                _ => Xdps::Auto,
            };
            options.policy = policy;
            options.flow_limit = mode.flow_limit();
            options.follow_nat = mode.follows_nat();
            active.steering = Some(steer(active.end, options)?);
        }
        if mode.is_kernels() {
            let rfs = mode == Mode::KernelRfs;
            active.entries = rfs
                .then(|| FlowEntries::hold(RPS_SOCK_FLOW_ENTRIES))
                .transpose()?;
            active.settings = kernel_steering(ends, spread_over()?, rfs)?;
        }
        Ok(active)
    }

    /// Runs rxsteer with options of its own.
    ///
    /// # Errors
    /// When rxsteer can't steer.
    pub fn steer(end: &'a End, options: Options) -> Result<Self> {
        let mode = Mode::Rxsteer;
        let steering = Some(steer(end, options)?);
        Ok(Self {
            end,
            mode,
            steering,
            programs: Vec::new(),
            settings: Vec::new(),
            entries: None,
        })
    }

    /// Checks by the kernel's counters that the mode was in effect, for packets of many flows over
    /// CPUs of which `elsewhere` do not poll the queue.
    ///
    /// # Errors
    /// [`Unfit`](crate::bench::experiment::Unfit), with the reason.
    pub fn verify(&self, seen: &Seen, elsewhere: &CpuMask) -> Result<()> {
        let mode = self.mode;
        let moved: u64 = elsewhere
            .iter()
            .filter_map(|cpu| seen.softnet.get(&cpu))
            .map(|softnet| softnet.processed)
            .sum();
        let interrupts: u64 = seen.softnet.values().map(|s| s.received_rps).sum();
        // Flows may stay inline by decision, if the CPU has room or their application is there.
        let may_stay = match mode.policy() {
            Some(policy) => policy.adapt || policy.follows(),
            None => mode == Mode::None,
        };
        fit!(
            may_stay || elsewhere.is_empty() || moved > 0,
            "{mode} was not in effect: CPUs {elsewhere} processed no packet"
        );
        fit!(
            !mode.is_kernels() || elsewhere.is_empty() || interrupts > 0,
            "{mode} was not in effect: softnet_stat counts no interrupts of RPS"
        );
        let why = self.imbalance()?.unwrap_or_default();
        fit!(why.is_empty(), "rxsteer's account does not close: {why}");
        Ok(())
    }

    /// Which of rxsteer's accounts does not close. A packet that comes while the counters are read
    /// may be in one and not yet in another: only what stays so counts.
    fn imbalance(&self) -> Result<Option<String>> {
        let deadline = Instant::now() + TIMEOUT;
        while let Some(status) = self.status()? {
            let mut queues = status.devices.iter().flat_map(|device| &device.queues);
            let why = queues.find_map(Queue::imbalance);
            if why.is_none() || Instant::now() > deadline {
                return Ok(why);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(None)
    }

    /// rxsteer's counters; None in the other modes.
    ///
    /// # Errors
    /// When rxsteer has ended.
    pub fn status(&self) -> Result<Option<Status>> {
        let status = || self.end.netns.run(client::status);
        self.steering.is_some().then(status).transpose()
    }

    /// Metrics of [`Self::counted`].
    pub fn metrics() -> IndexMap<String, Metric> {
        IndexMap::from([
            detail(
                "redirected_percent",
                "Packets redirected",
                "%",
                Better::Neither,
            ),
            detail(
                "waited_us_p99",
                "Wait for a backlog, 99th percentile, at most",
                "us",
                Better::Lower,
            ),
        ])
    }

    /// What rxsteer has counted since it was switched on; nothing in the other modes.
    ///
    /// # Errors
    /// As [`Self::status`].
    pub fn counted(&self) -> Result<Values> {
        let mut waits = Waits::default();
        let (mut received, mut redirected) = (0, 0);
        for queue in self
            .status()?
            .iter()
            .flat_map(|s| &s.devices)
            .flat_map(|d| &d.queues)
        {
            received += queue.received;
            redirected += queue.sums.redirected;
            queue
                .backlogs
                .iter()
                .for_each(|backlog| waits += &backlog.waits);
        }
        let share = (received > 0).then(|| 100.0 * redirected as f64 / received as f64);
        let waited = waits.p99_below_us.map(|us| us as f64);
        let values = [("redirected_percent", share), ("waited_us_p99", waited)];
        Ok(values
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
            .collect())
    }

    /// Switches the mode off.
    ///
    /// # Errors
    /// When rxsteer failed or ended before.
    pub fn stop(mut self) -> Result<()> {
        self.end_now()
    }

    fn end_now(&mut self) -> Result<()> {
        let Some(Steering { stop, thread }) = &mut self.steering else {
            return Ok(());
        };
        let Some(thread) = thread.take() else {
            return Ok(());
        };
        nix::unistd::write(&*stop, &[0])?;
        thread.join()
    }
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        if let Err(e) = self.end_now() {
            tracing::warn!("{e:#}");
        }
    }
}

/// Switches kernel RPS and RFS off. `files` are relative to a device's `queues/`.
fn rps_off(end: &End, files: &[String]) -> Result<Setting> {
    let paths = files.iter().map(|file| queue_file(end, file)).collect();
    end.netns.run(|| {
        let kept = Setting::keep_all(paths)?;
        kept.set("0")?;
        Ok(kept)
    })
}

/// Switches kernel RPS on, or kernel RFS with rxsteer's table sizes. The table of applications'
/// CPUs is global and set in the initial network namespace.
fn kernel_steering(ends: &[&End], cpus: &CpuMask, rfs: bool) -> Result<Vec<Setting>> {
    let mut kept = Vec::new();
    for end in ends {
        let files = |queue| ["rps_cpus", "rps_flow_cnt"].map(|file| format!("rx-{queue}/{file}"));
        let files = (0..end.queues).flat_map(files);
        let paths = files.map(|file| queue_file(end, &file)).collect();
        kept.push(end.netns.run(|| Setting::keep_all(paths))?);
    }
    let slots = if rfs { RPS_FLOW_CNT } else { 0 };
    for end in ends {
        write_queues(end, "rps_flow_cnt", &slots.to_string())?;
        write_queues(end, "rps_cpus", &cpus.to_mask_string())?;
    }
    Ok(kept)
}

fn queue_file(end: &End, file: &str) -> String {
    format!("/sys/class/net/{}/queues/{file}", end.name)
}

/// Writes a file of each receive queue.
fn write_queues(end: &End, file: &str, value: &str) -> Result<()> {
    end.netns.run(|| {
        for queue in 0..end.queues {
            let path = queue_file(end, &format!("rx-{queue}/{file}"));
            fs::write(&path, value).with_context(|| format!("writing {value} to {path}"))?;
        }
        Ok(())
    })
}

/// Runs rxsteer on a thread in the device's namespace; returns once it is ready.
fn steer(end: &End, options: Options) -> Result<Steering> {
    let (wait, stop) = nix::unistd::pipe()?;
    let thread = end.netns.spawn(None, "rxsteer", move || {
        daemon::run(&options, &Told::to_stop(wait.as_fd()))
    })?;
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if end.netns.run(client::status).is_ok() {
            return Ok(Steering {
                stop,
                thread: Some(thread),
            });
        }
        if thread.is_finished() {
            thread.join()?;
            bail!("rxsteer ended by itself");
        }
        if Instant::now() > deadline {
            bail!("rxsteer is not ready after {TIMEOUT:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
