// SPDX-License-Identifier: MIT OR Apache-2.0
//! The load that a peer host puts on a server: sockets of its own, one request under way on each, or
//! as much as goes through.

use std::fmt;
use std::io::{ErrorKind, Read};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use rxsteer::host::cpu_times::{CpuTimes, busy_shares, cpu_times};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};

use crate::bench::peer::latency::Latency;
use crate::lab::sockets;

/// Connections at most: source ports for more may be missing.
pub const CONNECTIONS_MAX: u32 = 10_000;

/// Seconds at most, warm-up included.
pub const SECONDS_MAX: f64 = 600.0;

/// A request's or a response's bytes at most: no datagram is in fragments.
pub const SIZE_MAX: usize = 1400;

/// A datagram without an answer for so long is lost, and sent again.
const LOST: Duration = Duration::from_secs(1);

/// How often it is looked for those, and whether the load is over.
const LOOK: Duration = Duration::from_millis(50);

/// How long all connections together may take.
const CONNECT: Duration = Duration::from_secs(10);

/// Of TCP.
const ENDED: &str = "the server has ended a connection";

/// Written at once to a stream, bytes.
const CHUNK: usize = 128 << 10;

/// The histogram's range, ns, and its significant digits.
const LATENCY_MIN: u64 = 100;
const LATENCY_MAX: u64 = 60_000_000_000;
const LATENCY_DIGITS: u8 = 3;

/// What to do, and for how long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// What the connections carry.
    pub kind: Kind,
    /// How many: 1 to [`CONNECTIONS_MAX`].
    pub connections: u32,
    /// The server's.
    pub port: u16,
    /// Seconds of the same before anything is counted.
    pub warm_up: f64,
    /// Seconds that are counted.
    pub seconds: f64,
}

/// What connections carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A request, and when its response has come, the next one. Both have 1 to [`SIZE_MAX`] bytes; a
    /// response begins with the first bytes of its request, 8 if both have so many: that tells late
    /// datagrams from those that are waited for.
    Rr {
        /// Over what.
        transport: Transport,
        /// Bytes.
        request: usize,
        /// Bytes.
        response: usize,
    },
    /// As many bytes to the server as TCP takes.
    Stream {
        /// Or so many in a second at most, on each connection.
        pace: Option<u32>,
    },
}

/// What carries requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Transport {
    Tcp,
    Udp,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Rr { transport, .. } => write!(f, "requests over {transport:?}")?,
            Kind::Stream { .. } => write!(f, "streams")?,
        }
        let (connections, port, seconds) = (self.connections, self.port, self.seconds);
        write!(f, " to port {port}, {connections} connections, {seconds} s")
    }
}

impl Load {
    fn transport(&self) -> Transport {
        match self.kind {
            Kind::Rr { transport, .. } => transport,
            Kind::Stream { .. } => Transport::Tcp,
        }
    }

    /// What nobody may ask for.
    fn check(&self) -> Result<()> {
        ensure!(
            (1..=CONNECTIONS_MAX).contains(&self.connections),
            "{} connections: choose 1 to {CONNECTIONS_MAX}",
            self.connections
        );
        let seconds = self.warm_up + self.seconds;
        ensure!(
            self.warm_up >= 0.0 && self.seconds > 0.0 && seconds <= SECONDS_MAX,
            "{} s after {} s: choose more than 0 and {SECONDS_MAX} in all at most",
            self.seconds,
            self.warm_up
        );
        if let Kind::Rr {
            request, response, ..
        } = self.kind
        {
            let sizes = 1..=SIZE_MAX;
            ensure!(
                sizes.contains(&request) && sizes.contains(&response),
                "a request of {request} bytes, a response of {response}: choose 1 to {SIZE_MAX}"
            );
        }
        Ok(())
    }
}

/// What came of a [`Load`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Loaded {
    /// That were counted.
    pub seconds: f64,
    /// Responses.
    pub transactions: u64,
    /// From requests to their responses, if there was one. A request that was lost counts from its
    /// first try, and what is over a minute as a minute.
    pub latency: Option<Latency>,
    /// Requests over UDP that had no response within a second, and were sent again.
    pub lost: u64,
    /// Bytes of streams that the server's host has acknowledged.
    pub bytes: u64,
    /// Of the time of all CPUs of the peer, what was not idle: 0 to 1.
    pub busy_share: f64,
    /// The same of the busiest one: near 1, the peer may have been what was measured.
    pub busiest_share: f64,
}

/// The connections of a load. They last as long as this, and end with a reset: ports are free at
/// once for the next ones.
pub struct Generator {
    load: Load,
    sockets: Vec<Socket>,
}

/// Not counted yet.
const WARM_UP: u8 = 0;
const COUNTED: u8 = 1;
const OVER: u8 = 2;

/// What all threads see.
struct Shared {
    phase: AtomicU8,
    /// Bytes that streams have taken.
    written: AtomicU64,
    /// A thread has failed.
    failed: EventFd,
}

impl Shared {
    fn is_counted(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == COUNTED
    }

    fn is_over(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == OVER
    }
}

/// What a thread counted.
struct Tally {
    latency: Histogram<u64>,
    out_of_range: u64,
    lost: u64,
}

impl Tally {
    fn new() -> Result<Self> {
        Ok(Self {
            latency: Histogram::new_with_bounds(LATENCY_MIN, LATENCY_MAX, LATENCY_DIGITS)?,
            out_of_range: 0,
            lost: 0,
        })
    }

    fn count(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.out_of_range += u64::from(ns > LATENCY_MAX);
        self.latency.saturating_record(ns.min(LATENCY_MAX));
    }

    fn add(&mut self, other: &Self) -> Result<()> {
        self.latency.add(&other.latency)?;
        self.out_of_range += other.out_of_range;
        self.lost += other.lost;
        Ok(())
    }
}

/// The counters at one moment.
struct Moment {
    at: Instant,
    acknowledged: u64,
    cpus: Vec<CpuTimes>,
}

nix::ioctl_read_bad!(
    /// Bytes in a TCP socket's send queue that are not acknowledged (tcp(7), SIOCOUTQ).
    outq,
    libc::TIOCOUTQ,
    libc::c_int
);

impl Generator {
    /// Connects all sockets from one address to another, at the load's port.
    ///
    /// # Errors
    /// When more is asked for than is allowed, or nobody listens.
    pub fn connect(load: &Load, mut from: SocketAddr, mut to: SocketAddr) -> Result<Self> {
        load.check()?;
        from.set_port(0);
        to.set_port(load.port);
        let deadline = Instant::now() + CONNECT;
        let open = || open(load.transport(), from, to, deadline);
        let sockets = (0..load.connections)
            .map(|n| open().with_context(|| format!("connection {n} to {to}")))
            .collect::<Result<Vec<_>>>()?;
        if let Kind::Stream { pace: Some(pace) } = load.kind {
            sockets.iter().try_for_each(|s| sockets::pace(s, pace))?;
        }
        let load = load.clone();
        Ok(Self { load, sockets })
    }

    /// The sockets' own ports.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn ports(&self) -> Result<Vec<u16>> {
        let port = |socket: &Socket| {
            let address = socket.local_addr()?.as_socket();
            Ok(address.context("no address")?.port())
        };
        self.sockets.iter().map(port).collect()
    }

    /// Puts the load on; calls `started` when counting starts.
    ///
    /// # Errors
    /// When a connection failed, `started` did, or one of `interrupts` can be read.
    pub fn run(
        &self,
        interrupts: &[BorrowedFd],
        started: impl FnOnce() -> Result<()>,
    ) -> Result<Loaded> {
        let shared = &Shared {
            phase: AtomicU8::new(if self.load.warm_up > 0.0 {
                WARM_UP
            } else {
                COUNTED
            }),
            written: AtomicU64::new(0),
            failed: EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?,
        };
        // Without a warm-up, all is counted, and its time begins before the threads do.
        let cold = self.now(shared)?;
        let cpus = thread::available_parallelism()?.get();
        let nr_threads = cpus.min(self.sockets.len());
        thread::scope(|scope| {
            let threads: Vec<_> = (0..nr_threads)
                .map(|first| {
                    scope.spawn(move || {
                        let sockets = self.sockets.iter().skip(first).step_by(nr_threads);
                        let tally = self.drive(sockets.collect(), shared);
                        if tally.is_err() {
                            let _ = shared.failed.write(1);
                        }
                        tally
                    })
                })
                .collect();
            let window = self.window(shared, cold, interrupts, started);
            shared.phase.store(OVER, Ordering::Relaxed);
            let mut sum = Tally::new()?;
            for thread in threads {
                match thread.join() {
                    // Why it failed is what matters, rather than that it did.
                    Ok(tally) => sum.add(&tally?)?,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            let (before, after) = window?;
            Ok(loaded(&before, &after, &sum))
        })
    }

    /// Waits while the threads warm up, then while they count.
    fn window(
        &self,
        shared: &Shared,
        cold: Moment,
        interrupts: &[BorrowedFd],
        started: impl FnOnce() -> Result<()>,
    ) -> Result<(Moment, Moment)> {
        let fds = [&[shared.failed.as_fd()], interrupts].concat();
        let before = match shared.is_counted() {
            true => cold,
            false => {
                let warm = cold.at + Duration::from_secs_f64(self.load.warm_up);
                wait(&fds, warm)?;
                shared.phase.store(COUNTED, Ordering::Relaxed);
                self.now(shared)?
            }
        };
        started()?;
        wait(&fds, before.at + Duration::from_secs_f64(self.load.seconds))?;
        shared.phase.store(OVER, Ordering::Relaxed);
        Ok((before, self.now(shared)?))
    }

    fn now(&self, shared: &Shared) -> Result<Moment> {
        let at = Instant::now();
        let mut queued = 0;
        if matches!(self.load.kind, Kind::Stream { .. }) {
            for socket in &self.sockets {
                let mut bytes = 0;
                // SAFETY: the kernel writes one int.
                unsafe { outq(socket.as_raw_fd(), &raw mut bytes) }?;
                queued += bytes as u64;
            }
        }
        // Read after the queues: what was written meanwhile may be counted as acknowledged, at both
        // moments alike.
        let written = shared.written.load(Ordering::Relaxed);
        Ok(Moment {
            at,
            acknowledged: written.saturating_sub(queued),
            cpus: cpu_times()?,
        })
    }

    /// A thread's work, until the load is over.
    fn drive(&self, sockets: Vec<&Socket>, shared: &Shared) -> Result<Tally> {
        match self.load.kind {
            Kind::Stream { .. } => stream(&sockets, shared),
            Kind::Rr {
                transport,
                request,
                response,
            } => {
                let rr = Rr {
                    shared,
                    transport,
                    request: vec![0; request],
                    response: vec![0; response],
                    tally: Tally::new()?,
                };
                rr.drive(&sockets)
            }
        }
    }
}

fn open(
    transport: Transport,
    from: SocketAddr,
    to: SocketAddr,
    deadline: Instant,
) -> Result<Socket> {
    let (kind, protocol) = match transport {
        Transport::Tcp => (Type::STREAM, Protocol::TCP),
        Transport::Udp => (Type::DGRAM, Protocol::UDP),
    };
    let socket = Socket::new(Domain::for_address(to), kind, Some(protocol))?;
    if transport == Transport::Tcp {
        socket.set_tcp_nodelay(true)?;
        socket.set_linger(Some(Duration::ZERO))?;
    }
    socket.bind(&from.into())?;
    let left = deadline.saturating_duration_since(Instant::now());
    ensure!(!left.is_zero(), "{} s have passed", CONNECT.as_secs());
    socket
        .connect_timeout(&to.into(), left)
        .context("is the server there?")?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn loaded(before: &Moment, after: &Moment, tally: &Tally) -> Loaded {
    let seconds = (after.at - before.at).as_secs_f64();
    let busy = busy_shares(&before.cpus, &after.cpus, seconds);
    Loaded {
        seconds,
        transactions: tally.latency.len(),
        latency: Latency::of(&tally.latency, tally.out_of_range),
        lost: tally.lost,
        bytes: after.acknowledged.saturating_sub(before.acknowledged),
        busy_share: busy.values().sum::<f64>() / busy.len() as f64,
        busiest_share: busy.values().copied().fold(0.0, f64::max),
    }
}

/// Waits for a time to pass.
///
/// # Errors
/// When one of `interrupts` can be read before.
fn wait(interrupts: &[BorrowedFd], until: Instant) -> Result<()> {
    match readable(interrupts, Some(until))? {
        None => Ok(()),
        Some(_) => bail!("the load was interrupted"),
    }
}

/// Which of some descriptors can be read, or has ended: the last one; none if it got too late.
pub(in crate::bench) fn readable(
    fds: &[BorrowedFd],
    until: Option<Instant>,
) -> Result<Option<usize>> {
    let mut fds: Vec<PollFd> = fds
        .iter()
        .map(|fd| PollFd::new(*fd, PollFlags::POLLIN))
        .collect();
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        match ppoll(&mut fds, left.map(TimeSpec::from_duration), None) {
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(fds.iter().rposition(|fd| fd.any().unwrap_or(false))),
        }
    }
}

/// Which of many sockets are ready.
struct Ready {
    epoll: Epoll,
    events: [EpollEvent; 256],
}

impl Ready {
    fn new(sockets: &[&Socket], flags: EpollFlags) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (n, socket) in (0..).zip(sockets) {
            epoll.add(socket, EpollEvent::new(flags, n))?;
        }
        Ok(Self {
            epoll,
            events: [EpollEvent::empty(); 256],
        })
    }

    /// Their numbers; none after a while.
    fn wait(&mut self) -> Result<impl Iterator<Item = usize>> {
        let timeout = EpollTimeout::from(LOOK.as_millis() as u16);
        let count = match self.epoll.wait(&mut self.events, timeout) {
            Err(Errno::EINTR) => 0,
            count => count?,
        };
        Ok(self.events[..count].iter().map(|e| e.data() as usize))
    }
}

fn stream(sockets: &[&Socket], shared: &Shared) -> Result<Tally> {
    let chunk = vec![0; CHUNK];
    // Level-triggered, a chunk each: no stream keeps the others waiting.
    let mut ready = Ready::new(sockets, EpollFlags::EPOLLOUT)?;
    while !shared.is_over() {
        for n in ready.wait()? {
            match sockets[n].send(&chunk) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                bytes => {
                    let bytes = bytes.context("the server has ended a stream")?;
                    shared.written.fetch_add(bytes as u64, Ordering::Relaxed);
                }
            }
        }
    }
    Tally::new()
}

/// A thread of closed loops.
struct Rr<'a> {
    shared: &'a Shared,
    transport: Transport,
    request: Vec<u8>,
    response: Vec<u8>,
    tally: Tally,
}

/// One of its connections.
struct Connection<'a> {
    socket: &'a Socket,
    /// The request's name, in its first bytes.
    sequence: u64,
    /// Since when the response is waited for.
    began: Instant,
    /// When the request was sent last.
    sent: Instant,
    /// Bytes of the request that the socket has not taken yet.
    unsent: usize,
    /// Bytes of the response that have not come yet.
    missing: usize,
}

impl Rr<'_> {
    fn drive(mut self, sockets: &[&Socket]) -> Result<Tally> {
        let mut flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        if self.transport == Transport::Tcp {
            // Of UDP it would come with every datagram that has left.
            flags |= EpollFlags::EPOLLOUT;
        }
        let mut ready = Ready::new(sockets, flags)?;
        let mut now = Instant::now();
        let mut connections: Vec<Connection> = sockets
            .iter()
            .map(|socket| Connection {
                socket,
                sequence: 0,
                began: now,
                sent: now,
                unsent: 0,
                missing: 0,
            })
            .collect();
        for connection in &mut connections {
            self.ask(connection, Instant::now())?;
        }
        while !self.shared.is_over() {
            for n in ready.wait()? {
                self.go_on(&mut connections[n])?;
            }
            if self.transport == Transport::Udp && now.elapsed() > LOOK {
                now = Instant::now();
                for connection in &mut connections {
                    if now.saturating_duration_since(connection.sent) > LOST {
                        self.tally.lost += u64::from(self.shared.is_counted());
                        self.send_new(connection, now)?;
                    }
                }
            }
        }
        Ok(self.tally)
    }

    fn ask(&mut self, connection: &mut Connection, now: Instant) -> Result<()> {
        connection.began = now;
        self.send_new(connection, now)
    }

    /// Under a new name: an older one may still be answered.
    fn send_new(&mut self, connection: &mut Connection, now: Instant) -> Result<()> {
        connection.sequence += 1;
        connection.sent = now;
        connection.unsent = self.request.len();
        connection.missing = self.response.len();
        self.send(connection)
    }

    /// What the socket does not take now, it takes when it is ready.
    fn send(&mut self, connection: &mut Connection) -> Result<()> {
        let name = connection.sequence.to_le_bytes();
        let len = name.len().min(self.request.len());
        self.request[..len].copy_from_slice(&name[..len]);
        while connection.unsent > 0 {
            let rest = &self.request[self.request.len() - connection.unsent..];
            match connection.socket.send(rest) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                bytes => connection.unsent -= bytes.context("a request could not be sent")?,
            }
        }
        Ok(())
    }

    /// Reads and sends what can be. Edge-triggered: a response that comes meanwhile is told anew.
    fn go_on(&mut self, connection: &mut Connection) -> Result<()> {
        if connection.unsent > 0 {
            return self.send(connection);
        }
        loop {
            let mut socket = connection.socket;
            match socket.read(&mut self.response[..connection.missing]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // In order, or with requests unread.
                Ok(0) if self.transport == Transport::Tcp => bail!("{ENDED}"),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => bail!("{ENDED}"),
                bytes => {
                    let bytes = bytes.context("no response: is the server there?")?;
                    if self.is_complete(connection, bytes) {
                        break;
                    }
                }
            }
        }
        let now = Instant::now();
        if self.shared.is_counted() {
            self.tally.count(now - connection.began);
        }
        match self.shared.is_over() {
            true => Ok(()),
            false => self.ask(connection, now),
        }
    }

    /// Whether the response has come, with `bytes` that were read now.
    fn is_complete(&self, connection: &mut Connection, bytes: usize) -> bool {
        match self.transport {
            Transport::Tcp => {
                connection.missing -= bytes;
                connection.missing == 0
            }
            Transport::Udp => {
                let name = connection.sequence.to_le_bytes();
                let len = name.len().min(self.request.len()).min(bytes);
                bytes == self.response.len() && self.response[..len] == name[..len]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_out_of_range_is_told() {
        let mut tally = Tally::new().unwrap();
        assert_eq!(Latency::of(&tally.latency, tally.out_of_range), None);
        for ms in [1, 2, 59_000, 61_000] {
            tally.count(Duration::from_millis(ms));
        }
        let mut sum = Tally::new().unwrap();
        sum.add(&tally).unwrap();
        sum.add(&tally).unwrap();
        let latency = Latency::of(&sum.latency, sum.out_of_range).unwrap();
        assert_eq!((latency.count, latency.out_of_range), (8, 2));
        let near = |us: f64, expected: f64| (us / expected - 1.0).abs() < 1e-3;
        assert!(near(latency.min, 1e3), "{latency:?}");
        assert!(near(latency.p50, 2e3), "{latency:?}");
        assert!(near(latency.max, 60e6), "{latency:?}");
        assert!(near(latency.mean, 119_003e3 / 4.0), "{latency:?}");
    }
}
