// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering of devices, from attach to detach.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use anyhow::{Result, anyhow, bail, ensure};
use tracing::{debug, info, warn};

use super::auto::AutoMasks;
use super::following;
use super::hotplug::Hotplug;
use super::leaving::Leaving;
use super::looks::Looks;
use super::manager;
use super::options::{Options, Tunnel};
use super::panics;
use super::patterns::Patterns;
use super::pin;
use super::plan::{Named, Plan, QueueMask, Steered, backlog_limit, find, inline_ports, plan};
use super::reader::Reader;
use super::takedown::Takedown;
use super::told::Told;
use super::unsteered::Unsteered;
use super::watch::Watch;
use crate::api::control::{Reply, Request, reply};
use crate::api::flows::{Flows, Query};
use crate::api::server::{Asked, Server};
use crate::datapath::bounds::WorstCase;
use crate::datapath::maker::Makers;
use crate::datapath::pins::Pins;
use crate::datapath::policy::{Base, Policy};
use crate::datapath::{Backlogged, Config, Datapath, Drain, Requests, draw_secret};
use crate::host::caps;
use crate::host::cpumask::CpuMask;
use crate::host::progress;
use crate::host::topology::Topology;
use crate::host::wait::readable;
use crate::types::{backlog_request, backlog_request_of};

/// Timeout for the return of all flows to INLINE. At a stop, the programs are then detached anyway.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Why [`Steering::serve`] has returned.
pub(super) enum Served {
    /// Steering is to stop.
    Stopped,
    /// A device has more queues, is there again, or has become the port of a bond: only a new start
    /// steers it so.
    Anew,
    /// The configuration is to be read again, for this request or for a signal.
    Reload(Option<Asked>),
}

/// See the module's documentation.
pub(super) struct Steering {
    pub(super) datapath: Datapath,
    pub(super) devices: Vec<Steered>,
    /// By queue, over all devices.
    pub(super) masks: Vec<QueueMask>,
    pub(super) policy: Policy,
    pub(super) online: CpuMask,
    pub(super) patterns: Patterns,
    auto_masks: AutoMasks,
    takedown: Takedown,
    pub(super) unsteered: Unsteered,
    /// CPUs that went offline or came online, until their backlogs are drained.
    leaving: Vec<Leaving>,
    /// CPUs that were down at the last look, but for these.
    down: CpuMask,
    watch: Watch,
    /// Applications that can't be followed on this host, in words.
    not_followed: Vec<String>,
}

impl Steering {
    pub(super) fn start(options: &Options) -> Result<Self> {
        if options.follow_nat {
            ensure!(
                caps::sockets_keep_hash(),
                "--follow-nat needs a kernel whose sockets keep the hash of their packets: boot one \
                 with CONFIG_RPS=y"
            );
        }
        let backlog_limit = backlog_limit(options.backlog)?;
        let found = pin::found(options)?;
        let Plan {
            devices,
            masks,
            refused,
        } = plan(&Options {
            own_programs: found.iter().flat_map(Pins::programs).collect(),
            ..options.clone()
        })?;
        let patterns = Patterns::of(options)?;
        let config = Config {
            backlog_limit,
            backlog_sched: options.backlog_sched,
            most_backlogs: options.bounds.backlogs,
            rps_sock_flow_entries: options.rps_sock_flow_entries,
            rps_flow_cnt: options.rps_flow_cnt,
            unconnected: !options.ignore_unconnected,
            follow_nat: options.follow_nat,
            more_devices: !patterns.is_empty(),
            dry_run: options.dry_run,
            tunnels: Tunnel::bits_of(&options.tunnels),
            inline_ports: inline_ports(options)?,
            hash: options.hash,
            flow_limit: options.flow_limit,
            unguarded: options.unguarded,
            secret: draw_secret()?,
        };
        if options.follow_nat || options.policy.follows() {
            following::can_follow(config.hash, config.follow_nat)?;
        }
        let queues: Vec<_> = devices.iter().map(Steered::config).collect();
        let (datapath, before) = pin::load(&config, &queues, found)?;
        let worst = WorstCase::of(&config, datapath.nr_queues(), datapath.nr_cpus());
        match options.dry_run {
            true => info!("steering would have {worst}"),
            false => debug!("{worst}"),
        }
        let mut unsteered = Unsteered::new(options, devices.len());
        for (name, why) in &refused {
            unsteered.absent.refuse(name, why);
        }
        let mut steering = Self {
            unsteered,
            datapath,
            devices,
            masks,
            patterns,
            policy: options.policy,
            online: Topology::host().online()?,
            auto_masks: AutoMasks::default(),
            takedown: Takedown::new(options.bounds.clone()),
            leaving: Vec::new(),
            down: CpuMask::default(),
            watch: Watch::new(),
            not_followed: Vec::new(),
        };
        steering.apply()?;
        before.end(&mut steering.datapath, options, PATIENCE)?;
        let displaced = steering.datapath.displaced_cpus()?;
        steering.cpus_changed(Some(displaced.iter().collect()))?;
        for device in 0..steering.devices.len() {
            progress::made();
            if let Err(e) = steering.attach(device) {
                if options.anew {
                    steering.refused(device, &e);
                    continue;
                }
                // The devices before this one are steered already.
                steering.datapath.return_inline(PATIENCE)?;
                steering.datapath.detach()?;
                return Err(e);
            }
        }
        Ok(steering)
    }

    /// Serves requests and events until told to stop, or a new start or the configuration is needed.
    pub(super) fn serve(
        &mut self,
        told: &Told<'_>,
        server: &Server,
        hotplug: &Hotplug,
        requests: &Requests,
        makers: &mut Makers,
    ) -> Result<Served> {
        let mut looks = Looks::default();
        let mut devices_changed = false;
        loop {
            // SAFETY: the ring buffer outlives the loop.
            let ring = unsafe { BorrowedFd::borrow_raw(requests.fd()) };
            let mut fds = vec![told.stop, ring, server.as_fd(), hotplug.as_fd()];
            fds.extend(told.configuration.as_ref().map(AsFd::as_fd));
            let timeout = match self.leaving.is_empty() {
                _ if devices_changed => Duration::ZERO,
                true => looks.due(),
                false => Drain::TICK,
            };
            let ready = readable(&fds, Some(timeout.min(self.watch.due(&self.datapath))))?;
            let of_netns = |request: &backlog_request| {
                request.queue == backlog_request_of::BACKLOG_REQUEST_NETNS.0
            };
            let (questions, backlogs): (Vec<_>, Vec<_>) =
                requests.take()?.into_iter().partition(of_netns);
            for request in backlogs {
                makers.make(request)?;
            }
            // One look answers several.
            if !questions.is_empty() {
                self.look_at_host();
            }
            self.watch.look(&self.datapath, &self.devices)?;
            if ready[3] {
                let events = hotplug.take()?;
                self.cpus_changed(events.cpus)?;
                devices_changed |= events.devices;
            }
            if devices_changed {
                devices_changed = self.devices_changed()?;
                if !devices_changed {
                    looks.soon();
                }
            }
            self.remove_drained()?;
            if looks.is_due() {
                for request in self.datapath.misdirected() {
                    makers.make(request)?;
                }
                manager::alive();
                makers.look();
                self.look_at_host();
                self.datapath.settle_mixings()?;
                self.look_for_down()?;
                self.takedown.look(&self.datapath)?;
                self.look_for_gone()?;
                self.attach_refused();
                if self.unsteered.look(&self.datapath, &mut self.devices)? {
                    return Ok(Served::Anew);
                }
                if self.auto_masks.follow(&mut self.devices, &mut self.masks)? {
                    self.apply()?;
                }
            }
            if ready[2]
                && let Some(asked) = server.take()
            {
                if let Request::Reload = asked.request {
                    return Ok(Served::Reload(Some(asked)));
                }
                let answer = self.answer(&asked.request);
                asked.answer(answer);
            }
            if ready[0] {
                return Ok(Served::Stopped);
            }
            if let Some(configuration) = &told.configuration
                && ready[4]
            {
                configuration.hangup.read_signal()?;
                return Ok(Served::Reload(None));
            }
        }
    }

    fn look_at_host(&mut self) {
        if let Err(e) = self.datapath.look_at_host() {
            warn!("{e:#}");
        }
    }

    /// Fills the tables by policy and masks. Returns the applications that can't be followed, in
    /// words.
    pub(super) fn apply(&mut self) -> Result<Vec<String>> {
        for (queue, mask) in (0..).zip(&self.masks) {
            let cpus = match self.policy.base {
                Base::Off => CpuMask::default(),
                _ => mask.cpus.intersect(&self.online),
            };
            self.datapath.set_mask(queue, &cpus);
        }
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

    /// Handles CPUs that went offline or came online; `None`: events were lost, so CPUs are
    /// compared with the last known state. Backlogs are closed at both events, since one may have
    /// been created in between, until they are drained ([`Self::remove_drained`]).
    fn cpus_changed(&mut self, changed: Option<Vec<u32>>) -> Result<()> {
        if changed.as_ref().is_some_and(Vec::is_empty) {
            return Ok(());
        }
        let online = Topology::host().online()?;
        let cpus: CpuMask = match changed {
            Some(cpus) => cpus.into_iter().collect(),
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
            info!(cpu, "CPU {cpu} is {state}");
            let before = self.leaving.iter().position(|leaving| leaving.cpu == cpu);
            let before = before.map(|index| self.leaving.remove(index));
            let leaving = Leaving::close(&self.datapath, cpu, before.as_ref());
            self.leaving.push(leaving);
        }
        self.online = online;
        self.datapath.cpus_changed()?;
        self.apply()?;
        Ok(())
    }

    /// Looks for CPUs that the kernel has taken down, or tried to, without an event that came here.
    /// One that was not down at the last look is about to be offline.
    fn look_for_down(&mut self) -> Result<()> {
        let known = self.leaving.iter().map(|leaving| leaving.cpu).collect();
        let down = self.datapath.cpus_down().without(&known);
        let before = std::mem::replace(&mut self.down, down);
        self.cpus_changed(Some(self.down.intersect(&before).iter().collect()))
    }

    /// Removes drained backlogs of CPUs that went offline or came online ([`Leaving::look`]).
    fn remove_drained(&mut self) -> Result<()> {
        for mut leaving in std::mem::take(&mut self.leaving) {
            if !leaving.look(&self.datapath)? {
                self.leaving.push(leaving);
            }
        }
        Ok(())
    }

    /// Whether no device of this name is steered, and one is waited for.
    pub(super) fn awaits(&self, name: Option<&str>) -> bool {
        name.is_some_and(|name| self.unsteered.absent.why(name).is_some())
    }

    /// Looks for devices that have gone. Their programs are detached: that of a device which is in
    /// another network namespace now would go on.
    pub(super) fn look_for_gone(&mut self) -> Result<()> {
        for index in self.unsteered.absent.gone(&self.devices) {
            self.datapath.give_up(index)?;
        }
        Ok(())
    }

    /// The device with this index is there, and has no program.
    fn refused(&mut self, index: usize, why: &anyhow::Error) {
        let name = &self.devices[index].device.name;
        self.unsteered.absent.refuse(name, &format!("{why:#}"));
    }

    /// Tries again to attach to devices that the kernel has refused.
    fn attach_refused(&mut self) {
        for index in 0..self.devices.len() {
            let name = self.devices[index].device.name.clone();
            if !self.unsteered.absent.is_refused(&name) {
                continue;
            }
            match self.attach(index) {
                Ok(()) => self.unsteered.absent.attached(&name),
                Err(e) => self.refused(index, &e),
            }
        }
    }

    pub(super) fn attach(&mut self, index: usize) -> Result<()> {
        let steered = &self.devices[index];
        let name = &steered.device.name;
        if self.datapath.is_attached(index) {
            self.say_masks(index);
            return Ok(());
        }
        let pinned = self.datapath.is_pinned();
        self.datapath.attach(index).map_err(|e| {
            if steered.device.is_gone().unwrap_or(false) {
                return anyhow!("{name} is gone: it was there when this start began");
            }
            let Some(errno) = errno(&e) else {
                return e;
            };
            let objection = steered.device.attach_objection(steered.mode, errno, None);
            anyhow!("{}", objection.if_pinned(pinned))
        })?;
        self.say_masks(index);
        Ok(())
    }

    fn say_masks(&self, index: usize) {
        let steered = &self.devices[index];
        if steered.named == Named::Pattern {
            return;
        }
        for queue in 0..steered.device.rx_queues {
            let mask = &self.masks[(steered.first_queue + queue) as usize];
            info!(
                device = %steered.device.name,
                queue,
                "{}: CPUs {}",
                steered.queue_name(queue),
                mask.cpus
            );
        }
    }

    pub(super) fn stop(mut self) -> Result<()> {
        self.look_for_gone()?;
        if !self.datapath.return_inline(PATIENCE)? {
            warn!("some packets were still queued: what follows may overtake them");
        }
        self.datapath.detach()?;
        for device in self.accounts() {
            for q in device.queues {
                info!(
                    device = %device.device,
                    queue = q.queue,
                    "{} queue {}: received {} = inline {} + redirected {} + dropped {} + shed {} + \
                     limited {} + no flow {}; of the redirected, delivered {}, lost {}, vanished {}, \
                     queued {}",
                    device.device,
                    q.queue,
                    q.received,
                    q.inline,
                    q.sums.redirected,
                    q.sums.dropped,
                    q.sums.shed,
                    q.sums.limited,
                    q.no_flow_truncated + q.no_flow_unknown,
                    q.sums.delivered,
                    q.sums.lost,
                    q.sums.vanished,
                    q.sums.queued
                );
            }
        }
        Ok(())
    }

    fn answer(&mut self, request: &Request) -> Result<Reply> {
        match request {
            Request::Status => reply(&self.status()?),
            Request::Counters => reply(&self.counters()),
            Request::BusyPoll => bail!("this rxsteer lets no sockets poll"),
            Request::Reload => bail!("a reload is not answered here"),
            Request::Set(change) => reply(&self.set(change)?),
            Request::Flows(query) => {
                panics::provoke();
                reply(&self.flows(query)?)
            }
            Request::Explain(question) => {
                if self.datapath.config().dry_run {
                    bail!(
                        "a dry run moves no flow: there is nothing to explain (`rxsteer flows` lists them)"
                    );
                }
                reply(&self.reader().explain(question)?)
            }
        }
    }

    pub(super) fn reader(&self) -> Reader<'_> {
        Reader::new(
            &self.datapath,
            &self.devices,
            self.policy,
            &self.not_followed,
        )
    }

    fn flows(&mut self, query: &Query) -> Result<Flows> {
        if query.device.is_some() {
            find(&self.devices, query.device.as_deref())?;
        }
        self.reader().flows(query)
    }
}

/// The kernel's error number, if the error is the kernel's.
fn errno(error: &anyhow::Error) -> Option<i32> {
    error.downcast_ref::<std::io::Error>()?.raw_os_error()
}
