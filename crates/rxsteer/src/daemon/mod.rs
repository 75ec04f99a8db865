// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer run`: attaches, steers until it is told to stop, returns every flow to INLINE,
//! detaches.

mod absent;
mod accounting;
mod arrivals;
mod auto;
mod bonds;
mod budget;
mod change;
pub mod contradiction;
mod explain;
mod following;
mod foreign;
pub mod hotplug;
mod kernel_rps;
mod leaving;
mod looks;
mod manager;
pub mod mistakes;
mod more_queues;
pub mod options;
pub mod panics;
mod patterns;
pub mod pin;
mod plan;
mod prepare;
mod queue;
mod reader;
mod services;
mod session;
mod steering;
pub mod takedown;
pub mod told;
mod unsteered;
mod watch;

use anyhow::{Result, bail};
use hotplug::Hotplug;
use options::Options;
use plan::plan;
use session::Session;
use told::Told;
use tracing::info;

use crate::api::control::Role;
use crate::api::server::Server;
use crate::datapath::policy::Policy;
use crate::host::caps;
use crate::host::claim::Claim;
use crate::host::progress;

/// Steers until told to stop.
///
/// # Errors
/// With the reason and the remedy, if the host or a device can't be steered. No program stays
/// attached then.
pub fn run(options: &Options, told: &Told<'_>) -> Result<()> {
    contradiction::none_in(options)?;
    progress::tell(manager::alive);
    let missing = caps::missing();
    if !missing.is_empty() {
        let mut obstacles: Vec<_> = missing.iter().map(ToString::to_string).collect();
        obstacles.extend(plan(options).err().map(|e| format!("{e:#}")));
        bail!(obstacles.join("\n"));
    }
    let server = Server::new(Role::Steer)?;
    let _claim = Claim::new()?;
    let hotplug = Hotplug::listen()?;
    let mut session = Session::start(options.clone(), &server)?;
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
    let outcome = panics::caught(|| session.serve(told, &hotplug));
    manager::stopping();
    // Also after an error or a panic: later packets must not overtake queued ones.
    let stopped = panics::caught(|| match outcome.is_ok() {
        true => session.leave(),
        false => session.end(),
    });
    outcome.and(stopped).and(session.put_back())
}
