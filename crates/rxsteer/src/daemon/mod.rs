// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer run`: attaches, steers until it is told to stop, returns every flow to INLINE,
//! detaches.

mod absent;
mod accounting;
mod arrivals;
mod auto;
mod bonds;
mod budget;
mod choice;
pub mod chosen;
mod explain;
mod foreign;
pub mod hotplug;
mod kernel_rps;
mod looks;
mod manager;
mod more_queues;
pub mod options;
pub mod panics;
mod patterns;
mod plan;
mod prepare;
mod queue;
mod reader;
mod session;
mod steering;
pub mod takedown;
mod unsteered;
mod watch;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::{self, Scope};

use anyhow::{Result, bail};
use hotplug::Hotplug;
use options::Options;
use plan::plan;
use prepare::Prepared;
use session::Session;
use tracing::{info, warn};

use crate::api::control::Role;
use crate::api::server::Server;
use crate::busy_poll::Service;
use crate::datapath::policy::Policy;
use crate::host::caps::{self, Need};
use crate::metrics::server as metrics;

/// Steers until `stop` becomes readable.
///
/// # Errors
/// With the reason and the remedy, if the host or a device can't be steered. No program stays
/// attached then.
pub fn run(options: &Options, stop: BorrowedFd<'_>) -> Result<()> {
    let missing = caps::missing(Need::Steer);
    if !missing.is_empty() {
        let mut obstacles: Vec<_> = missing.iter().map(ToString::to_string).collect();
        obstacles.extend(plan(options).err().map(|e| format!("{e:#}")));
        bail!(obstacles.join("\n"));
    }
    let server = Server::new(Role::Steer)?;
    let hotplug = Hotplug::listen()?;
    let polling = match &options.busy_poll[..] {
        [] => None,
        rules => Some(Service::new(rules, false)?),
    };
    let metrics = options
        .metrics
        .map(|address| metrics::Server::new(address, server.asker()));
    let _metrics = metrics.transpose()?;
    let prepared = Prepared::new(options)?;
    let mut session = Session::start(options.clone())?;
    manager::ready();
    info!(
        "{} {}; stop with Ctrl-C or SIGTERM",
        match (options.policy, options.dry_run) {
            (Policy::OFF, _) => "watching (policy off)",
            (_, false) => "steering",
            (_, true) => "watching (dry run)",
        },
        options.devices.join(", ")
    );
    if let Some(address) = options.metrics {
        info!("metrics at http://{address}/metrics");
    }

    if polling.is_some() && !options.policy.follows() {
        warn!(
            "policy {} does not know which applications poll: their polls will not find redirected packets",
            options.policy
        );
    }
    let outcome = panics::caught(|| {
        thread::scope(|scope| {
            let polling = polling.map(|service| let_poll(scope, service));
            let _polling = polling.transpose()?;
            session.serve(stop, &server, &hotplug)
        })
    });
    manager::stopping();
    // Also after an error or a panic: later packets must not overtake queued ones.
    let stopped = panics::caught(|| session.end());
    outcome.and(stopped).and(prepared.put_back())
}

/// Lets sockets poll, in a thread, until the returned pipe is closed. The scope ends when the
/// settings of all sockets are restored.
fn let_poll<'scope>(scope: &'scope Scope<'scope, '_>, service: Service) -> Result<OwnedFd> {
    let (wait, stop) = nix::unistd::pipe()?;
    scope.spawn(move || {
        if let Err(e) = service.serve(wait.as_fd()) {
            warn!("busy polling: {e:#}");
        }
    });
    Ok(stop)
}
