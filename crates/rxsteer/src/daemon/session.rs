// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering from start to stop, and new starts in between.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, Scope};

use anyhow::{Result, bail};
use tracing::{info, warn};

use super::budget;
use super::choice;
use super::hotplug::Hotplug;
use super::options::{Mode, Options, QueueCpus};
use super::plan::{Named, QueueMask, Refused, Steered};
use super::steering::{Served, Steering};
use crate::api::server::Server;
use crate::datapath::Requests;
use crate::datapath::backlogs::Backlogs;
use crate::datapath::maker::Makers;
use crate::host::device::RxMode;

/// See the module's documentation.
pub(super) struct Session {
    options: Options,
    /// `None` after the end.
    running: Option<Running>,
}

struct Running {
    steering: Steering,
    backlogs: Arc<Backlogs>,
    requests: Requests,
    makers: Makers,
}

impl Session {
    /// Starts. Under `--mode auto`, devices whose drivers refuse the program are steered in skb mode.
    pub(super) fn start(mut options: Options) -> Result<Self> {
        let steering = loop {
            let error = match Steering::start(&options) {
                Ok(steering) => break steering,
                Err(e) if options.mode == Mode::Auto => e,
                Err(e) => return Err(e),
            };
            let Refused { device, objection } = error.downcast()?;
            info!(
                device = %device,
                "{device} is steered in skb mode instead: {}",
                objection.reason
            );
            options.refused.insert(device);
        };
        let running = Running {
            requests: steering.datapath.requests()?,
            makers: Makers::new(steering.datapath.backlogs()),
            backlogs: steering.datapath.backlogs(),
            steering,
        };
        Ok(Self {
            options,
            running: Some(running),
        })
    }

    /// Serves until `stop` becomes readable.
    pub(super) fn serve(
        &mut self,
        stop: BorrowedFd<'_>,
        server: &Server,
        hotplug: &Hotplug,
    ) -> Result<()> {
        loop {
            let Some(running) = &mut self.running else {
                bail!("steering has ended");
            };
            let (requests, makers) = (&running.requests, &mut running.makers);
            let (steering, backlogs) = (&mut running.steering, &running.backlogs);
            let served = thread::scope(|scope| {
                let _budget = keep_budget(scope, backlogs)?;
                steering.serve(stop, server, hotplug, requests, makers)
            });
            match served? {
                Served::Stopped => return Ok(()),
                Served::Anew => {
                    let options = as_it_is(&running.steering, &self.options);
                    self.end()?;
                    *self = Self::start(options)?;
                }
            }
        }
    }

    /// Returns every flow to INLINE and detaches, once.
    pub(super) fn end(&mut self) -> Result<()> {
        let Some(Running {
            steering,
            backlogs,
            makers,
            ..
        }) = self.running.take()
        else {
            return Ok(());
        };
        let stopped = steering.stop();
        for cpu in makers.end() {
            backlogs.hurry(cpu);
        }
        stopped
    }
}

/// The options by which a new start steers as now, but all devices and queues that are there now.
fn as_it_is(steering: &Steering, options: &Options) -> Options {
    let mut now = Options {
        policy: steering.policy,
        rps_sock_flow_entries: steering.datapath.config().rps_sock_flow_entries,
        rps_flow_cnt: steering.datapath.config().rps_flow_cnt,
        anew: true,
        chosen: steering.choice.chosen.clone(),
        ..options.clone()
    };
    now.queues
        .retain(|wish| steering.awaits(wish.device.as_deref()));
    for steered in &steering.devices {
        let device = &steered.device;
        if let Named::Name(before) = &steered.named {
            now.rename(before, &device.name);
        }
        if choice::changes(steered, &now.chosen) {
            change_mode(&mut now, steering, steered);
            continue;
        }
        if steered.mode == RxMode::Skb {
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
    if let Some(first) = steering.datapath.skb_queue() {
        let masks = &steering.masks[first as usize..];
        now.skb_cpus = masks.iter().map(QueueMask::wish).collect();
    }
    now
}

/// The masks of a device whose mode changes: those of its present queues, which are alike.
fn change_mode(now: &mut Options, steering: &Steering, steered: &Steered) {
    let Some(cpus) = choice::wish_of(steered, &steering.masks) else {
        return;
    };
    if steered.mode != RxMode::Skb {
        // If devices are in skb mode already, their masks stand.
        let nr_cpus = steering.datapath.nr_cpus() as usize;
        now.skb_cpus = vec![cpus; nr_cpus];
        return;
    }
    let device = &steered.device;
    for queue in 0..device.rx_queues_now().unwrap_or(0) {
        now.queues.push(QueueCpus {
            device: Some(device.name.clone()),
            queue,
            cpus: cpus.clone(),
        });
    }
}

/// Keeps the budget of real-time backlog threads, in a thread, until the returned pipe is closed.
fn keep_budget<'scope>(
    scope: &'scope Scope<'scope, '_>,
    backlogs: &'scope Backlogs,
) -> Result<Option<OwnedFd>> {
    if !backlogs.in_real_time() {
        return Ok(None);
    }
    let (wait, stop) = nix::unistd::pipe()?;
    scope.spawn(move || {
        if let Err(e) = budget::keep(backlogs, wait.as_fd()) {
            warn!("backlog threads in the real-time class have no budget: {e:#}");
        }
    });
    Ok(Some(stop))
}
