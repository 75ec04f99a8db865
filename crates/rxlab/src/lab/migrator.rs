// SPDX-License-Identifier: MIT OR Apache-2.0
//! Applications that never stay: threads that read and change their CPU as fast as they can.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::unistd::Pid;
use rxsteer::host::cpumask::CpuMask;

use super::netns::{Netns, bind};
use super::receiver::{Counters, IDLE, Messages, Order, drops};

/// How long a thread stays, at least: to go costs a good part of it, and where there are more
/// threads than CPUs much more.
const MIN_STAY: Duration = Duration::from_micros(500);

/// What is read, and how it is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Datagrams with a wire's stamp, whose order is checked; their sources are asked for.
    Datagrams,
    /// Streams, thrown away as they are read and counted in segments of so many bytes. TCP's own
    /// counters tell of their order.
    Segments(u64),
}

/// The threads, until stopped.
pub struct Migrators {
    sockets: Vec<Arc<Vec<OwnedFd>>>,
    threads: Vec<JoinHandle<Option<Result<()>>>>,
    shared: Arc<Shared>,
}

struct Shared {
    stop: AtomicBool,
    received: Arc<Counters>,
    reordered: Counters,
    migrations: Counters,
}

/// What they saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigratorsReport {
    /// Datagrams or segments read.
    pub received: u64,
    /// Datagrams read after a later one, or the same, of their flow and wire.
    pub reordered: u64,
    /// Datagrams that the kernel dropped at the sockets.
    pub dropped: u64,
    /// Times that a thread changed its CPU.
    pub migrations: u64,
}

impl Migrators {
    /// Starts a thread for each list of sockets, which it alone reads. After a read it
    /// goes to the next of `cpus`; those that are offline then are passed over.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub fn start(
        netns: &Netns,
        sockets: Vec<Vec<OwnedFd>>,
        reads: Reads,
        cpus: &[u32],
    ) -> Result<Self> {
        ensure!(!cpus.is_empty(), "there is no CPU to migrate to");
        // Threads that begin on different CPUs stay apart for a while.
        let rotated = |index: usize| {
            let mut rotated = cpus.to_vec();
            rotated.rotate_left(index % cpus.len());
            rotated
        };
        let lists = sockets.into_iter().enumerate();
        Self::start_each(
            netns,
            lists.map(|(i, list)| (list, rotated(i))).collect(),
            reads,
        )
    }

    /// Deals sockets out to threads that stay, one on each of these CPUs.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub fn spread(
        netns: &Netns,
        sockets: Vec<OwnedFd>,
        reads: Reads,
        cpus: &CpuMask,
    ) -> Result<Self> {
        ensure!(!cpus.is_empty(), "there is no CPU to read on");
        let mut lists: Vec<_> = cpus.iter().map(|cpu| (Vec::new(), vec![cpu])).collect();
        let count = lists.len();
        for (index, socket) in sockets.into_iter().enumerate() {
            lists[index % count].0.push(socket);
        }
        Self::start_each(netns, lists, reads)
    }

    /// A thread for each list of sockets, with the CPUs to which it goes in turn.
    fn start_each(
        netns: &Netns,
        lists: Vec<(Vec<OwnedFd>, Vec<u32>)>,
        reads: Reads,
    ) -> Result<Self> {
        let count = lists.len();
        let (sockets, cpus): (Vec<_>, Vec<_>) = lists.into_iter().unzip();
        let mut migrators = Self {
            sockets: sockets.into_iter().map(Arc::new).collect(),
            threads: Vec::new(),
            shared: Arc::new(Shared {
                stop: AtomicBool::new(false),
                received: Arc::new(Counters::new(count)),
                reordered: Counters::new(count),
                migrations: Counters::new(count),
            }),
        };
        let each = migrators.sockets.clone().into_iter().zip(cpus);
        for (index, (sockets, cpus)) in each.enumerate() {
            let shared = migrators.shared.clone();
            let thread = netns.spawn(None, &format!("migrator/{index}"), move || {
                Migrator::new(index, &shared, &cpus, reads).run(&sockets)
            })?;
            migrators.threads.push(thread);
        }
        Ok(migrators)
    }

    /// What each has read so far.
    pub fn received(&self) -> Arc<Counters> {
        self.shared.received.clone()
    }

    /// How often a thread has changed its CPU so far.
    pub fn migrations(&self) -> u64 {
        self.shared.migrations.sum()
    }

    /// What they have seen so far.
    ///
    /// # Errors
    /// When the kernel does not tell a socket's drops.
    pub fn report(&self) -> Result<MigratorsReport> {
        let sockets = self.sockets.iter().flat_map(|sockets| sockets.iter());
        Ok(MigratorsReport {
            received: self.shared.received.sum(),
            reordered: self.shared.reordered.sum(),
            dropped: sockets.map(drops).sum::<Result<u64>>()?,
            migrations: self.shared.migrations.sum(),
        })
    }

    /// Stops them once their sockets are empty.
    ///
    /// # Errors
    /// When a thread could not read.
    pub fn stop(mut self) -> Result<MigratorsReport> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(done) => done.context("a migrator did not start")??,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        self.report()
    }
}

impl Drop for Migrators {
    /// The threads end by themselves, within their idle time.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

/// One of the threads.
struct Migrator<'a> {
    index: usize,
    shared: &'a Shared,
    cpus: std::iter::Cycle<std::slice::Iter<'a, u32>>,
    reads: Reads,
    messages: Messages,
    order: Order,
    bytes: u64,
    since: Instant,
}

impl<'a> Migrator<'a> {
    fn new(index: usize, shared: &'a Shared, cpus: &'a [u32], reads: Reads) -> Self {
        Self {
            index,
            shared,
            cpus: cpus.iter().cycle(),
            reads,
            messages: Messages::new(true),
            order: Order::default(),
            bytes: 0,
            since: Instant::now(),
        }
    }

    /// Reads and migrations until told to stop and nothing is left.
    fn run(mut self, sockets: &[OwnedFd]) -> Result<()> {
        // One socket is read as servers do, and waited for in the read itself: only so is its
        // device's queue polled.
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (index, socket) in (0..).zip(sockets) {
            epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, index))?;
        }
        let mut events = vec![EpollEvent::empty(); sockets.len().clamp(1, 64)];
        loop {
            // Read before the sockets are found empty.
            let last = self.shared.stop.load(Ordering::Relaxed);
            let count = if let [socket] = sockets {
                self.read(socket, !last)?
            } else {
                let idle = if last { 0 } else { IDLE.as_millis() as u16 };
                let ready = match epoll.wait(&mut events, EpollTimeout::from(idle)) {
                    Err(Errno::EINTR) => 0,
                    ready => ready?,
                };
                let mut count = 0;
                for event in &events[..ready] {
                    count += self.read(&sockets[event.data() as usize], false)?;
                }
                count
            };
            if last && count == 0 {
                return Ok(());
            }
        }
    }

    /// Reads once, and goes; returns the number of datagrams, or bytes.
    fn read(&mut self, socket: &OwnedFd, wait: bool) -> Result<usize> {
        let received = self.shared.received.of(self.index);
        let Reads::Segments(len) = self.reads else {
            let count = self.messages.receive(socket, wait)?;
            let before = self.order.reordered;
            for payload in self.messages.payloads(count) {
                self.order.see(payload);
            }
            let reordered = self.order.reordered - before;
            if reordered > 0 {
                let all = self.shared.reordered.of(self.index);
                all.fetch_add(reordered, Ordering::Relaxed);
            }
            received.fetch_add(count as u64, Ordering::Relaxed);
            self.migrate();
            return Ok(count);
        };
        let bytes = discard(socket)?;
        self.bytes += bytes as u64;
        received.store(self.bytes / len, Ordering::Relaxed);
        self.migrate();
        Ok(bytes)
    }

    /// To the next CPU, if it takes us and it is time.
    fn migrate(&mut self) {
        if self.since.elapsed() < MIN_STAY {
            return;
        }
        self.since = Instant::now();
        if let Some(&cpu) = self.cpus.next()
            && bind(Pid::from_raw(0), cpu).is_ok()
        {
            let migrations = self.shared.migrations.of(self.index);
            migrations.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Takes up to a mebibyte off a stream without looking at it; 0 if there is nothing.
fn discard(socket: &OwnedFd) -> Result<usize> {
    const MOST: usize = 1 << 20;
    // SAFETY: with MSG_TRUNC, TCP copies nothing (tcp(7)).
    let ret = unsafe {
        libc::recv(
            socket.as_raw_fd(),
            std::ptr::null_mut(),
            MOST,
            libc::MSG_TRUNC | libc::MSG_DONTWAIT,
        )
    };
    match Errno::result(ret) {
        Ok(bytes) => Ok(bytes as usize),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(0),
        Err(error) => Err(error).context("recv() failed"),
    }
}
