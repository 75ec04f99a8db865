// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer run`: attaches, steers until it is told to stop, brings every flow home, detaches.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::accounting::{self, Status};
use crate::backlogs::{Backlogs, LIMIT_MAX};
use crate::balance::MOVES_PER_SECOND;
use crate::balancer::Balancer;
use crate::busy_poll::Service;
use crate::busy_poll::rule::Rule;
use crate::caps::{self, Need};
use crate::control::{self, Reply, Request, Role};
use crate::cpumask::{CpuMask, CpuMaskError};
use crate::datapath::{
    BACKLOG_NICE, Config, Datapath, DeviceConfig, Drain, FLOW_LIMIT, RPS_FLOW_CNT,
    RPS_SOCK_FLOW_ENTRIES, Request as Wanted, Requests, draw_secret,
};
use crate::device::{Device, XdpMode};
use crate::endpoints::Endpoints;
use crate::explain::{Answer, Explanations, Name, Question, Target};
use crate::flows::{self, Flows, Most, Query, Reader};
use crate::hotplug::{Event, Hotplug};
use crate::policy::{Base, Policy};
use crate::tables::rounded;
use crate::topology::Topology;

/// How long flows may take to come home before the program is detached anyway.
const PATIENCE: Duration = Duration::from_secs(2);

/// How many connections are asked about at once.
const SOCKETS_MAX: usize = 4096;

/// Of how many flows `status` says how much they lost.
const DROPPED_FLOWS: usize = 5;

/// How long it looks for them: it is asked again and again, when the host has no time to spare.
const DROPPED_FLOWS_PATIENCE: Duration = Duration::from_millis(100);

/// A socket does not know what hash the device computes for its packets.
const NO_DEVICE_HASH: &str = "flows can't follow applications by the device's hash, which sockets \
                              don't know: leave --hash device, or use --policy rps";

/// Where XDP is attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Native, or generic with a warning where the driver has no XDP.
    #[default]
    Auto,
    /// In the driver.
    Native,
    /// In the stack: works with every driver that has NAPI, and costs an skb first.
    Generic,
}

/// What names a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Hash {
    /// The packet's headers.
    #[default]
    Packet,
    /// The hash that the device computed, where its driver gives one to XDP (since 6.3); the
    /// packet's headers otherwise.
    Device,
}

/// The CPUs of a queue: as given, or to be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RpsCpus {
    /// Those that share a last-level cache with the interrupt's CPU.
    Auto,
    /// These.
    Mask(CpuMask),
}

impl std::str::FromStr for RpsCpus {
    type Err = CpuMaskError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let mask: CpuMask = text.parse()?;
        if mask.is_empty() {
            return Err(CpuMaskError::Empty);
        }
        Ok(Self::Mask(mask))
    }
}

/// `[DEVICE:]QUEUE=CPUS`.
#[derive(Clone, Debug)]
pub struct QueueCpus {
    /// Needed only when several devices are steered.
    pub device: Option<String>,
    /// `rx_queue_index`.
    pub queue: u32,
    /// Its CPUs.
    pub cpus: RpsCpus,
}

impl std::str::FromStr for QueueCpus {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (place, cpus) = text
            .split_once('=')
            .ok_or_else(|| anyhow!("write QUEUE=CPUS, for example 0=0-3 or eth0:0=0-3"))?;
        let (device, queue) = match place.rsplit_once(':') {
            Some((device, queue)) => (Some(device.to_owned()), queue),
            None => (None, place),
        };
        let queue = queue
            .parse()
            .map_err(|_| anyhow!("{queue:?} is not a queue number: 0, 1, …"))?;
        Ok(Self {
            device,
            queue,
            cpus: cpus.parse()?,
        })
    }
}

/// What to steer, and how. The defaults are those of the command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// Interface names, at least one, all different.
    pub devices: Vec<String>,
    /// How packets find their CPU.
    pub policy: Policy,
    /// The CPUs of every queue that `queues` does not name.
    pub rps_cpus: RpsCpus,
    /// Queues with CPUs of their own.
    pub queues: Vec<QueueCpus>,
    /// Where XDP is attached.
    pub mode: Mode,
    /// Decide and count, move nothing.
    pub dry_run: bool,
    /// Frames a backlog may hold; `net.core.netdev_max_backlog` if there is none.
    pub backlog: Option<u32>,
    /// Nice value of the backlogs' threads.
    pub backlog_nice: i32,
    /// Entries of the table of applications' CPUs; 0: no flow follows its application.
    pub rps_sock_flow_entries: u32,
    /// Slots of each queue's flow table; 0: no flow follows its application.
    pub rps_flow_cnt: u32,
    /// Follow applications on unconnected UDP sockets too.
    pub unconnected: bool,
    /// Bits of `enum flow_tunnel`.
    pub tunnels: u32,
    /// What names a flow.
    pub hash: Hash,
    /// Percent of its queue's frames above which a flow is shed first; 0: no flow is.
    pub flow_limit: u32,
    /// Slots of each queue's `rps_map` that may move in a second, under a policy with `+balance`; 0: none.
    pub balance_moves: u32,
    /// Whose sockets poll meanwhile.
    pub busy_poll: Vec<Rule>,
    /// The rule of order switched off. Only the lab does so: no option of the command line does.
    pub unguarded: bool,
}

impl Options {
    /// The defaults for these devices.
    pub fn new(devices: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            devices: devices.into_iter().map(Into::into).collect(),
            policy: Policy::default(),
            rps_cpus: RpsCpus::Auto,
            queues: Vec::new(),
            mode: Mode::default(),
            dry_run: false,
            backlog: None,
            backlog_nice: BACKLOG_NICE,
            rps_sock_flow_entries: RPS_SOCK_FLOW_ENTRIES,
            rps_flow_cnt: RPS_FLOW_CNT,
            unconnected: true,
            tunnels: 0,
            hash: Hash::default(),
            flow_limit: FLOW_LIMIT,
            balance_moves: MOVES_PER_SECOND,
            busy_poll: Vec::new(),
            unguarded: false,
        }
    }
}

/// A device while it is steered.
struct Steered {
    device: Device,
    mode: XdpMode,
    /// Of its queue 0, over all devices.
    first_queue: u32,
    /// By queue, as configured; of these the offline ones are left out.
    cpus: Vec<CpuMask>,
}

/// Everything between attach and detach.
struct Steering {
    datapath: Datapath,
    devices: Vec<Steered>,
    policy: Policy,
    balancer: Balancer,
    online: CpuMask,
    /// CPUs that went offline, until their backlogs are empty.
    leaving: Vec<(u32, Drain)>,
    /// What can't be followed on this host, in words.
    not_followed: Vec<String>,
}

/// Steers until `stop` becomes readable.
///
/// # Errors
/// With the reason and the remedy, when the host or a device does not allow it. Nothing is left
/// attached then.
pub fn run(options: &Options, stop: BorrowedFd<'_>) -> Result<()> {
    if let Some(missing) = caps::missing(Need::Steer).first() {
        bail!("{missing}");
    }
    let listener = control::listen(Role::Steer)?;
    let hotplug = Hotplug::listen()?;
    let polling = match &options.busy_poll[..] {
        [] => None,
        rules => Some(Service::new(rules, false)?),
    };
    let mut steering = Steering::start(options)?;
    let requests = steering.datapath.requests()?;
    let maker = make_backlogs(steering.datapath.backlogs());
    info!(
        "{} {}; stop with Ctrl-C or SIGTERM",
        match (options.policy, options.dry_run) {
            (Policy::OFF, _) => "watching (policy off)",
            (_, false) => "steering",
            (_, true) => "watching (dry run)",
        },
        options.devices.join(", ")
    );

    if polling.is_some() && !options.policy.follows() {
        warn!(
            "policy {} does not know who polls: polls will not find what is redirected",
            options.policy
        );
    }
    let polling = polling.map(let_poll).transpose()?;
    let outcome = steering.serve(stop, &listener, &hotplug, &requests, &maker);
    drop(polling);
    // In any case: what is queued must not be overtaken.
    let stopped = steering.stop();
    outcome.and(stopped)
}

/// Lets sockets poll, on a thread of its own, until what it returns is dropped.
fn let_poll(service: Service) -> Result<Polling> {
    let (wait, stop) = nix::unistd::pipe()?;
    let thread = std::thread::spawn(move || {
        if let Err(e) = service.serve(wait.as_fd()) {
            warn!("busy polling: {e:#}");
        }
    });
    Ok(Polling {
        stop: Some(stop),
        thread: Some(thread),
    })
}

/// The thread that lets sockets poll.
struct Polling {
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Polling {
    /// Returns when all sockets are as they were.
    fn drop(&mut self) {
        // The other end of the pipe sees that.
        self.stop = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Makes the backlogs that are asked for through the channel, on a thread of its own: it may have to
/// wait for a busy CPU, and whoever asks for the status or says stop must not. It ends with the
/// channel.
fn make_backlogs(backlogs: Arc<Backlogs>) -> mpsc::Sender<Wanted> {
    let (maker, wanted) = mpsc::channel::<Wanted>();
    std::thread::spawn(move || {
        for Wanted { queue, cpu } in wanted {
            if let Err(e) = backlogs.make(queue, cpu) {
                warn!("{e:#}: its flows stay where they are received");
            }
        }
    });
    maker
}

/// What a running rxsteer would print now.
///
/// # Errors
/// When none runs in this network namespace.
pub fn status() -> Result<Status> {
    match control::ask(&Request::Status)? {
        Reply::Status(status) => Ok(status),
        Reply::Failed(why) => bail!(why),
        _ => bail!("the running rxsteer is of another version"),
    }
}

/// Changes what a running rxsteer does, from now on and without a packet overtaking another.
/// Returns what holds now, a line each.
///
/// # Errors
/// When none runs, or what is asked for is not possible; then nothing has changed.
pub fn set(change: Change) -> Result<Vec<String>> {
    match control::ask(&Request::Set(change))? {
        Reply::Done(lines) => Ok(lines),
        Reply::Failed(why) => bail!(why),
        _ => bail!("the running rxsteer is of another version"),
    }
}

/// The flows of a running rxsteer.
///
/// # Errors
/// When none runs, or it does not steer the device that is asked for.
pub fn flows(query: Query) -> Result<Flows> {
    match control::ask(&Request::Flows(query))? {
        Reply::Flows(flows) => Ok(flows),
        Reply::Failed(why) => bail!(why),
        _ => bail!("the running rxsteer is of another version"),
    }
}

fn explanations(question: Question) -> Result<Explanations> {
    match control::ask(&Request::Explain(question))? {
        Reply::Explained(explanations) => Ok(explanations),
        Reply::Failed(why) => bail!(why),
        _ => bail!("the running rxsteer is of another version"),
    }
}

/// Why the target's flows are where they are; at most `limit` of them. Sockets are looked up here,
/// flows by the running rxsteer.
///
/// # Errors
/// When none runs, the target does not exist or can't be seen, or no packet of it is known.
pub fn explain(target: Target, limit: usize) -> Result<Answer> {
    let mut notes = Vec::new();
    let question = |sockets: Endpoints, ports: Vec<u16>| Question {
        names: sockets
            .flows
            .into_iter()
            .take(SOCKETS_MAX)
            .map(Name::Flow)
            .collect(),
        local_ports: ports,
        unconnected: sockets.unconnected,
        limit,
    };
    let of_port = |port: u16| explanations(question(Endpoints::of_port(port)?, vec![port]));
    let (target, explanations) = match target {
        Target::Name(name) => {
            let names = vec![name];
            let question = Question {
                names,
                unconnected: match name {
                    Name::Flow(flow) => {
                        flow.local_port()
                            .map(Endpoints::of_port)
                            .transpose()?
                            .unwrap_or_default()
                            .unconnected
                    }
                    Name::Hash(_) => Vec::new(),
                },
                limit,
                ..Question::default()
            };
            (target, explanations(question)?)
        }
        Target::Port(port) => (target, of_port(port)?),
        Target::Pid(pid) => (target, of_process(pid, &mut notes, question)?),
        Target::Number(number) => {
            let as_port = match u16::try_from(number) {
                Ok(port) => Some((port, of_port(port)?)).filter(|(_, found)| found.total > 0),
                Err(_) => None,
            };
            match as_port {
                Some((port, found)) => {
                    notes.push(format!(
                        "{number} is taken for the local port; pid:{number} asks about the process."
                    ));
                    (Target::Port(port), found)
                }
                None => {
                    notes.push(format!(
                        "{number} is taken for the process: no flow or connection has that local \
                         port."
                    ));
                    (
                        Target::Pid(number),
                        of_process(number, &mut notes, question).with_context(|| {
                            format!("no flow or connection has the local port {number}")
                        })?,
                    )
                }
            }
        }
    };
    let devices = explanations.devices.join(", ");
    let nothing = match &explanations.flows[..] {
        [] => Some(format!("no flow of {target} is known on {devices}")),
        [one] if one.seen.is_empty() => Some(one.not_seen(&explanations.devices)),
        all if all.iter().all(|one| one.seen.is_empty()) => Some(format!(
            "no packet of the {} flows of {target} is known on {devices}",
            explanations.total
        )),
        _ => None,
    };
    if let Some(mut nothing) = nothing {
        if explanations.device_hash {
            nothing += "; with --hash device ask by the hash that `rxsteer flows` prints";
        }
        bail!(nothing);
    }
    Ok(Answer {
        target: target.to_string(),
        notes,
        explanations,
    })
}

fn of_process(
    pid: u32,
    notes: &mut Vec<String>,
    question: impl Fn(Endpoints, Vec<u16>) -> Question,
) -> Result<Explanations> {
    let sockets = Endpoints::of_process(pid)?;
    if sockets.foreign {
        notes.push(format!(
            "Process {pid} is in another network namespace: if addresses or ports are translated \
             on the way there, its flows have other names here."
        ));
    }
    let ports = sockets.unconnected.clone();
    explanations(question(sockets, ports))
}

/// What [`set`] can change; what is `None` stays as it is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Change {
    /// Whose CPUs; needed only when several devices are steered.
    pub device: Option<String>,
    /// Only this queue's CPUs.
    pub queue: Option<u32>,
    /// As in `--rps-cpus`.
    pub rps_cpus: Option<String>,
    /// How packets find their CPU.
    pub policy: Option<Policy>,
    /// Entries of the table of applications' CPUs.
    pub rps_sock_flow_entries: Option<u32>,
    /// Slots of each queue's flow table.
    pub rps_flow_cnt: Option<u32>,
}

impl Change {
    /// The CPUs of a device's queue, or of all its queues.
    pub fn rps_cpus(device: &str, queue: Option<u32>, cpus: &str) -> Self {
        Self {
            device: Some(device.to_owned()),
            queue,
            rps_cpus: Some(cpus.to_owned()),
            ..Self::default()
        }
    }
}

impl Steering {
    fn start(options: &Options) -> Result<Self> {
        if options.hash == Hash::Device && options.policy.follows() {
            bail!(NO_DEVICE_HASH);
        }
        let backlog_limit = backlog_limit(options.backlog)?;
        let mut devices = Vec::new();
        let mut first_queue = 0;
        for name in &options.devices {
            let device = Device::open(name)?;
            if devices
                .iter()
                .any(|d: &Steered| d.device.ifindex == device.ifindex)
            {
                bail!("{name} is named twice");
            }
            let mode = match options.mode {
                Mode::Generic => XdpMode::Generic,
                Mode::Auto if device.native_xdp == Some(false) => fall_back(&device),
                Mode::Auto | Mode::Native => XdpMode::Native,
            };
            check(&device, mode)?;
            let nr_queues = device.rx_queues;
            let mut steered = Steered {
                device,
                mode,
                first_queue,
                cpus: Vec::new(),
            };
            steered.cpus = (0..nr_queues)
                .map(|queue| cpus_of(&steered.device, queue, &options.rps_cpus))
                .collect::<Result<_>>()?;
            first_queue += nr_queues;
            devices.push(steered);
        }
        for wish in &options.queues {
            let index = find(&devices, wish.device.as_deref())?;
            let steered: &mut Steered = &mut devices[index];
            steered.cpus[wish.queue as usize] = cpus_of(&steered.device, wish.queue, &wish.cpus)?;
        }

        let config = Config {
            backlog_limit,
            backlog_nice: options.backlog_nice,
            rps_sock_flow_entries: options.rps_sock_flow_entries,
            rps_flow_cnt: options.rps_flow_cnt,
            unconnected: options.unconnected,
            dry_run: options.dry_run,
            tunnels: options.tunnels,
            rx_hash: options.hash == Hash::Device,
            flow_limit: options.flow_limit,
            unguarded: options.unguarded,
            secret: draw_secret()?,
        };
        let queues: Vec<_> = devices
            .iter()
            .map(|d| DeviceConfig {
                ifindex: d.device.ifindex,
                nr_rx_queues: d.device.rx_queues,
                mode: d.mode,
            })
            .collect();
        let datapath = Datapath::load(&config, &queues)?;
        let names = devices.iter().flat_map(|d| {
            let queues = 0..d.device.rx_queues;
            queues.map(|queue| format!("{} queue {queue}", d.device.name))
        });
        let mut steering = Self {
            balancer: Balancer::new(names, options.balance_moves),
            datapath,
            devices,
            policy: options.policy,
            online: Topology::host().online()?,
            leaving: Vec::new(),
            not_followed: Vec::new(),
        };
        steering.apply()?;
        for device in 0..steering.devices.len() {
            if let Err(e) = steering.attach(device, options.mode) {
                // Those before it are steered already.
                steering.datapath.bring_home(PATIENCE)?;
                return Err(e);
            }
        }
        Ok(steering)
    }

    /// Does what is asked for until `stop` becomes readable.
    fn serve(
        &mut self,
        stop: BorrowedFd<'_>,
        listener: &UnixListener,
        hotplug: &Hotplug,
        requests: &Requests,
        maker: &mpsc::Sender<Wanted>,
    ) -> Result<()> {
        loop {
            // SAFETY: the ring buffer outlives the loop.
            let ring = unsafe { BorrowedFd::borrow_raw(requests.fd()) };
            let mut fds = [
                PollFd::new(stop, PollFlags::POLLIN),
                PollFd::new(ring, PollFlags::POLLIN),
                PollFd::new(listener.as_fd(), PollFlags::POLLIN),
                PollFd::new(hotplug.as_fd(), PollFlags::POLLIN),
            ];
            let draining = (!self.leaving.is_empty()).then_some(Drain::TICK);
            let timeout = match draining.or(self.balancer.wait()) {
                None => PollTimeout::NONE,
                Some(wait) => PollTimeout::try_from(wait)?,
            };
            match poll(&mut fds, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(e) => return Err(e).context("waiting"),
            }
            let ready = fds.map(|fd| fd.any() == Some(true));
            for request in requests.take()? {
                maker
                    .send(request)
                    .context("the thread that makes backlogs has ended")?;
            }
            if ready[3] {
                self.cpus_changed(hotplug.take()?)?;
            }
            self.see_off()?;
            self.balancer.tick(&self.datapath);
            if ready[2] {
                control::serve(listener, |request| self.answer(request));
            }
            if ready[0] {
                return Ok(());
            }
        }
    }

    /// Fills the tables by policy and masks. Returns what can't be followed, in words.
    fn apply(&mut self) -> Result<Vec<String>> {
        for steered in &self.devices {
            for (queue, cpus) in (0..).zip(&steered.cpus) {
                let cpus = match self.policy.base {
                    Base::Off => CpuMask::default(),
                    _ => cpus.intersect(&self.online),
                };
                let cpus: Vec<u32> = cpus.iter().collect();
                let queue = steered.first_queue + queue;
                let map = self.datapath.rps_map(queue)?.spread_over(&cpus);
                self.datapath.set_rps_map(queue, &map)?;
                self.balancer.spread_over(queue, cpus);
            }
        }
        let dry_run = self.datapath.config().dry_run;
        self.balancer.switch(self.policy.balance && !dry_run);
        let policy = match self.datapath.config().can_follow() {
            true => self.policy,
            false => self.policy.without_following(),
        };
        match self.datapath.steer_by(policy) {
            Ok(Some(unseen)) => self.not_followed = unseen,
            Ok(None) if policy.follows() => {}
            Ok(None) => {
                let tables = "a table of flows has no entries: steering by RPS instead";
                let wanted = self.policy.follows();
                self.not_followed = wanted.then(|| tables.to_owned()).into_iter().collect();
            }
            Err(e) if policy.follows() => {
                self.not_followed = vec![format!("{e:#}; steering by RPS instead")];
                self.datapath.steer_by(policy.without_following())?;
            }
            Err(e) => return Err(e),
        }
        for what in &self.not_followed {
            warn!("{what}");
        }
        Ok(self.not_followed.clone())
    }

    /// CPUs went offline or came back; `None`: some did, which is not known. The threads of an
    /// offline CPU's backlogs run elsewhere, and nothing binds them again: the backlogs are closed,
    /// and taken away when they are empty ([`Self::see_off`]); they are made anew when the CPU is
    /// back and wanted. Both when it goes and when it comes: a backlog may have been made in between.
    fn cpus_changed(&mut self, events: Option<Vec<Event>>) -> Result<()> {
        let online = Topology::host().online()?;
        let cpus: CpuMask = match events {
            Some(events) if events.is_empty() => return Ok(()),
            Some(events) => events.into_iter().map(|event| event.cpu).collect(),
            None => {
                let either = self.online.iter().chain(online.iter());
                either
                    .filter(|&cpu| !self.online.contains(cpu) || !online.contains(cpu))
                    .collect()
            }
        };
        for cpu in cpus.iter().filter(|&cpu| cpu < self.datapath.nr_cpus()) {
            let state = match online.contains(cpu) {
                true => "online",
                false => "offline: its flows go elsewhere",
            };
            info!("CPU {cpu} is {state}");
            self.datapath.close_cpu(cpu, true)?;
            self.leaving.retain(|(leaving, _)| *leaving != cpu);
            self.leaving.push((cpu, Drain::of(cpu..cpu + 1)));
        }
        self.online = online;
        self.datapath.cpus_changed()?;
        self.apply()?;
        Ok(())
    }

    /// Takes the backlogs of CPUs that changed away once they are empty, and opens them again for
    /// those that are online.
    fn see_off(&mut self) -> Result<()> {
        let mut index = 0;
        while let Some((cpu, drain)) = self.leaving.get(index) {
            let cpu = *cpu;
            if !drain.check(&self.datapath)? {
                index += 1;
                continue;
            }
            self.datapath.remove_cpu(cpu)?;
            self.datapath.close_cpu(cpu, !self.online.contains(cpu))?;
            self.leaving.remove(index);
        }
        Ok(())
    }

    fn attach(&mut self, index: usize, mode: Mode) -> Result<()> {
        let steered = &mut self.devices[index];
        let name = steered.device.name.clone();
        let attached = self.datapath.attach(index, steered.mode);
        let unsupported = attached
            .as_ref()
            .is_err_and(|e| errno(e) == Some(libc::EOPNOTSUPP));
        let attached = if unsupported && mode == Mode::Auto {
            // Only kernels before 6.3, which don't tell beforehand, come here: they run a program
            // that was loaded for native mode in generic mode as well.
            steered.mode = fall_back(&steered.device);
            check(&steered.device, steered.mode)?;
            self.datapath.attach(index, XdpMode::Generic)
        } else {
            attached
        };
        attached.map_err(|e| {
            let Some(errno) = errno(&e) else {
                return e;
            };
            anyhow!(
                "{}",
                steered.device.attach_objection(steered.mode, errno, None)
            )
        })?;
        for (queue, cpus) in steered.cpus.iter().enumerate() {
            info!("{name} queue {queue}: CPUs {cpus}");
        }
        Ok(())
    }

    fn stop(mut self) -> Result<()> {
        if !self.datapath.bring_home(PATIENCE)? {
            warn!("some packets were still queued: what follows may overtake them");
        }
        self.datapath.detach();
        for device in self.accounts()? {
            for q in device.queues {
                info!(
                    "{} queue {}: received {} = inline {} + redirected {} + dropped {} + shed {} + \
                     limited {} + no flow {}; of the redirected, delivered {}, lost {}, queued {}",
                    device.device,
                    q.queue,
                    q.received,
                    q.inline,
                    q.sums.redirected,
                    q.sums.dropped,
                    q.sums.shed,
                    q.sums.limited + q.inline_limited,
                    q.no_flow_truncated + q.no_flow_unknown,
                    q.sums.delivered,
                    q.sums.lost,
                    q.sums.queued
                );
            }
        }
        Ok(())
    }

    fn answer(&mut self, request: Request) -> Reply {
        let reply = match request {
            Request::Status => self.status().map(Reply::Status),
            Request::BusyPoll => Err(anyhow!("this rxsteer lets no sockets poll")),
            Request::Set(change) => self.set(&change).map(Reply::Done),
            Request::Flows(query) => self.flows(&query).map(Reply::Flows),
            Request::Explain(question) => self
                .reader()
                .and_then(|reader| reader.explain(&question))
                .map(Reply::Explained),
        };
        reply.unwrap_or_else(|e| Reply::Failed(format!("{e:#}")))
    }

    fn reader(&self) -> Result<Reader<'_>> {
        if self.datapath.config().dry_run {
            bail!("a dry run moves no flow, and keeps no account of flows");
        }
        let devices = self
            .devices
            .iter()
            .map(|d| (d.device.name.as_str(), d.device.rx_queues));
        Reader::new(&self.datapath, devices, self.policy, &self.not_followed)
    }

    fn flows(&mut self, query: &Query) -> Result<Flows> {
        if query.device.is_some() {
            find(&self.devices, query.device.as_deref())?;
        }
        self.reader()?.flows(query, flows::PATIENCE)
    }

    fn set(&mut self, change: &Change) -> Result<Vec<String>> {
        let policy = change.policy.unwrap_or(self.policy);
        if policy.follows() && self.datapath.config().rx_hash {
            bail!(NO_DEVICE_HASH);
        }
        if policy == Policy::OFF && change.rps_cpus.is_some() {
            bail!("under policy off no CPUs are steered to: set another --policy as well");
        }
        // All or nothing: what may be refused comes first.
        let masks = self.masks(change)?;
        let mut lines = Vec::new();
        self.resize(change, &mut lines)?;
        for (device, queue, cpus) in masks {
            let steered = &mut self.devices[device];
            let name = &steered.device.name;
            let before = std::mem::replace(&mut steered.cpus[queue as usize], cpus.clone());
            let [now, before] = [&cpus, &before].map(|cpus| cpus.intersect(&self.online));
            let offline = cpus.without(&now);
            let later = match offline.is_empty() {
                true => String::new(),
                false => format!(", {offline} when online"),
            };
            lines.push(format!(
                "{name} queue {queue}: CPUs {now}{later} (before: {before})"
            ));
        }
        if policy != self.policy {
            lines.push(format!("policy {policy} (before: {})", self.policy));
            self.policy = policy;
        }
        for line in &lines {
            info!("{line}");
        }
        lines.extend(self.apply()?);
        Ok(lines)
    }

    /// The masks that a change asks for: device, queue and CPUs.
    fn masks(&self, change: &Change) -> Result<Vec<(usize, u32, CpuMask)>> {
        let Some(rps_cpus) = &change.rps_cpus else {
            return Ok(Vec::new());
        };
        let rps_cpus: RpsCpus = rps_cpus.parse()?;
        let index = find(&self.devices, change.device.as_deref())?;
        let device = &self.devices[index].device;
        let queues = match change.queue {
            Some(queue) => queue..queue + 1,
            None => 0..device.rx_queues,
        };
        queues
            .map(|queue| Ok((index, queue, cpus_of(device, queue, &rps_cpus)?)))
            .collect()
    }

    fn resize(&mut self, change: &Change, lines: &mut Vec<String>) -> Result<()> {
        let before = self.datapath.config().clone();
        let sizes = (
            change
                .rps_sock_flow_entries
                .unwrap_or(before.rps_sock_flow_entries),
            change.rps_flow_cnt.unwrap_or(before.rps_flow_cnt),
        );
        // As they are rounded: the same tables need not be made again.
        if rounded(sizes.0) == rounded(before.rps_sock_flow_entries)
            && rounded(sizes.1) == rounded(before.rps_flow_cnt)
        {
            return Ok(());
        }
        if let Err(e) = self.datapath.resize(sizes.0, sizes.1, PATIENCE) {
            self.apply()?;
            return Err(e);
        }
        for (name, now, before) in [
            (
                "rps_sock_flow_entries",
                sizes.0,
                before.rps_sock_flow_entries,
            ),
            ("rps_flow_cnt", sizes.1, before.rps_flow_cnt),
        ] {
            if now != before {
                lines.push(format!("{name} {} (before: {before})", rounded(now)));
            }
        }
        Ok(())
    }

    fn accounts(&self) -> Result<Vec<accounting::Device>> {
        let devices = self.devices.iter().map(|steered| {
            let queues = (0..steered.device.rx_queues)
                .map(|queue| {
                    let cpus = steered
                        .cpus
                        .get(queue as usize)
                        .map_or(String::new(), |c| c.intersect(&self.online).to_string());
                    let index = steered.first_queue + queue;
                    Ok(accounting::Queue {
                        balanced: self.balancer.balanced(index),
                        ..accounting::Queue::read(&self.datapath, index, queue, cpus)?
                    })
                })
                .collect::<Result<_>>()?;
            Ok(accounting::Device {
                device: steered.device.name.clone(),
                ifindex: steered.device.ifindex,
                mode: steered.mode.to_string(),
                queues,
            })
        });
        devices.collect()
    }

    fn status(&self) -> Result<Status> {
        let devices = self.accounts()?;
        let mut queues = devices.iter().flat_map(|device| &device.queues);
        // The tables are read only for a reason.
        let query = Query {
            limit: DROPPED_FLOWS,
            most: Most::Dropped,
            ..Query::default()
        };
        let dropped_flows = match queues.any(|queue| queue.dropped() > 0) {
            true => Some(self.reader()?.flows(&query, DROPPED_FLOWS_PATIENCE)?),
            false => None,
        };
        Ok(Status {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            policy: match self.policy {
                policy if policy.follows() && !self.datapath.follows(0)? => {
                    policy.without_following()
                }
                policy => policy,
            }
            .to_string(),
            dry_run: self.datapath.config().dry_run,
            backlog_limit: self.datapath.config().backlog_limit,
            devices,
            dropped_flows,
        })
    }
}

/// The kernel's error number, if it was the kernel that refused.
fn errno(error: &anyhow::Error) -> Option<i32> {
    error.downcast_ref::<std::io::Error>()?.raw_os_error()
}

/// The place of the device with that name, or of the only one there is.
fn find(devices: &[Steered], name: Option<&str>) -> Result<usize> {
    let names: Vec<_> = devices.iter().map(|d| d.device.name.clone()).collect();
    match name {
        Some(name) => names
            .iter()
            .position(|known| known == name)
            .ok_or_else(|| anyhow!("{name} is not steered; steered: {}", names.join(", "))),
        None if devices.len() == 1 => Ok(0),
        None => bail!(
            "say which device the queue belongs to, DEVICE:QUEUE=CPUS; one of {}",
            names.join(", ")
        ),
    }
}

/// The CPUs for one queue, of which one at least is online.
fn cpus_of(device: &Device, queue: u32, wish: &RpsCpus) -> Result<CpuMask> {
    if queue >= device.rx_queues {
        bail!(
            "{} has no receive queue {queue}: {}",
            device.name,
            match device.rx_queues {
                1 => "its only queue is 0".to_owned(),
                n => format!("its queues are 0 to {}", n - 1),
            }
        );
    }
    let topology = Topology::host();
    let mask = match wish {
        RpsCpus::Auto => {
            let interrupt_cpu = device.interrupt_cpu(&topology, queue);
            let auto = topology.auto_mask(interrupt_cpu)?;
            info!("{} queue {queue}: {}", device.name, auto.anchor);
            if auto.cpus.is_empty() {
                bail!(
                    "auto finds no CPU for {} queue {queue}: all that are near are isolated; name \
                     them with --rps-cpus",
                    device.name
                );
            }
            return Ok(auto.cpus);
        }
        RpsCpus::Mask(mask) => mask,
    };
    let online = topology.online()?;
    let usable = mask.intersect(&online);
    if usable.is_empty() {
        bail!(
            "none of the CPUs {mask} is online: choose from {online} (a single number is a mask: CPU 1 \
             is 1-1)"
        );
    }
    let offline = mask.without(&online);
    if !offline.is_empty() {
        warn!(
            "CPUs {offline} are not online: {} queue {queue} does without them until they are",
            device.name
        );
    }
    Ok(mask.clone())
}

/// Generic mode, for want of native, and not in silence.
fn fall_back(device: &Device) -> XdpMode {
    warn!(
        "{}: its driver ({}) has no native XDP; falling back to generic mode, which costs an skb \
         before the decision",
        device.name, device.driver
    );
    XdpMode::Generic
}

/// Refuses a device that can't be steered well; warns of what it merely should know.
fn check(device: &Device, mode: XdpMode) -> Result<()> {
    let (fatal, advice): (Vec<_>, Vec<_>) =
        device.objections(mode).into_iter().partition(|o| o.fatal);
    if !fatal.is_empty() {
        let why: Vec<_> = fatal.iter().map(ToString::to_string).collect();
        bail!(why.join("\n"));
    }
    for objection in advice {
        warn!("{objection}");
    }
    Ok(())
}

/// `--backlog`, or `net.core.netdev_max_backlog`.
fn backlog_limit(configured: Option<u32>) -> Result<u32> {
    if let Some(limit) = configured {
        return Ok(limit);
    }
    // Only the initial network namespace shows it; 1000 is the kernel's own default.
    let limit = std::fs::read_to_string("/proc/sys/net/core/netdev_max_backlog")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(1000);
    if limit > LIMIT_MAX {
        warn!("net.core.netdev_max_backlog is {limit}; a backlog holds {LIMIT_MAX} at most");
    }
    Ok(limit.clamp(1, LIMIT_MAX))
}
