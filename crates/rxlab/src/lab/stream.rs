// SPDX-License-Identifier: MIT OR Apache-2.0
//! One flow in bulk: a sender and a consumer of a TCP connection, or a sender of datagrams.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::UdpGsoSegment;

use super::link::Link;
use super::netns::{Netns, Thread};
use super::receiver::{Counters, IDLE};

/// Bytes per read and write: netperf's default for its receiver, rounded up.
const BLOCK: usize = 128 << 10;

/// Behaviour of the consumer when there is nothing to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consumer {
    /// Sleeps until there is.
    Blocks,
    /// Works for this time, then reads again.
    Polls(Duration),
}

/// The thread at one end of the connection.
pub struct Worker {
    thread: Option<Thread<Result<()>>>,
    shared: Arc<Shared>,
}

struct Shared {
    stop: AtomicBool,
    /// Bytes read, and periods of work by the consumer.
    counters: Counters,
}

/// Connects both ends of a link; returns the sender's stream, then the receiver's.
///
/// # Errors
/// When they can't be connected.
pub fn connect(link: &Link) -> Result<(TcpStream, TcpStream)> {
    between(&link.tester.netns, &link.dut.netns, link.dut.ipv4)
}

/// Connects a namespace to an address of another one; returns the sender's stream, then the receiver's.
///
/// # Errors
/// When they can't be connected.
pub fn between(from: &Netns, to: &Netns, address: Ipv4Addr) -> Result<(TcpStream, TcpStream)> {
    let listener = to.run(|| Ok(TcpListener::bind((address, 0))?))?;
    let to: SocketAddr = listener.local_addr()?;
    let from = from.run(|| TcpStream::connect(to).context("the other end can't be reached"))?;
    let (reader, _) = listener.accept()?;
    Ok((from, reader))
}

impl Worker {
    /// Reads the stream in a thread, bound to `cpu` if given.
    ///
    /// # Errors
    /// When the thread can't be started.
    pub fn consume(
        netns: &Netns,
        cpu: Option<u32>,
        from: TcpStream,
        consumer: Consumer,
    ) -> Result<Self> {
        match consumer {
            Consumer::Blocks => from.set_read_timeout(Some(IDLE))?,
            Consumer::Polls(_) => from.set_nonblocking(true)?,
        }
        Self::start(netns, cpu, "consumer", move |shared| {
            consume(from, consumer, shared)
        })
    }

    /// Sends as much as TCP takes, in a thread on `cpu`.
    ///
    /// # Errors
    /// When the thread can't be started.
    pub fn produce(netns: &Netns, cpu: u32, to: TcpStream) -> Result<Self> {
        to.set_write_timeout(Some(IDLE))?;
        Self::start(netns, Some(cpu), "sender", move |shared| {
            produce(to, &shared.stop)
        })
    }

    /// Sends datagrams of `len` bytes as fast as the CPU can, in a thread on it.
    ///
    /// # Errors
    /// When the thread can't be started.
    pub fn datagrams(netns: &Netns, cpu: u32, to: UdpSocket, len: usize) -> Result<Self> {
        setsockopt(&to, UdpGsoSegment, &(len as i32)).context("datagrams in one call")?;
        to.set_write_timeout(Some(IDLE))?;
        // The most that fits into one call.
        let block = vec![0; (usize::from(u16::MAX) - 64) / len * len];
        Self::start(netns, Some(cpu), "sender", move |shared| {
            while !shared.stop.load(Ordering::Relaxed) {
                match to.send(&block) {
                    Err(e) if is_idle(&e) => (),
                    sent => {
                        sent.context("sending datagrams")?;
                    }
                }
            }
            Ok(())
        })
    }

    fn start(
        netns: &Netns,
        cpu: Option<u32>,
        name: &str,
        work: impl FnOnce(&Shared) -> Result<()> + Send + 'static,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            counters: Counters::new(2),
        });
        let seen = shared.clone();
        let thread = netns.spawn(cpu, name, move || work(&seen))?;
        Ok(Self {
            thread: Some(thread),
            shared,
        })
    }

    /// Bytes read so far.
    pub fn read(&self) -> u64 {
        self.shared.counters.of(0).load(Ordering::Relaxed)
    }

    /// Periods of work so far.
    pub fn worked(&self) -> u64 {
        self.shared.counters.of(1).load(Ordering::Relaxed)
    }

    /// Stops the thread and closes its end of the connection.
    ///
    /// # Errors
    /// When it could not read or write.
    pub fn stop(mut self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.thread.take().context("it has ended")?.join()
    }
}

impl Drop for Worker {
    /// The thread ends on its own, within `IDLE`.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

fn produce(mut to: TcpStream, stop: &AtomicBool) -> Result<()> {
    let block = vec![0; BLOCK];
    while !stop.load(Ordering::Relaxed) {
        match to.write(&block) {
            Err(e) if is_idle(&e) => (),
            written => {
                written.context("sending")?;
            }
        }
    }
    Ok(())
}

fn consume(mut from: TcpStream, consumer: Consumer, shared: &Shared) -> Result<()> {
    let mut block = vec![0; BLOCK];
    while !shared.stop.load(Ordering::Relaxed) {
        match from.read(&mut block) {
            Err(e) if is_idle(&e) => {
                if let Consumer::Polls(work) = consumer {
                    let start = Instant::now();
                    while start.elapsed() < work {
                        std::hint::spin_loop();
                    }
                    shared.counters.of(1).fetch_add(1, Ordering::Relaxed);
                }
            }
            read => {
                let read = read.context("receiving")? as u64;
                // The sender closed the connection.
                if read == 0 {
                    return Ok(());
                }
                shared.counters.of(0).fetch_add(read, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}

fn is_idle(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
