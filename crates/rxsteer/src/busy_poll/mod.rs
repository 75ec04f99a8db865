// SPDX-License-Identifier: MIT OR Apache-2.0
//! Busy polling for unmodified applications: a call that waits for a packet first polls the
//! device's receive queue for a bounded time. The kernel does this for sockets with SO_BUSY_POLL,
//! and for epoll instances with busy-poll parameters (Linux 6.9). This module sets both in other
//! processes.

mod poller;
pub(crate) mod process;
pub mod rule;
pub mod stats;
pub mod undo;

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Result, anyhow};
use poller::Poller;
use rule::Rule;
use tracing::info;

use crate::api::control::{Request, Role, reply};
use crate::api::server::Server;
use crate::host::setting::Setting;
use crate::host::wait::readable;

/// Sets sockets of other processes while it serves, and answers status requests.
pub struct Service {
    server: Server,
    poller: Poller,
    _host_wide: Option<Setting>,
}

impl Service {
    /// `host_wide` also lets poll() and select(), and epoll_wait() before Linux 6.9, poll by a
    /// setting of the host. That setting is made here; sockets are set by [`Self::serve`].
    ///
    /// # Errors
    /// When a rule is invalid, a process that it names doesn't exist, or another rxsteer lets
    /// sockets poll in this network namespace.
    pub fn new(rules: &[Rule], host_wide: bool) -> Result<Self> {
        Ok(Self {
            server: Server::new(Role::Poll)?,
            poller: Poller::new(rules)?,
            _host_wide: host_wide.then(|| poll_host_wide(rules)).transpose()?,
        })
    }

    /// Sets new sockets and answers requests until `stop` becomes readable, or all processes named
    /// by rules have ended. Then restores everything.
    ///
    /// # Errors
    /// When a rule's process may not be traced, or the kernel has no busy polling; restores then.
    pub fn serve(self, stop: BorrowedFd<'_>) -> Result<()> {
        let Self {
            server,
            mut poller,
            _host_wide,
        } = self;
        for rule in poller.rules().iter().filter(|rule| rule.pid.is_none()) {
            let usecs = rule.usecs;
            info!("looking for sockets of {rule}: they poll for up to {usecs} us");
        }
        loop {
            let wait = poller.tick()?;
            if poller.has_ended() {
                info!("all processes that were named have ended");
                break;
            }
            let ready = readable(&[stop, server.as_fd()], Some(wait))?;
            if ready[1]
                && let Some(asked) = server.take()
            {
                let answer = match asked.request {
                    Request::BusyPoll => poller.status().and_then(|status| reply(&status)),
                    _ => Err(anyhow!("this rxsteer only lets sockets poll")),
                };
                asked.answer(answer);
            }
            if ready[0] {
                break;
            }
        }
        poller.stop()?;
        info!("sockets are as before");
        Ok(())
    }
}

/// Lets poll(), select() and epoll of the whole host poll, for the longest time of a rule.
fn poll_host_wide(rules: &[Rule]) -> Result<Setting> {
    let usecs = rules.iter().map(|rule| rule.usecs).max().unwrap_or(0);
    let setting = Setting::keep_recorded(
        vec!["/proc/sys/net/core/busy_poll".to_owned()],
        "`rxsteer poll --host-wide`",
    )?;
    setting.set(&usecs.to_string())?;
    Ok(setting)
}
