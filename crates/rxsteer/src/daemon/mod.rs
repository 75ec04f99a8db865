// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer run`: attaches, steers until it is told to stop, brings every flow home, detaches.

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
