// SPDX-License-Identifier: MIT OR Apache-2.0
//! One TCP connection in bulk: a sender that never stops, and a consumer.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::link::Link;
use super::netns::Netns;
use super::receiver::{Counters, IDLE};

/// Bytes of a read, and of a write: netperf's default for its receiver, rounded up.
const BLOCK: usize = 128 << 10;

/// What the consumer does when there is nothing to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consumer {
    /// It sleeps until there is.
    Blocks,
    /// It works for a while, and looks again.
    Polls(Duration),
}

/// One end of the connection: a thread, until stopped.
pub struct Worker {
    thread: Option<JoinHandle<Option<Result<()>>>>,
    shared: Arc<Shared>,
}

struct Shared {
    stop: AtomicBool,
    /// Bytes read, and times that the consumer worked.
    counters: Counters,
}

/// Connects the two ends of a link; the receiver's is the second.
///
/// # Errors
/// When they can't be connected.
pub fn connect(link: &Link) -> Result<(TcpStream, TcpStream)> {
    let (tester, dut) = (&link.tester.netns, &link.dut.netns);
    let listener = dut.run(|| Ok(TcpListener::bind((link.dut.ipv4, 0))?))?;
    let to: SocketAddr = listener.local_addr()?;
    let from = tester.run(|| TcpStream::connect(to).context("the other end can't be reached"))?;
    let (reader, _) = listener.accept()?;
    Ok((from, reader))
}

impl Worker {
    /// Reads what comes, on `cpu` if there is one.
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

    /// Sends as much as goes through, on `cpu`.
    ///
    /// # Errors
    /// When the thread can't be started.
    pub fn produce(netns: &Netns, cpu: u32, to: TcpStream) -> Result<Self> {
        to.set_write_timeout(Some(IDLE))?;
        Self::start(netns, Some(cpu), "sender", move |shared| {
            produce(to, &shared.stop)
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

    /// Times that the consumer has worked so far.
    pub fn worked(&self) -> u64 {
        self.shared.counters.of(1).load(Ordering::Relaxed)
    }

    /// Ends it, and with it its end of the connection.
    ///
    /// # Errors
    /// When it could not read or write.
    pub fn stop(mut self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        match self.thread.take().context("it has ended")?.join() {
            Ok(done) => done.context("a thread of a stream did not start")?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Worker {
    /// The thread ends by itself, within its idle time.
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
                // The sender has closed.
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
