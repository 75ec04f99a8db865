// SPDX-License-Identifier: MIT OR Apache-2.0
//! The application: threads that receive datagrams and count them.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket, sockopt,
};

use super::netns::Netns;
use super::thread_cpu_ns;

/// Datagrams per recvmmsg().
const BATCH: usize = 64;
/// Bytes received of each: an Ethernet MTU's worth.
const DATAGRAM: usize = 2048;
/// How long a thread sleeps in the kernel before it looks whether it should stop.
const IDLE: Duration = Duration::from_millis(20);

/// How a [`Sink`] listens.
#[derive(Clone, Debug)]
pub struct SinkConfig {
    /// The local address, or the wildcard address.
    pub local: SocketAddr,
    /// Connects the sockets to this peer, so that nothing else reaches them.
    pub peer: Option<SocketAddr>,
    /// One thread each, bound to that CPU, or to none.
    pub threads: Vec<Option<u32>>,
    /// A socket per thread (SO_REUSEPORT), or one for all.
    pub reuseport: bool,
    /// Socket i gets what the stack processed on CPU i, so that the threads' counts show where
    /// packets went; needs `reuseport`. A CPU beyond the last socket has none of its own.
    pub by_cpu: bool,
    /// Looks at the wire's stamp in every datagram for those that were overtaken. Only within a
    /// socket is there an order.
    pub check_order: bool,
    /// SO_RCVBUF of each socket, bytes before the kernel doubles them. A datagram from a
    /// wire costs more than a page (about 4.4 kB) of the doubled ones, however small it is.
    pub rcvbuf: usize,
}

impl SinkConfig {
    /// One thread on no particular CPU, 4 MiB of buffer.
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

/// What a sink got.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SinkReport {
    /// Datagrams per thread.
    pub received: Vec<u64>,
    /// Datagrams that the kernel dropped at the sockets: full buffers, wrong checksums.
    pub dropped: u64,
    /// Datagrams received after a later one, or the same, of their flow and wire; 0 unless checked.
    pub reordered: u64,
    /// CPU time of each thread, ns.
    pub cpu_ns: Vec<u64>,
}

/// Threads that receive, until stopped.
pub struct Sink {
    sockets: Vec<Arc<OwnedFd>>,
    threads: Vec<JoinHandle<Option<Result<Done>>>>,
    shared: Arc<Shared>,
}

struct Shared {
    stop: AtomicBool,
    received: Vec<Line>,
}

/// What a thread leaves behind.
struct Done {
    cpu_ns: u64,
    reordered: u64,
}

/// What comes next in each flow, at the earliest.
#[derive(Default)]
struct Order {
    next: HashMap<[u8; 8], u64>,
    reordered: u64,
}

impl Order {
    /// A payload begins with a `wire_stamp`: the sequence number, then what names flow and wire.
    fn see(&mut self, payload: &[u8]) {
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

/// A counter on a cache line of its own.
#[repr(align(64))]
#[derive(Default)]
struct Line(AtomicU64);

impl Sink {
    /// Binds the sockets, then starts the threads: what is sent after this returns is received.
    pub fn start(netns: &Netns, config: &SinkConfig) -> Result<Self> {
        ensure!(!config.threads.is_empty(), "a sink needs a thread");
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
            received: config.threads.iter().map(|_| Line::default()).collect(),
        });
        let mut sink = Self {
            sockets,
            threads: Vec::new(),
            shared,
        };
        for (i, &cpu) in config.threads.iter().enumerate() {
            let socket = sink.sockets[i % count].clone();
            let shared = sink.shared.clone();
            let thread = netns.spawn(cpu, &format!("sink/{i}"), move || {
                receive(&socket, &shared.received[i].0, &shared.stop, check_order)
            })?;
            sink.threads.push(thread);
        }
        Ok(sink)
    }

    /// Datagrams received so far by all threads.
    pub fn received(&self) -> u64 {
        let lines = self.shared.received.iter();
        lines.map(|line| line.0.load(Ordering::Relaxed)).sum()
    }

    /// Datagrams dropped at the sockets so far.
    pub fn dropped(&self) -> Result<u64> {
        self.sockets.iter().map(|socket| drops(socket)).sum()
    }

    /// Stops the threads once their sockets are empty.
    pub fn stop(mut self) -> Result<SinkReport> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut cpu_ns = Vec::new();
        let mut reordered = 0;
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(done) => {
                    let done = done.context("a sink's thread did not start")??;
                    cpu_ns.push(done.cpu_ns);
                    reordered += done.reordered;
                }
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        let lines = self.shared.received.iter();
        Ok(SinkReport {
            received: lines.map(|line| line.0.load(Ordering::Relaxed)).collect(),
            dropped: self.dropped()?,
            reordered,
            cpu_ns,
        })
    }
}

impl Drop for Sink {
    /// The threads end by themselves, within their idle time.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

fn open(config: &SinkConfig) -> Result<OwnedFd> {
    let family = match config.local {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let fd = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::ReusePort, &config.reuseport)?;
    // FORCE: net.core.rmem_max is the host's and stays as it is.
    setsockopt(&fd, sockopt::RcvBufForce, &config.rcvbuf)?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(config.local))?;
    let socket = UdpSocket::from(fd);
    socket.set_read_timeout(Some(IDLE))?;
    if let Some(peer) = config.peer {
        socket.connect(peer)?;
    }
    Ok(socket.into())
}

/// Makes the number of the CPU that a packet is processed on the number of its socket, in the order
/// in which the sockets of this one's SO_REUSEPORT group were bound.
fn choose_by_cpu(socket: &OwnedFd) -> Result<()> {
    let instruction = |code, k| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let cpu = (libc::SKF_AD_OFF + libc::SKF_AD_CPU) as u32;
    let mut code = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, cpu),
        instruction(libc::BPF_RET | libc::BPF_A, 0),
    ];
    let program = libc::sock_fprog {
        len: code.len() as u16,
        filter: code.as_mut_ptr(),
    };
    // SAFETY: the kernel copies the program during the call.
    let ret = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    nix::errno::Errno::result(ret).context("sockets cannot be chosen by CPU")?;
    Ok(())
}

/// Receives until told to stop and nothing is left.
fn receive(
    socket: &OwnedFd,
    received: &AtomicU64,
    stop: &AtomicBool,
    check_order: bool,
) -> Result<Done> {
    let mut order = Order::default();
    let mut data = vec![0u8; BATCH * DATAGRAM];
    let mut vectors: Vec<libc::iovec> = data
        .chunks_exact_mut(DATAGRAM)
        .map(|buffer| libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        })
        .collect();
    let mut messages: Vec<libc::mmsghdr> = vectors
        .iter_mut()
        .map(|vector| {
            // SAFETY: a message header of zeros is valid.
            let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
            message.msg_hdr.msg_iov = vector;
            message.msg_hdr.msg_iovlen = 1;
            message
        })
        .collect();
    loop {
        // Read before the socket is found empty: what came before the order to stop is counted.
        let last = stop.load(Ordering::Relaxed);
        // SAFETY: the headers point to `vectors`, those to `data`; all outlive the call.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                messages.as_mut_ptr(),
                BATCH as u32,
                if last {
                    libc::MSG_DONTWAIT
                } else {
                    libc::MSG_WAITFORONE
                },
                std::ptr::null_mut(),
            )
        };
        if count > 0 {
            if check_order {
                for message in &messages[..count as usize] {
                    // SAFETY: the header points to one vector, that to a whole buffer of `data`, of
                    // which the kernel has written this much.
                    let payload = unsafe {
                        let buffer = (*message.msg_hdr.msg_iov).iov_base;
                        std::slice::from_raw_parts(buffer.cast(), message.msg_len as usize)
                    };
                    order.see(payload);
                }
            }
            received.fetch_add(count as u64, Ordering::Relaxed);
            continue;
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock if last => {
                return Ok(Done {
                    cpu_ns: thread_cpu_ns()?,
                    reordered: order.reordered,
                });
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
            _ => return Err(error).context("recvmmsg() failed"),
        }
    }
}

/// The socket's drop counter (SK_MEMINFO_DROPS in linux/sock_diag.h).
fn drops(socket: &OwnedFd) -> Result<u64> {
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
