// SPDX-License-Identifier: MIT OR Apache-2.0
//! What runs beside steering, in threads: busy polling and the metrics.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use nix::fcntl::OFlag;
use tracing::{info, warn};

use super::options::Options;
use crate::api::server::Asker;
use crate::busy_poll::Service;
use crate::busy_poll::rule::Rule;
use crate::metrics::server as metrics;

/// See the module's documentation. They end on drop, when the settings of all sockets are restored.
#[derive(Default)]
pub(super) struct Services {
    rules: Vec<Rule>,
    address: Option<SocketAddr>,
    polling: Option<Polling>,
    _metrics: Option<metrics::Server>,
}

impl Services {
    /// Starts those that the options name. No socket polls before [`Self::begin`].
    ///
    /// # Errors
    /// When another rxsteer lets sockets poll, a rule is invalid, or the address of the metrics can't
    /// be used.
    pub(super) fn start(options: &Options, asker: &Asker) -> Result<Self> {
        let polling = match &options.busy_poll[..] {
            [] => None,
            rules => Some(Polling::new(Service::new(rules, false)?)?),
        };
        let metrics = options
            .metrics
            .map(|address| metrics::Server::new(address, asker.clone()));
        let services = Self {
            rules: options.busy_poll.clone(),
            address: options.metrics,
            polling,
            _metrics: metrics.transpose()?,
        };
        if let Some(address) = services.address {
            info!("metrics at http://{address}/metrics");
        }
        if !services.rules.is_empty() && !options.policy.follows() {
            warn!(
                "policy {} does not know which applications poll: their polls will not find redirected packets",
                options.policy
            );
        }
        Ok(services)
    }

    /// Devices are steered: sockets are set from now on.
    pub(super) fn begin(&mut self) {
        let begin = self
            .polling
            .as_mut()
            .and_then(|polling| polling.begin.take());
        if let Some(begin) = begin {
            // A thread that has ended has said why.
            let _ = begin.send(());
        }
    }

    /// Whether other options have the same services.
    pub(super) fn suit(&self, options: &Options) -> bool {
        (&self.rules, self.address) == (&options.busy_poll, options.metrics)
    }
}

/// A thread that lets sockets poll, from [`Services::begin`] until it is dropped.
struct Polling {
    begin: Option<Sender<()>>,
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Polling {
    fn new(service: Service) -> Result<Self> {
        let (wait, stop) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let (begin, begun) = mpsc::channel();
        let serve = move || {
            if begun.recv().is_err() {
                return;
            }
            if let Err(e) = service.serve(wait.as_fd()) {
                warn!("busy polling: {e:#}");
            }
        };
        let thread = thread::Builder::new().name("polling".to_owned());
        Ok(Self {
            thread: Some(thread.spawn(serve).context("a thread for busy polling")?),
            begin: Some(begin),
            stop: Some(stop),
        })
    }
}

impl Drop for Polling {
    fn drop(&mut self) {
        drop((self.begin.take(), self.stop.take()));
        if let Some(thread) = self.thread.take() {
            // Its panic has been reported, and ends this process.
            let _ = thread.join();
        }
    }
}
