// SPDX-License-Identifier: MIT OR Apache-2.0
//! The application that answers: threads that read a request, work, and send it back.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{MsgFlags, recv, send};
use rxsteer::host::cpumask::CpuMask;

use super::netns::{self, Netns};
use super::receiver::{Counters, IDLE};
use super::sockets;

/// The longest request, bytes.
const REQUEST: usize = 2048;

/// Work per request: random reads from memory that exceeds the caches near a CPU. The number of
/// reads is random, up to as many as take `us` microseconds on an idle machine.
#[derive(Clone)]
pub struct Work {
    memory: Arc<Vec<u64>>,
    reads: u64,
    /// Longest work per request, us.
    pub us: f64,
}

impl Work {
    /// Allocates `bytes` of memory and measures the time of a read.
    pub fn up_to(us: f64, bytes: usize) -> Self {
        const SAMPLE: u64 = 200_000;
        let words = (bytes / size_of::<u64>()).next_power_of_two();
        // Written, since all pages never written map to one zero page.
        let mut work = Self {
            memory: Arc::new((0..words as u64).collect()),
            reads: SAMPLE,
            us,
        };
        let mut random = Random(1);
        work.read(SAMPLE, &mut random);
        let start = Instant::now();
        work.read(SAMPLE, &mut random);
        let each = start.elapsed().as_secs_f64() * 1e6 / SAMPLE as f64;
        work.reads = (us / each) as u64;
        work
    }

    /// Size of the memory, bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(self.memory.as_slice())
    }

    fn some(&self, random: &mut Random) {
        let reads = random.next() % (self.reads + 1);
        self.read(reads, random);
    }

    /// Dependent reads: each address depends on the value read before.
    fn read(&self, reads: u64, random: &mut Random) {
        let mask = self.memory.len() - 1;
        for _ in 0..reads {
            let place = random.next() as usize & mask;
            random.0 ^= std::hint::black_box(self.memory[place]) << 32;
            random.0 |= 1;
        }
    }
}

/// A multiplicative generator: fast, and random enough to miss caches.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d);
        self.0 >> 20
    }
}

/// Server threads.
pub struct Server {
    threads: Vec<netns::Thread<Result<()>>>,
    stop: Arc<AtomicBool>,
    answered: Arc<Counters>,
}

impl Server {
    /// Starts one thread per list of sockets, bound to `cpu` if given. A thread blocks in the read
    /// of a single socket, and uses epoll for several.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub fn start(
        netns: &Netns,
        sockets: Vec<Vec<OwnedFd>>,
        cpu: Option<u32>,
        work: Option<&Work>,
    ) -> Result<Self> {
        let mut server = Self {
            threads: Vec::new(),
            stop: Arc::default(),
            answered: Arc::new(Counters::new(sockets.len())),
        };
        for sockets in sockets {
            ensure!(!sockets.is_empty(), "a server's thread needs a socket");
            server.spawn(netns, cpu, work, move |thread| match &sockets[..] {
                [socket] => thread.read_one(socket),
                sockets => thread.read_all(sockets),
            })?;
        }
        Ok(server)
    }

    /// Starts one thread on each of `cpus`, each with a listener of its own at `local`
    /// (SO_REUSEPORT). The threads accept connections, answer requests, and close after the client.
    ///
    /// # Errors
    /// When a thread can't be started, or the address is taken.
    pub fn listen(netns: &Netns, local: SocketAddr, cpus: &CpuMask) -> Result<Self> {
        let mut server = Self {
            threads: Vec::new(),
            stop: Arc::default(),
            answered: Arc::new(Counters::new(cpus.len())),
        };
        for cpu in cpus.iter() {
            let listener = netns.run(|| sockets::listener(local))?;
            server.spawn(netns, Some(cpu), None, move |thread| {
                thread.serve(&listener)
            })?;
        }
        Ok(server)
    }

    fn spawn(
        &mut self,
        netns: &Netns,
        cpu: Option<u32>,
        work: Option<&Work>,
        serve: impl FnOnce(&mut Thread) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let index = self.threads.len();
        let mut thread = Thread {
            stop: self.stop.clone(),
            answered: self.answered.clone(),
            index,
            work: work.cloned(),
            random: Random(2 * index as u64 + 1),
        };
        let run = move || serve(&mut thread);
        self.threads
            .push(netns.spawn(cpu, &format!("server/{index}"), run)?);
        Ok(())
    }

    /// Requests answered so far.
    pub fn answered(&self) -> u64 {
        self.answered.sum()
    }

    /// Stops the threads; returns the number of requests answered.
    ///
    /// # Errors
    /// When a thread could not read or send.
    pub fn stop(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join()?;
        }
        Ok(self.answered.sum())
    }
}

impl Drop for Server {
    /// The threads end on their own, within `IDLE`.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Waits for events, for `IDLE` at most.
fn ready<'a>(epoll: &Epoll, events: &'a mut [EpollEvent]) -> Result<&'a [EpollEvent]> {
    match epoll.wait(events, EpollTimeout::from(IDLE.as_millis() as u16)) {
        Err(Errno::EINTR) => Ok(&[]),
        ready => Ok(&events[..ready?]),
    }
}

struct Thread {
    stop: Arc<AtomicBool>,
    answered: Arc<Counters>,
    index: usize,
    work: Option<Work>,
    random: Random,
}

impl Thread {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Blocks in the read: only then does the read busy-poll the device.
    fn read_one(&mut self, socket: &OwnedFd) -> Result<()> {
        while !self.is_stopped() {
            self.answer(socket, MsgFlags::empty())?;
        }
        Ok(())
    }

    fn read_all(&mut self, sockets: &[OwnedFd]) -> Result<()> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (index, socket) in (0..).zip(sockets) {
            epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, index))?;
        }
        let mut events = [EpollEvent::empty(); 64];
        while !self.is_stopped() {
            for event in ready(&epoll, &mut events)? {
                self.answer(&sockets[event.data() as usize], MsgFlags::MSG_DONTWAIT)?;
            }
        }
        Ok(())
    }

    /// One epoll for the listener and all connections.
    fn serve(&mut self, listener: &TcpListener) -> Result<()> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let event = |fd: &dyn AsRawFd| {
            EpollEvent::new(EpollFlags::EPOLLIN, u64::from(fd.as_raw_fd() as u32))
        };
        epoll.add(listener, event(listener))?;
        let mut streams: HashMap<u64, OwnedFd> = HashMap::new();
        let mut events = [EpollEvent::empty(); 64];
        while !self.is_stopped() {
            for event_of in ready(&epoll, &mut events)? {
                if let Some(stream) = streams.get(&event_of.data()) {
                    if self.answer(stream, MsgFlags::MSG_DONTWAIT)? == Some(0) {
                        streams.remove(&event_of.data());
                    }
                    continue;
                }
                loop {
                    let stream = match listener.accept() {
                        Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                        accepted => OwnedFd::from(accepted.context("a connection")?.0),
                    };
                    let event = event(&stream);
                    epoll.add(&stream, event)?;
                    streams.insert(event.data(), stream);
                }
            }
        }
        Ok(())
    }

    /// Answers one request. Returns its length, 0 at the end of the stream, None if there is no
    /// request yet.
    fn answer(&mut self, socket: &OwnedFd, flags: MsgFlags) -> Result<Option<usize>> {
        let mut request = [0; REQUEST];
        let len = match recv(socket.as_raw_fd(), &mut request, flags) {
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            len => len.context("a request")?,
        };
        if len == 0 {
            return Ok(Some(0));
        }
        if let Some(work) = &self.work {
            work.some(&mut self.random);
        }
        send(socket.as_raw_fd(), &request[..len], MsgFlags::MSG_NOSIGNAL).context("a reply")?;
        self.answered.of(self.index).fetch_add(1, Ordering::Relaxed);
        Ok(Some(len))
    }
}
