// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer run`: attaches, steers until it is told to stop, returns every flow to INLINE,
//! detaches.

mod accounting;
pub mod balance;
pub mod balancer;
mod explain;
pub mod hotplug;
pub mod options;
mod plan;
mod queue;
mod reader;
mod steering;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use anyhow::{Result, bail};
use hotplug::Hotplug;
use options::Options;
use steering::Steering;
use tracing::{info, warn};

use crate::api::control::{self, Role};
use crate::busy_poll::Service;
use crate::datapath::backlogs::Backlogs;
use crate::datapath::policy::Policy;
use crate::host::caps::{self, Need};
use crate::types::backlog_request;

/// Steers until `stop` becomes readable.
///
/// # Errors
/// With the reason and the remedy, if the host or a device can't be steered. No program stays
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
            "policy {} does not know which applications poll: their polls will not find redirected packets",
            options.policy
        );
    }
    let polling = polling.map(let_poll).transpose()?;
    let outcome = steering.serve(stop, &listener, &hotplug, &requests, &maker);
    drop(polling);
    // Also after an error: later packets must not overtake queued ones.
    let stopped = steering.stop();
    outcome.and(stopped)
}

/// Lets sockets poll, in a thread, until the returned value is dropped.
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
    /// Returns when the settings of all sockets are restored.
    fn drop(&mut self) {
        // Closes the pipe: the thread sees this and ends.
        self.stop = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Starts a thread that creates the backlogs requested through the channel, and ends with the
/// channel. Creation may wait for a busy CPU; status requests and stop signals must not.
fn make_backlogs(backlogs: Arc<Backlogs>) -> mpsc::Sender<backlog_request> {
    let (maker, wanted) = mpsc::channel();
    std::thread::spawn(move || {
        for backlog_request { queue, cpu } in wanted {
            if let Err(e) = backlogs.make(queue, cpu) {
                warn!("{e:#}: its flows stay where they are received");
            }
        }
    });
    maker
}
