// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connections of a load, and the threads that generate it.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::epoll::EpollFlags;
use nix::sys::eventfd::{EfdFlags, EventFd};
use rxsteer::host::cpu_times::{CpuTimes, busy_shares, cpu_times};
use rxsteer::host::wait;
use socket2::{Domain, Protocol, Socket, Type};

use super::load::{Kind, Load, Loaded, Transport};
use super::rr::Rr;
use super::tally::{COUNTED, OVER, Ready, Shared, Tally};
use crate::bench::peer::latency::Latency;
use crate::lab::sockets;

/// Limit on opening all connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes per write to a stream.
const CHUNK: usize = 128 << 10;

/// The connections of a load. Dropping it resets them, which frees the ports at once.
pub struct Generator {
    load: Load,
    sockets: Vec<Socket>,
}

/// Phase before [`COUNTED`].
const WARM_UP: u8 = 0;

/// Counters at one time.
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
    /// Connects all sockets between two addresses, at the load's port.
    ///
    /// # Errors
    /// The load exceeds a limit, or nothing listens.
    pub fn connect(load: &Load, mut from: SocketAddr, mut to: SocketAddr) -> Result<Self> {
        load.check()?;
        from.set_port(0);
        to.set_port(load.port);
        let deadline = Instant::now() + CONNECT_TIMEOUT;
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

    /// Local ports of the sockets.
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

    /// Generates the load; calls `started` when counting starts.
    ///
    /// # Errors
    /// A connection or `started` failed, or one of `interrupts` became readable.
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
        // Without a warm-up, counting begins before the threads start.
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
                    // The thread's error is the cause of the error in `window`: it takes
                    // precedence.
                    Ok(tally) => sum.add(&tally?)?,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            let (before, after) = window?;
            Ok(loaded(&before, &after, &sum))
        })
    }

    /// Waits for the end of the warm-up, then of the measurement; returns the counters at its start
    /// and end.
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
        // Read after the queues: bytes written in between may count as acknowledged, at both times
        // alike.
        let written = shared.written.load(Ordering::Relaxed);
        Ok(Moment {
            at,
            acknowledged: written.saturating_sub(queued),
            cpus: cpu_times()?,
        })
    }

    /// Work of a thread until the load is over.
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
    ensure!(
        !left.is_zero(),
        "{} s have passed",
        CONNECT_TIMEOUT.as_secs()
    );
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

/// Waits until a time.
///
/// # Errors
/// When one of `interrupts` becomes readable before.
fn wait(interrupts: &[BorrowedFd], until: Instant) -> Result<()> {
    match readable(interrupts, Some(until))? {
        None => Ok(()),
        Some(_) => bail!("the load was interrupted"),
    }
}

/// Index of the last descriptor that is readable or closed; None on timeout.
pub(in crate::bench) fn readable(
    fds: &[BorrowedFd],
    until: Option<Instant>,
) -> Result<Option<usize>> {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let last = wait::readable(fds, left)?
            .into_iter()
            .rposition(|ready| ready);
        if last.is_some() || left.is_some_and(|left| left.is_zero()) {
            return Ok(last);
        }
    }
}

fn stream(sockets: &[&Socket], shared: &Shared) -> Result<Tally> {
    let chunk = vec![0; CHUNK];
    // Level-triggered, one chunk per event: no stream starves the others.
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
