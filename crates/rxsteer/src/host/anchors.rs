// SPDX-License-Identifier: MIT OR Apache-2.0
//! Anchors: entries of the kernel's `rps_sock_flow_table`, each of which takes the packets of one hash to
//! one CPU.
//!
//! The kernel writes an entry when a socket is read: the hash of the socket's last packet goes to the CPU
//! that reads (`sock_rps_record_flow()` in include/net/rps.h). An anchor is such a socket, on the loopback
//! device of a network namespace that has nothing else; a program at its egress gives packets their hash.
//! The table is the host's, the same in all namespaces. Since Linux 6.16 the entry ends with the socket.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, unshare};
use nix::unistd::Pid;

use super::ifreq::set_up;
use super::tc::{self, Hook};

/// The loopback device of every network namespace.
const LOOPBACK: u32 = 1;

/// Limit on a datagram's way through the loopback device.
const TIMEOUT: Duration = Duration::from_secs(5);

type Reply<T> = mpsc::SyncSender<Result<T>>;

enum Wish {
    Add(u32, u32, Reply<()>),
    Renew(u32, Reply<()>),
    Remove(u32),
    Touch(u32, Reply<()>),
}

/// See the module's documentation. Dropping it closes the sockets.
#[derive(Debug)]
pub struct Anchors {
    wishes: Option<mpsc::Sender<Wish>>,
    thread: Option<JoinHandle<()>>,
}

/// The thread that is in the namespace.
struct Keeper<F> {
    sender: UdpSocket,
    set_hash: F,
    /// By hash: the socket, and its CPU.
    sockets: BTreeMap<u32, (UdpSocket, u32)>,
    _hashing: tc::TcLink,
}

impl Anchors {
    /// Makes the namespace. `hashing`: a program for a tc egress, which gives each packet the hash that
    /// `set_hash` has set last.
    ///
    /// # Errors
    /// When the kernel refuses a namespace or the program.
    pub fn new(hashing: OwnedFd, set_hash: impl Fn(u32) + Send + 'static) -> Result<Self> {
        let (wishes, wished) = mpsc::channel();
        let (ready, begun) = mpsc::sync_channel(1);
        let thread = thread::Builder::new()
            .name("anchors".to_owned())
            .spawn(move || match Keeper::new(&hashing, set_hash) {
                Ok(mut keeper) => {
                    let _ = ready.send(Ok(()));
                    keeper.serve(&wished);
                }
                Err(e) => drop(ready.send(Err(e))),
            })?;
        begun
            .recv()
            .context("the thread of the anchors has ended")??;
        Ok(Self {
            wishes: Some(wishes),
            thread: Some(thread),
        })
    }

    fn ask<T>(&self, wish: impl FnOnce(Reply<T>) -> Wish) -> Result<T> {
        let ended = || anyhow!("the thread of the anchors has ended");
        let (reply, answer) = mpsc::sync_channel(1);
        let wishes = self.wishes.as_ref().ok_or_else(ended)?;
        wishes.send(wish(reply)).map_err(|_| ended())?;
        match answer.recv_timeout(2 * TIMEOUT) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                bail!("a CPU gives the thread of the anchors no time: is there a real-time task?")
            }
            Err(RecvTimeoutError::Disconnected) => Err(ended()),
        }
    }

    /// Packets with this hash go to this CPU from now on.
    ///
    /// # Errors
    /// When the CPU is offline, or too many files are open.
    pub fn add(&self, hash: u32, cpu: u32) -> Result<()> {
        self.ask(|reply| Wish::Add(hash, cpu, reply))
    }

    /// Writes the entry of an anchor again: another socket, of the same entry, has replaced it.
    ///
    /// # Errors
    /// When the CPU is offline, or there is no such anchor.
    pub fn renew(&self, hash: u32) -> Result<()> {
        self.ask(|reply| Wish::Renew(hash, reply))
    }

    /// Closes an anchor's socket.
    pub fn remove(&self, hash: u32) {
        if let Some(wishes) = &self.wishes {
            let _ = wishes.send(Wish::Remove(hash));
        }
    }

    /// Sends a packet through the CPU's softnet backlog.
    ///
    /// # Errors
    /// When the CPU is offline.
    pub fn touch(&self, cpu: u32) -> Result<()> {
        self.ask(|reply| Wish::Touch(cpu, reply))
    }
}

impl Drop for Anchors {
    fn drop(&mut self) {
        self.wishes = None;
        let start = Instant::now();
        // One that a CPU gives no time ends with the process.
        if let Some(thread) = self.thread.take() {
            while !thread.is_finished() && start.elapsed() < TIMEOUT {
                thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

impl<F: Fn(u32)> Keeper<F> {
    fn new(hashing: &OwnedFd, set_hash: F) -> Result<Self> {
        unshare(CloneFlags::CLONE_NEWNET).context("no network namespace for anchors")?;
        set_up("lo").context("the anchors' loopback device")?;
        Ok(Self {
            _hashing: tc::attach(hashing.as_fd(), LOOPBACK, Hook::Egress)?,
            sender: UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?,
            set_hash,
            sockets: BTreeMap::new(),
        })
    }

    fn serve(&mut self, wished: &mpsc::Receiver<Wish>) {
        for wish in wished {
            match wish {
                Wish::Add(hash, cpu, reply) => drop(reply.send(self.add(hash, cpu))),
                Wish::Renew(hash, reply) => drop(reply.send(self.renew(hash))),
                Wish::Remove(hash) => drop(self.sockets.remove(&hash)),
                Wish::Touch(cpu, reply) => drop(reply.send(self.pass(0, cpu).map(drop))),
            }
        }
    }

    /// Sends a datagram with this hash on a CPU, and receives it there.
    fn pass(&self, hash: u32, cpu: u32) -> Result<UdpSocket> {
        bind(cpu)?;
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.connect(self.sender.local_addr()?)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        (self.set_hash)(hash);
        self.sender.send_to(b"anchor", socket.local_addr()?)?;
        let received = socket.recv(&mut [0; 8]);
        received.with_context(|| format!("no datagram arrives on CPU {cpu}"))?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    }

    fn add(&mut self, hash: u32, cpu: u32) -> Result<()> {
        let socket = self.pass(hash, cpu)?;
        record(&socket)?;
        self.sockets.insert(hash, (socket, cpu));
        Ok(())
    }

    fn renew(&mut self, hash: u32) -> Result<()> {
        let (socket, cpu) = self.sockets.get(&hash).context("no such anchor")?;
        bind(*cpu)?;
        record(socket)
    }
}

fn bind(cpu: u32) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu as usize)?;
    sched_setaffinity(Pid::from_raw(0), &only).with_context(|| {
        format!("the thread of the anchors can't run on CPU {cpu}: it is offline, or outside of the cpuset")
    })
}

/// The kernel writes the entry when a read begins, so also when there is nothing to read; the read that
/// waited for the datagram began before the socket had its hash.
fn record(socket: &UdpSocket) -> Result<()> {
    match socket.recv(&mut [0; 8]) {
        Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(()),
        Ok(_) => Ok(()),
        Err(e) => Err(e).context("an anchor's socket"),
    }
}
