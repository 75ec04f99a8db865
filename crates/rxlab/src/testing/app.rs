// SPDX-License-Identifier: MIT OR Apache-2.0
//! Applications for end-to-end tests.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::lab::frame::UdpFlows;
use crate::lab::netns::{Netns, Thread, bind};
use anyhow::Result;
use nix::unistd::Pid;

/// Reads an application's data once.
pub type Take = Box<dyn FnMut() -> std::io::Result<usize> + Send>;

/// An application thread that can be moved between CPUs.
pub struct App {
    stop: Arc<AtomicBool>,
    pub tid: Pid,
    thread: Option<Thread<()>>,
}

impl App {
    /// `take` must return within some milliseconds, with data or without.
    pub fn start(netns: &Netns, mut take: Take) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let thread = netns.spawn(None, "app", move || {
            while !seen.load(Ordering::Relaxed) {
                let _ = take();
            }
        })?;
        Ok(Self {
            stop,
            tid: thread.tid,
            thread: Some(thread),
        })
    }

    pub fn move_to(&self, cpu: u32) -> Result<()> {
        bind(self.tid, cpu)
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.take() {
            Some(thread) if !std::thread::panicking() => thread.join(),
            _ => {}
        }
    }
}

/// A socket that receives the datagrams of the first flow only.
pub fn connected(netns: &Netns, flows: &UdpFlows) -> Result<UdpSocket> {
    netns.run(|| {
        let socket = UdpSocket::bind(SocketAddr::new(flows.daddr, flows.dport))?;
        socket.connect(SocketAddr::new(flows.saddr, flows.sport))?;
        soon(socket)
    })
}

/// Sets the read timeout that a [`Take`] needs.
pub fn soon(socket: UdpSocket) -> Result<UdpSocket> {
    socket.set_read_timeout(Some(Duration::from_millis(5)))?;
    Ok(socket)
}
