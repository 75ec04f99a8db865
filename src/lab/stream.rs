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
use super::sink::{Counters, IDLE};

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

/// The connection and its two threads, until stopped.
pub struct Stream {
    threads: Vec<JoinHandle<Option<Result<()>>>>,
    shared: Arc<Shared>,
}

struct Shared {
    stop: AtomicBool,
    /// Bytes read, and times that the consumer worked.
    counters: Counters,
}

impl Stream {
    /// Connects the two ends of a link, the sender on `sender_cpu`, the consumer on `consumer_cpu`.
    ///
    /// # Errors
    /// When they can't be connected.
    pub fn start(
        link: &Link,
        sender_cpu: u32,
        consumer_cpu: u32,
        consumer: Consumer,
    ) -> Result<Self> {
        let (tester, dut) = (&link.tester.netns, &link.dut.netns);
        let listener = dut.run(|| Ok(TcpListener::bind((link.dut.ipv4, 0))?))?;
        let to: SocketAddr = listener.local_addr()?;
        let from =
            tester.run(|| TcpStream::connect(to).context("the other end can't be reached"))?;
        let (reader, _) = listener.accept()?;
        from.set_write_timeout(Some(IDLE))?;
        match consumer {
            Consumer::Blocks => reader.set_read_timeout(Some(IDLE))?,
            Consumer::Polls(_) => reader.set_nonblocking(true)?,
        }
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            counters: Counters::new(2),
        });
        let mut stream = Self {
            threads: Vec::new(),
            shared: shared.clone(),
        };
        let seen = shared.clone();
        let read = move || consume(reader, consumer, &seen);
        stream
            .threads
            .push(dut.spawn(Some(consumer_cpu), "consumer", read)?);
        let send = move || produce(from, &shared.stop);
        stream
            .threads
            .push(tester.spawn(Some(sender_cpu), "sender", send)?);
        Ok(stream)
    }

    /// Bytes that the consumer has read so far.
    pub fn read(&self) -> u64 {
        self.shared.counters.of(0).load(Ordering::Relaxed)
    }

    /// Times that the consumer has worked so far.
    pub fn worked(&self) -> u64 {
        self.shared.counters.of(1).load(Ordering::Relaxed)
    }

    /// Ends the connection.
    ///
    /// # Errors
    /// When a thread could not read or write.
    pub fn stop(mut self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(done) => done.context("a thread of a stream did not start")??,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(())
    }
}

impl Drop for Stream {
    /// The threads end by themselves, within their idle time.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

fn produce(mut to: TcpStream, stop: &AtomicBool) -> Result<()> {
    let block = vec![0; BLOCK];
    while !stop.load(Ordering::Relaxed) {
        match to.write(&block) {
            Err(e) if is_idle(&e) => (),
            // The consumer has closed: it was told to stop too.
            Err(_) if stop.load(Ordering::Relaxed) => (),
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
                shared.counters.of(0).fetch_add(read, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}

fn is_idle(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
