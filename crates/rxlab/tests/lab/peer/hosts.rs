// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two hosts; one generates load on the other.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use rxlab::bench::peer::load::{Kind, Load, SIZE_MAX, Transport};
use rxlab::bench::peer::server::{Peer, Server};
use rxlab::lab::link::{End, Link, LinkConfig};
use rxlab::lab::netns::{Netns, Thread};
use rxlab::testing::testbed::until;

pub const RXLAB: &str = env!("CARGO_BIN_EXE_rxlab");

/// Port of the server.
pub const PORT: u16 = 7;

/// Size of requests, bytes.
pub const REQUEST: usize = 64;

/// The two hosts, and the peer's `bench serve`.
pub struct Hosts {
    pub link: Link,
    /// The device under test, in its host.
    pub end: End,
    pub peer: SocketAddr,
    pub stop: Option<OwnedFd>,
    pub serving: Option<Thread<Result<()>>>,
}

impl Hosts {
    pub fn new() -> Result<Self> {
        let config = LinkConfig {
            queues: 2,
            ipv6: true,
            ..Default::default()
        };
        let link = Link::new(&Netns::new("peer")?, &Netns::new("host")?, &config)?;
        let end = link.dut.netns.run(|| End::of_host(&link.dut.name))?;
        let tester = &link.tester;
        let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
        let server = tester.netns.run(|| Server::bind(Some(any)))?;
        let peer = SocketAddr::new(tester.ipv4.into(), server.address()?.port());
        let (wait, stop) = nix::unistd::pipe()?;
        let serving = tester.netns.spawn(None, "serve", move || {
            server.serve(std::os::fd::AsFd::as_fd(&wait), &|_| ())
        })?;
        Ok(Self {
            link,
            end,
            peer,
            stop: Some(stop),
            serving: Some(serving),
        })
    }

    pub fn connect(&self) -> Result<Peer> {
        Peer::connect(&self.end, self.peer)
    }

    /// Stops `serve`, which must end without an error.
    pub fn stop(&mut self) -> Result<()> {
        self.stop = None;
        let serving = self.serving.take().context("it is stopped once")?;
        until("serve ends", || Ok(serving.is_finished().then_some(())))?;
        serving.join()
    }
}

/// A server that echoes and counts.
pub struct Echo {
    pub stop: Arc<AtomicBool>,
    /// Datagrams received, or bytes.
    pub got: Arc<AtomicU64>,
    pub accepted: Arc<AtomicU64>,
    pub thread: Option<Thread<()>>,
}

/// Behaviour of an [`Echo`].
#[derive(Clone, Copy, PartialEq)]
pub enum Does {
    Answer,
    /// Reads without an answer.
    Swallow,
    /// Answers all datagrams but the first.
    MissOne,
    /// Answers with the number of another request.
    Confuse,
    /// Answers a few requests, then closes the connection.
    Leave,
}

impl Echo {
    pub fn start(netns: &Netns, transport: Transport, does: Does) -> Result<Self> {
        let mut echo = Self {
            stop: Arc::default(),
            got: Arc::default(),
            accepted: Arc::default(),
            thread: None,
        };
        let any = (Ipv6Addr::UNSPECIFIED, PORT);
        let (stop, got, accepted) = (echo.stop.clone(), echo.got.clone(), echo.accepted.clone());
        let thread = match transport {
            Transport::Udp => {
                let socket = netns.run(|| rxlab::testing::app::soon(UdpSocket::bind(any)?))?;
                netns.spawn(None, "echo", move || {
                    let mut buffer = [0; 2 * SIZE_MAX];
                    while !stop.load(Ordering::Relaxed) {
                        let Ok((len, from)) = socket.recv_from(&mut buffer) else {
                            continue;
                        };
                        let nr = got.fetch_add(1, Ordering::Relaxed);
                        buffer[0] ^= u8::from(does == Does::Confuse);
                        if does != Does::MissOne || nr > 0 {
                            let _ = socket.send_to(&buffer[..len], from);
                        }
                    }
                })?
            }
            Transport::Tcp => {
                let listener = netns.run(|| Ok(TcpListener::bind(any)?))?;
                listener.set_nonblocking(true)?;
                netns.spawn(None, "echo", move || {
                    std::thread::scope(|scope| {
                        while !stop.load(Ordering::Relaxed) {
                            match listener.accept() {
                                Ok((stream, _)) => {
                                    accepted.fetch_add(1, Ordering::Relaxed);
                                    scope.spawn(|| converse(stream, &got, &stop, does));
                                }
                                Err(_) => std::thread::sleep(Duration::from_millis(1)),
                            }
                        }
                    });
                })?
            }
        };
        echo.thread = Some(thread);
        Ok(echo)
    }

    pub fn got(&self) -> u64 {
        self.got.load(Ordering::Relaxed)
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.take() {
            Some(thread) if !std::thread::panicking() => thread.join(),
            _ => {}
        }
    }
}

pub fn converse(mut stream: TcpStream, got: &AtomicU64, stop: &AtomicBool, does: Does) {
    let timeout = Some(Duration::from_millis(20));
    stream.set_read_timeout(timeout).expect("above zero");
    let mut buffer = vec![0; 1 << 16];
    let mut answers = 0;
    while !stop.load(Ordering::Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(len) => {
                got.fetch_add(len as u64, Ordering::Relaxed);
                if does != Does::Swallow && stream.write_all(&buffer[..len]).is_err() {
                    return;
                }
                answers += 1;
                if does == Does::Leave && answers == 10 {
                    return;
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

pub fn rr(transport: Transport, connections: u32) -> Load {
    Load {
        kind: Kind::Rr {
            transport,
            request: REQUEST,
            response: REQUEST,
        },
        connections,
        port: PORT,
        warm_up: 0.0,
        seconds: 0.3,
    }
}

/// A load that exceeds every timeout.
pub fn endless(transport: Transport) -> Load {
    Load {
        seconds: 500.0,
        ..rr(transport, 3)
    }
}
