// SPDX-License-Identifier: MIT OR Apache-2.0
//! Servers that others have written, and the clients that their users measure them with: one file each.

mod dnsperf;
mod nginx;
mod nsd;
pub mod said;
mod wrk;

use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use rxsteer::host::cpumask::CpuMask;
use tempfile::TempDir;

use self::said::Said;
use super::experiment::{Unfit, fit};
use crate::lab::netns::Netns;
use crate::lab::tool::{Running, Tool};

/// Limit on the start of a server. An emulated machine takes seconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A server, and how its clients ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// nsd, asked by dnsperf in datagrams.
    DnsUdp,
    /// nsd, asked by dnsperf over connections that stay.
    DnsTcp,
    /// nginx, asked by wrk over connections that stay.
    Http,
    /// nginx, asked by wrk over a connection for each request.
    HttpOnce,
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DnsUdp => "nsd over UDP",
            Self::DnsTcp => "nsd over TCP",
            Self::Http => "nginx",
            Self::HttpOnce => "nginx, a connection for each request",
        })
    }
}

impl Service {
    fn programs(self) -> [Tool; 2] {
        match self {
            Self::DnsUdp | Self::DnsTcp => [nsd::TOOL, dnsperf::TOOL],
            Self::Http | Self::HttpOnce => [nginx::TOOL, wrk::TOOL],
        }
    }

    fn port(self) -> u16 {
        match self {
            Self::DnsUdp | Self::DnsTcp => 53,
            Self::Http | Self::HttpOnce => 80,
        }
    }

    /// Whether its programs are installed.
    ///
    /// # Errors
    /// [`Unfit`] where one is missing.
    pub fn find(self) -> Result<()> {
        let missing = |tool: Tool| tool.find().map_err(|e| Unfit(format!("{e:#}")));
        Ok(self.programs().into_iter().try_for_each(missing)?)
    }

    /// Starts the server with a number of workers; returns once it accepts connections.
    ///
    /// # Errors
    /// When it fails.
    pub fn serve(
        self,
        netns: &Netns,
        cpus: &CpuMask,
        to: SocketAddr,
        workers: u32,
    ) -> Result<Server> {
        let to = SocketAddr::new(to.ip(), self.port());
        let folder = tempfile::tempdir()?;
        let running = match self {
            Self::DnsUdp | Self::DnsTcp => nsd::start(netns, cpus, folder.path(), to, workers)?,
            Self::Http | Self::HttpOnce => nginx::start(netns, cpus, folder.path(), to, workers)?,
        };
        let deadline = Instant::now() + TIMEOUT;
        while netns.run(|| Ok(TcpStream::connect(to)?)).is_err() {
            if !running.runs() {
                running.stop(Signal::SIGTERM)?;
                bail!("{self} ended by itself");
            }
            if Instant::now() > deadline {
                bail!("{self} does not answer after {TIMEOUT:?}");
            }
            sleep(Duration::from_millis(10));
        }
        Ok(Server {
            service: self,
            address: to,
            _running: running,
            _folder: folder,
        })
    }
}

/// A server that answers until it is dropped.
pub struct Server {
    service: Service,
    address: SocketAddr,
    // Before the folder, which it uses.
    _running: Running,
    _folder: TempDir,
}

impl Server {
    /// Starts a client of it, with a thread for each of the CPUs. `pace`: the requests of a second;
    /// without, each answer is followed by the next request.
    ///
    /// # Errors
    /// When it fails.
    pub fn ask(&self, netns: &Netns, cpus: &CpuMask, pace: Option<f64>) -> Result<Client> {
        let folder = tempfile::tempdir()?;
        let (to, service) = (self.address, self.service);
        let running = match service {
            Service::DnsUdp | Service::DnsTcp => {
                let tcp = service == Service::DnsTcp;
                dnsperf::start(netns, cpus, folder.path(), to, tcp, pace)?
            }
            Service::Http | Service::HttpOnce => {
                let once = service == Service::HttpOnce;
                wrk::start(netns, cpus, folder.path(), to, once, pace)?
            }
        };
        Ok(Client {
            service,
            running,
            _folder: folder,
        })
    }
}

/// A client that asks until it is stopped.
pub struct Client {
    service: Service,
    running: Running,
    _folder: TempDir,
}

impl Client {
    /// Stops it.
    ///
    /// # Errors
    /// When it failed; [`Unfit`] when it ended before, or had no answer.
    pub fn stop(self) -> Result<Said> {
        let ended = !self.running.runs();
        let printed = self.running.stop(Signal::SIGINT)?;
        fit!(
            !ended,
            "the client of {} ended by itself: {printed:.300}",
            self.service
        );
        let said = match self.service {
            Service::DnsUdp | Service::DnsTcp => dnsperf::said(&printed),
            Service::Http | Service::HttpOnce => wrk::said(&printed),
        };
        let said = said.with_context(|| format!("a client printed: {printed:.500}"))?;
        fit!(said.answers > 0, "no request was answered");
        Ok(said)
    }
}
