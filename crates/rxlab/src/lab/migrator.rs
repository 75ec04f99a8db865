// SPDX-License-Identifier: MIT OR Apache-2.0
//! Applications on the move: threads that read and change their CPU as often as possible.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::unistd::Pid;
use rxsteer::host::cpumask::CpuMask;

use super::netns::{Netns, Thread, bind};
use super::receiver::{Counters, IDLE, Messages, Order, drops};

/// Minimum stay on a CPU. A migration takes a good part of it, and much more if there are more
/// threads than CPUs.
const MIN_STAY: Duration = Duration::from_micros(500);

/// What the threads read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Datagrams of a generator, in checked order; source addresses are received, too.
    Datagrams,
    /// TCP streams, discarded and counted in segments of this size, bytes. TCP's own counters show
    /// reordering.
    Segments(u64),
}

/// Reading threads.
pub struct Migrators {
    sockets: Vec<Arc<Vec<OwnedFd>>>,
    threads: Vec<Thread<Result<()>>>,
    shared: Arc<Shared>,
}

struct Shared {
    stop: AtomicBool,
    received: Arc<Counters>,
    reordered: Counters,
    migrations: Counters,
}

/// Counts of all threads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigratorsReport {
    /// Datagrams or segments read.
    pub received: u64,
    /// Datagrams read after a later one, or a duplicate, of their flow and generator.
    pub reordered: u64,
    /// Datagrams dropped at the sockets.
    pub dropped: u64,
    /// Changes of a thread's CPU.
    pub migrations: u64,
}

impl Migrators {
    /// Starts one thread per list of sockets. After a read a thread migrates to the next of `cpus`;
    /// offline CPUs are skipped.
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
        // Different first CPUs keep the threads apart for a while.
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

    /// Distributes sockets over threads that do not migrate, one per CPU.
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

    /// Starts a thread per list of sockets, with its CPUs in order.
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

    /// Datagrams or segments read so far, by thread.
    pub fn received(&self) -> Arc<Counters> {
        self.shared.received.clone()
    }

    /// Changes of a thread's CPU so far.
    pub fn migrations(&self) -> u64 {
        self.shared.migrations.sum()
    }

    /// Counts so far.
    ///
    /// # Errors
    /// When the kernel has no drop counters of sockets.
    pub fn report(&self) -> Result<MigratorsReport> {
        let sockets = self.sockets.iter().flat_map(|sockets| sockets.iter());
        Ok(MigratorsReport {
            received: self.shared.received.sum(),
            reordered: self.shared.reordered.sum(),
            dropped: sockets.map(drops).sum::<Result<u64>>()?,
            migrations: self.shared.migrations.sum(),
        })
    }

    /// Stops the threads once their sockets are empty.
    ///
    /// # Errors
    /// When a thread could not read.
    pub fn stop(mut self) -> Result<MigratorsReport> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join()?;
        }
        self.report()
    }
}

impl Drop for Migrators {
    /// The threads end on their own, within `IDLE`.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

/// State of one thread.
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

    /// Reads and migrates until told to stop and nothing is left.
    fn run(mut self, sockets: &[OwnedFd]) -> Result<()> {
        // A single socket blocks in the read itself, as most servers do: only then does the read
        // busy-poll the device.
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (index, socket) in (0..).zip(sockets) {
            epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, index))?;
        }
        let mut events = vec![EpollEvent::empty(); sockets.len().clamp(1, 64)];
        loop {
            // Read before the sockets are drained.
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

    /// Reads once and migrates; returns the number of datagrams, or bytes.
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

    /// Migrates to the next CPU if it is online and [`MIN_STAY`] is over.
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

/// Discards up to 1 MiB of a stream; returns the bytes, 0 if there are none.
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
