// SPDX-License-Identifier: MIT OR Apache-2.0
//! The application: threads that receive and count datagrams.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Socket, Type};

use super::filter::{choose_by, extension, instruction};
use super::netns::{Netns, Thread};
use super::thread_cpu_ns;

/// Datagrams per recvmmsg().
const BATCH: usize = 64;
/// Bytes received of each datagram: more than an Ethernet MTU.
const DATAGRAM: usize = 2048;
/// Time that a thread blocks in the kernel before it checks whether to stop.
pub(super) const IDLE: Duration = Duration::from_millis(20);

/// Sockets and threads of a [`Receiver`].
#[derive(Clone, Debug)]
pub struct ReceiverConfig {
    /// Local address, or the wildcard address.
    pub local: SocketAddr,
    /// Connects the sockets to this peer.
    pub peer: Option<SocketAddr>,
    /// One thread per entry, bound to that CPU or to none.
    pub threads: Vec<Option<u32>>,
    /// One socket per thread (SO_REUSEPORT), or one for all threads.
    pub reuseport: bool,
    /// Socket i receives the packets that the stack processed on CPU i, so that the counts per
    /// thread show where packets were processed. Needs `reuseport`. Packets of a CPU without a
    /// socket are distributed by hash.
    pub by_cpu: bool,
    /// Checks the generator's stamp for reordered datagrams. The order is defined only within a
    /// socket.
    pub check_order: bool,
    /// SO_RCVBUF of each socket, bytes, before the kernel doubles it. Each datagram of a generator
    /// is charged more than a page (about 4.4 kB), even a small one.
    pub rcvbuf: usize,
}

impl ReceiverConfig {
    /// One thread on any CPU, 4 MiB of buffer.
    pub fn new(local: SocketAddr) -> Self {
        Self {
            local,
            peer: None,
            threads: vec![None],
            reuseport: true,
            by_cpu: false,
            check_order: false,
            rcvbuf: 4 << 20,
        }
    }
}

/// Counts of a receiver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceiverReport {
    /// Datagrams received, by thread.
    pub received: Vec<u64>,
    /// Datagrams dropped at the sockets: full buffers, wrong checksums.
    pub dropped: u64,
    /// Datagrams received after a later one, or a duplicate, of their flow and generator; 0 unless
    /// checked.
    pub reordered: u64,
    /// CPU time by thread, ns.
    pub cpu_ns: Vec<u64>,
}

/// Receiving threads.
pub struct Receiver {
    sockets: Vec<Arc<OwnedFd>>,
    threads: Vec<Thread<Result<Done>>>,
    shared: Arc<Shared>,
}

struct Shared {
    stop: AtomicBool,
    received: Counters,
}

/// Result of a thread.
struct Done {
    cpu_ns: u64,
    reordered: u64,
}

/// Next expected sequence number of each flow.
#[derive(Default)]
pub(super) struct Order {
    next: HashMap<[u8; 8], u64>,
    pub(super) reordered: u64,
}

impl Order {
    /// A payload begins with a `generator_stamp`: sequence number, then flow and generator.
    pub(super) fn see(&mut self, payload: &[u8]) {
        let Some((seq, rest)) = payload.split_first_chunk() else {
            return;
        };
        let Some(flow) = rest.first_chunk() else {
            return;
        };
        let seq = u64::from_be_bytes(*seq);
        let next = self.next.entry(*flow).or_default();
        if seq < *next {
            self.reordered += 1;
        } else {
            *next = seq + 1;
        }
    }
}

/// One counter per thread, readable by others.
#[derive(Debug)]
pub struct Counters(Vec<Line>);

/// Separate cache lines.
#[repr(align(64))]
#[derive(Debug, Default)]
struct Line(AtomicU64);

impl Counters {
    pub(super) fn new(count: usize) -> Self {
        Self((0..count).map(|_| Line::default()).collect())
    }

    /// Counter of one thread.
    pub(super) fn of(&self, thread: usize) -> &AtomicU64 {
        &self.0[thread].0
    }

    /// Counts by thread.
    pub(super) fn each(&self) -> Vec<u64> {
        let lines = self.0.iter();
        lines.map(|line| line.0.load(Ordering::Relaxed)).collect()
    }

    /// Sum over all threads.
    pub fn sum(&self) -> u64 {
        self.each().iter().sum()
    }
}

impl Receiver {
    /// Binds the sockets before the threads start: everything sent after the return is received.
    pub fn start(netns: &Netns, config: &ReceiverConfig) -> Result<Self> {
        ensure!(!config.threads.is_empty(), "a receiver needs a thread");
        let count = if config.reuseport {
            config.threads.len()
        } else {
            1
        };
        let sockets = netns.run(|| {
            (0..count)
                .map(|_| open(config).map(Arc::new))
                .collect::<Result<Vec<_>>>()
                .with_context(|| format!("cannot receive on {}", config.local))
        })?;
        if config.by_cpu {
            ensure!(
                config.reuseport,
                "a socket per CPU needs a socket per thread"
            );
            choose_by_cpu(&sockets[0])?;
        }
        let check_order = config.check_order;
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            received: Counters::new(config.threads.len()),
        });
        let mut receiver = Self {
            sockets,
            threads: Vec::new(),
            shared,
        };
        for (i, &cpu) in config.threads.iter().enumerate() {
            let socket = receiver.sockets[i % count].clone();
            let shared = receiver.shared.clone();
            let thread = netns.spawn(cpu, &format!("receiver/{i}"), move || {
                receive(&socket, shared.received.of(i), &shared.stop, check_order)
            })?;
            receiver.threads.push(thread);
        }
        Ok(receiver)
    }

    /// Datagrams received so far.
    pub fn received(&self) -> u64 {
        self.shared.received.sum()
    }

    /// Datagrams dropped at the sockets so far.
    pub fn dropped(&self) -> Result<u64> {
        self.sockets.iter().map(|socket| drops(socket)).sum()
    }

    /// Stops the threads once their sockets are empty.
    pub fn stop(mut self) -> Result<ReceiverReport> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut cpu_ns = Vec::new();
        let mut reordered = 0;
        for thread in self.threads.drain(..) {
            let done = thread.join()?;
            cpu_ns.push(done.cpu_ns);
            reordered += done.reordered;
        }
        Ok(ReceiverReport {
            received: self.shared.received.each(),
            dropped: self.dropped()?,
            reordered,
            cpu_ns,
        })
    }
}

impl Drop for Receiver {
    /// The threads end on their own, within `IDLE`.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

fn open(config: &ReceiverConfig) -> Result<OwnedFd> {
    let socket = Socket::new(Domain::for_address(config.local), Type::DGRAM, None)?;
    socket.set_reuse_port(config.reuseport)?;
    // RcvBufForce: leaves net.core.rmem_max, a setting of the host, alone.
    setsockopt(&socket, sockopt::RcvBufForce, &config.rcvbuf)?;
    socket.bind(&config.local.into())?;
    socket.set_read_timeout(Some(IDLE))?;
    if let Some(peer) = config.peer {
        socket.connect(&peer.into())?;
    }
    Ok(socket.into())
}

/// Selects the socket of an SO_REUSEPORT group by the CPU that processes the packet, numbered in
/// the order of their bind(), by a classic program.
///
/// # Errors
/// The socket is in no group.
pub fn choose_by_cpu(socket: &impl AsRawFd) -> Result<()> {
    let mut program = [
        extension(libc::SKF_AD_CPU),
        instruction(libc::BPF_RET | libc::BPF_A, 0),
    ];
    choose_by(socket, &mut program).context("sockets cannot be chosen by CPU")
}

/// Receives until told to stop and the socket is empty.
fn receive(
    socket: &OwnedFd,
    received: &AtomicU64,
    stop: &AtomicBool,
    check_order: bool,
) -> Result<Done> {
    let mut order = Order::default();
    let mut messages = Messages::new(false);
    loop {
        // Read before the socket is drained: packets that came before the stop are counted.
        let last = stop.load(Ordering::Relaxed);
        let count = messages.receive(socket, !last)?;
        if check_order {
            messages.payloads(count).for_each(|data| order.see(data));
        }
        received.fetch_add(count as u64, Ordering::Relaxed);
        if last && count == 0 {
            return Ok(Done {
                cpu_ns: thread_cpu_ns()?,
                reordered: order.reordered,
            });
        }
    }
}

/// Buffers of one recvmmsg().
pub(super) struct Messages {
    headers: Vec<libc::mmsghdr>,
    data: Vec<u8>,
    // `headers` points to these.
    _vectors: Vec<libc::iovec>,
    _peers: Vec<libc::sockaddr_storage>,
}

impl Messages {
    /// `peers`: also receive source addresses, as servers do.
    pub(super) fn new(peers: bool) -> Self {
        let mut data = vec![0u8; BATCH * DATAGRAM];
        let mut vectors: Vec<libc::iovec> = data
            .chunks_exact_mut(DATAGRAM)
            .map(|buffer| libc::iovec {
                iov_base: buffer.as_mut_ptr().cast(),
                iov_len: buffer.len(),
            })
            .collect();
        // SAFETY: addresses and message headers of zeros are valid.
        let mut addresses: Vec<libc::sockaddr_storage> =
            vec![unsafe { std::mem::zeroed() }; if peers { BATCH } else { 0 }];
        let mut headers: Vec<libc::mmsghdr> = vectors
            .iter_mut()
            .map(|vector| {
                // SAFETY: as above.
                let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
                header.msg_hdr.msg_iov = vector;
                header.msg_hdr.msg_iovlen = 1;
                header
            })
            .collect();
        for (header, address) in headers.iter_mut().zip(&mut addresses) {
            header.msg_hdr.msg_name = (&raw mut *address).cast();
        }
        Self {
            headers,
            data,
            _vectors: vectors,
            _peers: addresses,
        }
    }

    /// Receives pending datagrams and returns their number. With `wait`, blocks until there is one
    /// or the socket's timeout expires.
    pub(super) fn receive(&mut self, socket: &OwnedFd, wait: bool) -> Result<usize> {
        for header in &mut self.headers {
            if !header.msg_hdr.msg_name.is_null() {
                // recvmmsg() overwrote the length.
                header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as _;
            }
        }
        let flags = if wait {
            libc::MSG_WAITFORONE
        } else {
            libc::MSG_DONTWAIT
        };
        // SAFETY: the headers point to memory of `self`, which outlives the call.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                BATCH as u32,
                flags,
                std::ptr::null_mut(),
            )
        };
        if count >= 0 {
            return Ok(count as usize);
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
            _ => Err(error).context("recvmmsg() failed"),
        }
    }

    /// Payloads of the last `count` datagrams received.
    pub(super) fn payloads(&self, count: usize) -> impl Iterator<Item = &[u8]> {
        let buffers = self.data.chunks_exact(DATAGRAM);
        buffers
            .zip(&self.headers[..count])
            .map(|(buffer, header)| &buffer[..header.msg_len as usize])
    }
}

/// Drop counter of a socket (SK_MEMINFO_DROPS in linux/sock_diag.h).
pub fn drops(socket: &OwnedFd) -> Result<u64> {
    const SK_MEMINFO_DROPS: usize = 8;
    let mut info = [0u32; SK_MEMINFO_DROPS + 1];
    let mut len = size_of_val(&info) as libc::socklen_t;
    // SAFETY: `info` has `len` bytes.
    let ret = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            info.as_mut_ptr().cast(),
            &mut len,
        )
    };
    nix::errno::Errno::result(ret).context("this kernel's sockets don't tell their drops")?;
    Ok(info[SK_MEMINFO_DROPS].into())
}
