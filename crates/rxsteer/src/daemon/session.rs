// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering from start to stop, and new starts in between.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, Scope};

use anyhow::{Context, Result, anyhow, bail};
use nix::fcntl::OFlag;
use tracing::{info, warn};

use super::budget;
use super::hotplug::Hotplug;
use super::options::{Options, QueueCpus};
use super::pin;
use super::plan::{Named, QueueMask};
use super::prepare::Prepared;
use super::services::Services;
use super::steering::{Served, Steering};
use super::told::{Configuration, Told};
use crate::api::control::reply;
use crate::api::server::{Asked, Server};
use crate::datapath::Requests;
use crate::datapath::backlogs::Backlogs;
use crate::datapath::maker::Makers;
use crate::host::device::RxMode;

/// See the module's documentation.
pub(super) struct Session<'a> {
    server: &'a Server,
    /// As they were last read.
    configured: Options,
    /// With what was learnt since then.
    options: Options,
    prepared: Prepared,
    services: Services,
    /// `None` after the end.
    running: Option<Running>,
}

struct Running {
    steering: Steering,
    backlogs: Arc<Backlogs>,
    requests: Requests,
    makers: Makers,
}

impl<'a> Session<'a> {
    /// Starts steering and what belongs to it.
    ///
    /// # Errors
    /// With the reason and the remedy; then nothing has been started.
    pub(super) fn start(configured: Options, server: &'a Server) -> Result<Self> {
        let options = pin::checked(&configured)?;
        let mut session = Self {
            server,
            services: Services::start(&options, &server.asker())?,
            prepared: Prepared::new(&options)?,
            options: options.clone(),
            configured,
            running: None,
        };
        session.steer(options)?;
        session.services.begin();
        Ok(session)
    }

    /// Steers by these options.
    fn steer(&mut self, options: Options) -> Result<()> {
        let steering = Steering::start(&options)?;
        self.running = Some(Running {
            requests: steering.datapath.requests()?,
            makers: Makers::new(steering.datapath.backlogs()),
            backlogs: steering.datapath.backlogs(),
            steering,
        });
        self.options = options;
        Ok(())
    }

    /// Serves until told to stop.
    ///
    /// # Errors
    /// When steering can't go on.
    pub(super) fn serve(&mut self, told: &Told<'_>, hotplug: &Hotplug) -> Result<()> {
        loop {
            let running = running(&mut self.running)?;
            let (requests, makers) = (&running.requests, &mut running.makers);
            let (steering, backlogs) = (&mut running.steering, &running.backlogs);
            let server = self.server;
            let served = thread::scope(|scope| {
                let _budget = keep_budget(scope, backlogs)?;
                steering.serve(told, server, hotplug, requests, makers)
            });
            match served? {
                Served::Stopped => return Ok(()),
                Served::Anew => {
                    let options = as_it_is(&running.steering, &self.options);
                    self.end()?;
                    self.steer(options)?;
                }
                Served::Reload(asked) => self.answer_reload(told.configuration.as_ref(), asked)?,
            }
        }
    }

    /// Reads the configuration again and applies it, for a request or a signal.
    ///
    /// # Errors
    /// When steering has ended.
    fn answer_reload(
        &mut self,
        configuration: Option<&Configuration<'_>>,
        asked: Option<Asked>,
    ) -> Result<()> {
        let outcome = match configuration {
            Some(configuration) => (configuration.read)().and_then(|options| self.reload(options)),
            None => Err(anyhow!(
                "this rxsteer has its devices from the command line, and no file to read again: change \
                 it with `rxsteer set`, or start it with --config FILE"
            )),
        };
        if let Err(e) = &outcome {
            warn!("reload: the options stay as before: {e:#}");
        }
        if let Some(asked) = asked {
            asked.answer(outcome.and_then(|lines| reply(&lines)));
        }
        running(&mut self.running).map(|_| ())
    }

    /// Steers by these options from now on. Returns what has changed, in lines.
    ///
    /// # Errors
    /// When they can't be applied; then steering goes on as before, or has ended if that is not
    /// possible either.
    fn reload(&mut self, options: Options) -> Result<Vec<String>> {
        let steering = &mut running(&mut self.running)?.steering;
        let say = |line: &str| {
            info!("{line}");
            vec![line.to_owned()]
        };
        let lines = if options.need_a_start_after(&self.configured) {
            let before = as_it_is(steering, &self.options);
            if let Err(e) = self.restart(options.clone()) {
                self.restart(before)
                    .with_context(|| format!("{e:#}; and steering as before is not possible"))?;
                return Err(e.context("steering has started anew, and counts from zero"));
            }
            say("steering has started anew, with the new options")
        } else {
            let lines = steering.adopt(&options)?;
            self.options.take_live(&options);
            lines
        };
        self.configured = options;
        Ok(match lines.is_empty() {
            true => say("all settings are as before"),
            false => lines,
        })
    }

    /// Ends steering, and starts it by these options, with what belongs to it.
    fn restart(&mut self, options: Options) -> Result<()> {
        self.end()?;
        let options = pin::checked(&options)?;
        if !self.prepared.suits(&options) {
            std::mem::take(&mut self.prepared).put_back()?;
            self.prepared = Prepared::new(&options)?;
        }
        if !self.services.suit(&options) {
            // The new ones may need what the old ones have.
            self.services = Services::default();
            self.services = Services::start(&options, &self.server.asker())?;
        }
        self.steer(options)?;
        self.services.begin();
        Ok(())
    }

    /// Returns every flow to INLINE and detaches, once. What is pinned is unpinned.
    pub(super) fn end(&mut self) -> Result<()> {
        self.end_by(Steering::stop)
    }

    /// Ends, once, and lets steering go on if it is pinned.
    pub(super) fn leave(&mut self) -> Result<()> {
        if self.options.pin.is_none() {
            return self.end();
        }
        pin::say_it_goes_on(&self.options)?;
        self.end_by(|_steering| Ok(()))
    }

    fn end_by(&mut self, end: impl FnOnce(Steering) -> Result<()>) -> Result<()> {
        let Some(Running {
            steering,
            backlogs,
            makers,
            ..
        }) = self.running.take()
        else {
            return Ok(());
        };
        let stopped = end(steering);
        for cpu in makers.end() {
            backlogs.hurry(cpu);
        }
        stopped
    }

    /// Ends what belongs to steering, after [`Self::end`].
    ///
    /// # Errors
    /// When a setting is not as before.
    pub(super) fn put_back(self) -> Result<()> {
        drop(self.services);
        self.prepared.put_back()
    }
}

fn running(running: &mut Option<Running>) -> Result<&mut Running> {
    match running {
        Some(running) => Ok(running),
        None => bail!("steering has ended"),
    }
}

/// The options by which a new start steers as now, but all devices and queues that are there now.
fn as_it_is(steering: &Steering, options: &Options) -> Options {
    let mut now = Options {
        policy: steering.policy,
        rps_sock_flow_entries: steering.datapath.config().rps_sock_flow_entries,
        rps_flow_cnt: steering.datapath.config().rps_flow_cnt,
        anew: true,
        ..options.clone()
    };
    now.queues
        .retain(|wish| steering.awaits(wish.device.as_deref()));
    for steered in &steering.devices {
        let device = &steered.device;
        if let Named::Name(before) = &steered.named {
            now.rename(before, &device.name);
        }
        if steered.mode == RxMode::Softirq {
            continue;
        }
        let nr_queues = match steering.awaits(Some(&device.name)) {
            true => 0,
            false => device.rx_queues_now().unwrap_or(0).max(device.rx_queues),
        };
        now.least_queues.insert(device.name.clone(), nr_queues);
        for queue in 0..device.rx_queues {
            now.queues.push(QueueCpus {
                device: Some(device.name.clone()),
                queue,
                cpus: steering.masks[(steered.first_queue + queue) as usize].wish(),
            });
        }
    }
    if let Some(first) = steering.datapath.softirq_queue() {
        let masks = &steering.masks[first as usize..];
        now.skb_cpus = masks.iter().map(QueueMask::wish).collect();
    }
    now
}

/// Keeps the budget of real-time backlog threads, in a thread, until the returned pipe is closed.
fn keep_budget<'scope>(
    scope: &'scope Scope<'scope, '_>,
    backlogs: &'scope Backlogs,
) -> Result<Option<OwnedFd>> {
    if !backlogs.in_real_time() {
        return Ok(None);
    }
    let (wait, stop) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    scope.spawn(move || {
        if let Err(e) = budget::keep(backlogs, wait.as_fd()) {
            warn!("backlog threads in the real-time class have no budget: {e:#}");
        }
    });
    Ok(Some(stop))
}
