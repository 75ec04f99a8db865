// SPDX-License-Identifier: MIT OR Apache-2.0
//! Busy polling for applications that know nothing of it: a call that would wait for a packet polls
//! the device's receive queue itself first, for a bounded time. The kernel does it for every socket
//! that has SO_BUSY_POLL, and for epoll instances with busy-poll parameters (Linux 6.9); here they
//! are set on sockets of other processes, as long as that is wanted.

mod poller;
pub(crate) mod process;
pub mod rule;
pub mod stats;
pub mod undo;

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use poller::Poller;
use rule::Rule;
use tracing::info;

use crate::api::control::{self, Reply, Request, Role};
use crate::host::setting::Setting;

/// Lets sockets poll while it serves.
pub struct Service {
    listener: UnixListener,
    poller: Poller,
    _host_wide: Option<Setting>,
}

impl Service {
    /// Nothing is set yet, but the host. `host_wide`: also poll(), select() and, before Linux 6.9,
    /// epoll_wait() poll, which only a setting of the host lets them.
    ///
    /// # Errors
    /// When a rule means nothing, or a process that it names is not there; when another one does this
    /// here already.
    pub fn new(rules: &[Rule], host_wide: bool) -> Result<Self> {
        Ok(Self {
            listener: control::listen(Role::Poll)?,
            poller: Poller::new(rules)?,
            _host_wide: host_wide.then(|| poll_host_wide(rules)).transpose()?,
        })
    }

    /// Looks after sockets until `stop` becomes readable, or all processes that rules name have ended.
    ///
    /// # Errors
    /// When one of these may not be touched; when the kernel does not know busy polling. All is put
    /// back then.
    pub fn serve(self, stop: BorrowedFd<'_>) -> Result<()> {
        let Self {
            listener,
            mut poller,
            _host_wide,
        } = self;
        loop {
            let wait = poller.tick()?;
            if poller.has_ended() {
                info!("all processes that were named have ended");
                break;
            }
            let mut fds = [
                PollFd::new(stop, PollFlags::POLLIN),
                PollFd::new(listener.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut fds, PollTimeout::try_from(wait)?) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(e) => return Err(e).context("waiting"),
            }
            let [stopped, asked] = fds.map(|fd| fd.any() == Some(true));
            if asked {
                control::serve(&listener, |request| match request {
                    Request::BusyPoll => match poller.status() {
                        Ok(status) => Reply::BusyPoll(status),
                        Err(e) => Reply::Failed(format!("{e:#}")),
                    },
                    _ => Reply::Failed("this rxsteer only lets sockets poll".to_owned()),
                });
            }
            if stopped {
                break;
            }
        }
        poller.stop()?;
        info!("sockets are as before");
        Ok(())
    }
}

/// Lets poll(), select() and all epoll instances of the host poll, for as long as the longest rule.
fn poll_host_wide(rules: &[Rule]) -> Result<Setting> {
    let usecs = rules.iter().map(|rule| rule.usecs).max().unwrap_or(0);
    let setting = Setting::keep("/proc/sys/net/core/busy_poll")?;
    setting.set(&usecs.to_string())?;
    Ok(setting)
}
