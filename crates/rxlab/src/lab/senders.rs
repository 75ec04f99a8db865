// SPDX-License-Identifier: MIT OR Apache-2.0
//! Applications that send over the loopback device, and change their CPU meanwhile.
//!
//! A packet of the loopback device waits in the softnet backlog of its sender's CPU, behind packets that
//! other CPUs have sent there. The next ones of a sender that moves could overtake it before any
//! program sees it. A sender therefore moves when all of its packets have been read.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::unistd::Pid;

use super::frame::UdpFlows;
use super::generator::Window;
use super::link::End;
use super::netns::{Netns, Thread, bind};
use super::receiver::Counters;
use super::sockets;

/// Stay on a CPU: long enough that most senders are not waiting to move when a mask changes.
const STAY: Duration = Duration::from_millis(10);

/// Packets that are sent between looks at the clock and at what was read.
const BURST: u64 = 16;

/// A thread for each flow.
pub struct Senders {
    threads: Vec<Thread<Result<u64>>>,
    shared: Arc<Shared>,
}

struct Shared {
    stop: AtomicBool,
    moves: Counters,
}

/// Flows from addresses of the loopback device to another of its addresses.
pub fn flows(lo: &End, nr_flows: u32) -> UdpFlows {
    UdpFlows {
        saddr: IpAddr::V4(Ipv4Addr::LOCALHOST),
        ..UdpFlows::to(lo, nr_flows)
    }
}

impl Senders {
    /// Sends as fast as the application reads, with `window` packets of each flow under way at most.
    /// `read`: packets of each flow that were read. The first senders start on different CPUs.
    ///
    /// # Errors
    /// An address is taken, or not in the namespace.
    pub fn start(
        netns: &Netns,
        flows: &UdpFlows,
        read: &Arc<Counters>,
        window: u64,
        cpus: &[u32],
    ) -> Result<Self> {
        let mut senders = Self {
            threads: Vec::new(),
            shared: Arc::new(Shared {
                stop: AtomicBool::new(false),
                moves: Counters::new(flows.nr_flows as usize),
            }),
        };
        let to = SocketAddr::new(flows.daddr, flows.dport);
        for flow in 0..flows.nr_flows {
            let index = flow as usize;
            let read = read.clone();
            let mut cpus = cpus.to_vec();
            let first = index % cpus.len();
            cpus.rotate_left(first);
            let sender = Sender {
                index,
                socket: netns.run(|| sockets::sender(flows.source(flow), to))?,
                payload: flows.payload(flow),
                window: Window {
                    frames: window,
                    received: Arc::new(move || read.of(index).load(Ordering::Relaxed)),
                    may_drop: false,
                },
                shared: senders.shared.clone(),
            };
            let name = format!("sender/{flow}");
            let thread = netns.spawn(Some(cpus[0]), &name, move || sender.run(&cpus))?;
            senders.threads.push(thread);
        }
        Ok(senders)
    }

    /// Changes of a sender's CPU so far.
    pub fn moves(&self) -> u64 {
        self.shared.moves.sum()
    }

    /// Stops the threads; returns the number of packets sent.
    ///
    /// # Errors
    /// When a thread could not send or move, or its packets were not read.
    pub fn stop(mut self) -> Result<u64> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).map(Thread::join).sum()
    }
}

impl Drop for Senders {
    /// The threads end on their own.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

struct Sender {
    index: usize,
    socket: UdpSocket,
    /// Without its number.
    payload: Vec<u8>,
    window: Window,
    shared: Arc<Shared>,
}

impl Sender {
    /// Sends until told to stop, first on the first of `cpus`; returns the number of packets sent.
    fn run(mut self, cpus: &[u32]) -> Result<u64> {
        let mut sent = 0u64;
        for &cpu in cpus.iter().cycle().skip(1) {
            let since = Instant::now();
            while since.elapsed() < STAY {
                if self.shared.stop.load(Ordering::Relaxed) {
                    return Ok(sent);
                }
                self.window.wait(sent, BURST)?;
                for _ in 0..BURST {
                    self.payload[..8].copy_from_slice(&sent.to_be_bytes());
                    self.socket.send(&self.payload)?;
                    sent += 1;
                }
            }
            // Until none is under way.
            self.window.wait(sent, self.window.frames)?;
            bind(Pid::from_raw(0), cpu)?;
            let moves = self.shared.moves.of(self.index);
            moves.fetch_add(1, Ordering::Relaxed);
        }
        Ok(sent)
    }
}
