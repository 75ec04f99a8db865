// SPDX-License-Identifier: MIT OR Apache-2.0
//! Control protocol between two hosts: the host under test requests a load, its peer generates it.
//!
//! JSON over TCP, one message per line. The peer greets with its version. For each load it reports
//! that it is connected, that counting has started, and the results; a [`Request`] of the host
//! under test starts each step. The peer connects only to the address of the requesting host.

use std::cell::{Cell, RefCell};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use crate::bench::peer::generator::{Generator, readable};
use crate::bench::peer::load::{Load, Loaded};
use crate::lab::link::End;

/// Default TCP port of the peer.
pub const PORT: u16 = 5533;

/// Both sides must have the same version.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Limit on waiting for a message that is sent at once.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Limit on connecting all sockets of a load.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Limit on the time between two requests.
const IDLE: Duration = Duration::from_secs(120);

/// Limit on a line, bytes; the longest lists the ports of all connections.
const LINE_MAX: usize = 1 << 17;

/// First message of the peer.
#[derive(Debug, Serialize, Deserialize)]
struct Greeting {
    rxsteer: String,
}

/// Messages of the host under test.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Request {
    /// Connects the sockets of a load.
    Connect(Load),
    /// Starts the load.
    Start,
    /// Closes the sockets.
    Close,
}

/// Messages of the peer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Reply {
    /// The sockets are connected, from these ports.
    Connected(Vec<u16>),
    /// The warm-up is over, and counting has started.
    Started,
    /// The load has ended, with these results.
    Loaded(Loaded),
    /// The request failed, for this reason; the sockets are closed.
    Failed(String),
}

/// Result of waiting on the control connection.
enum Heard<T> {
    Line(T),
    /// The other side closed the connection.
    End,
    /// The `stop` descriptor is readable.
    Stop,
}

/// A control connection.
struct Control {
    stream: TcpStream,
    /// Start of the next line.
    read: Vec<u8>,
}

impl Control {
    fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let read = Vec::new();
        Ok(Self { stream, read })
    }

    fn say(&mut self, what: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        self.stream.write_all(&line).context("control connection")
    }

    /// Waits for a line, for `stop` or for the timeout.
    fn hear<T: DeserializeOwned>(
        &mut self,
        stop: Option<BorrowedFd>,
        timeout: Duration,
    ) -> Result<Heard<T>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(end) = self.read.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                let line = serde_json::from_slice(&line);
                return Ok(Heard::Line(line.context("not rxsteer of this version")?));
            }
            ensure!(self.read.len() < LINE_MAX, "a line without an end");
            let mut fds = vec![self.stream.as_fd()];
            fds.extend(stop);
            match readable(&fds, Some(deadline))? {
                None => bail!("silent for {} s", timeout.as_secs()),
                Some(0) => {}
                Some(_) => return Ok(Heard::Stop),
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(Heard::End),
                bytes => match bytes.context("control connection")? {
                    0 => return Ok(Heard::End),
                    bytes => self.read.extend_from_slice(&buffer[..bytes]),
                },
            }
        }
    }
}

/// The peer.
pub struct Server {
    listener: TcpListener,
}

impl Server {
    /// Listens at an address, by default on [`PORT`] of all addresses.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn bind(listen: Option<SocketAddr>) -> Result<Self> {
        // The first covers IPv4, too, where there is IPv6.
        let any: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
        let addresses = match listen {
            Some(address) => vec![address],
            None => any.map(|any| SocketAddr::new(any, PORT)).to_vec(),
        };
        let listener = TcpListener::bind(&addresses[..])
            .with_context(|| format!("cannot listen on {}", addresses[0]))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener })
    }

    /// The listening address.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn address(&self) -> Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// Serves one host after the other until `stop` is readable. Reports each load and each failed
    /// connection to `say`.
    ///
    /// # Errors
    /// When it can't listen any more.
    pub fn serve(&self, stop: BorrowedFd, say: &dyn Fn(&str)) -> Result<()> {
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
        // Each connection of a load takes a descriptor.
        setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
        loop {
            if readable(&[self.listener.as_fd(), stop], None)? == Some(1) {
                return Ok(());
            }
            let (stream, from) = match self.listener.accept() {
                Err(error) if has_gone(error.kind()) => continue,
                accepted => accepted.context("no control connections any more")?,
            };
            let host = from.ip().to_canonical();
            let say = |what: &str| say(&format!("{host}: {what}"));
            let served =
                Control::new(stream).and_then(|control| Service { control, stop }.run(&say));
            if let Err(error) = served {
                say(&format!("{error:#}"));
            }
        }
    }
}

/// The connection to be accepted was closed before.
fn has_gone(error: ErrorKind) -> bool {
    matches!(error, ErrorKind::WouldBlock | ErrorKind::ConnectionAborted)
}

/// The peer's side of a control connection.
struct Service<'a> {
    control: Control,
    stop: BorrowedFd<'a>,
}

impl Service<'_> {
    fn run(mut self, say: &dyn Fn(&str)) -> Result<()> {
        let rxsteer = VERSION.to_owned();
        self.control.say(&Greeting { rxsteer })?;
        let mut generator = None;
        loop {
            let Heard::Line(request) = self.control.hear(Some(self.stop), IDLE)? else {
                return Ok(());
            };
            // The sockets of the load before are closed first.
            let (reply, next) = match (request, generator.take()) {
                (Request::Close, _) => continue,
                (Request::Connect(load), before) => {
                    drop(before);
                    say(&load.to_string());
                    match self.connect(&load) {
                        Ok((generator, ports)) => (Reply::Connected(ports), Some(generator)),
                        Err(error) => (Reply::Failed(format!("{error:#}")), None),
                    }
                }
                (Request::Start, None) => bail!("asked to start without a load"),
                (Request::Start, Some(generator)) => match self.load(&generator) {
                    Ok(loaded) => (Reply::Loaded(loaded), Some(generator)),
                    Err(error) => (Reply::Failed(format!("{error:#}")), None),
                },
            };
            self.control.say(&reply)?;
            generator = next;
        }
    }

    /// Connects to the requesting host only.
    fn connect(&self, load: &Load) -> Result<(Generator, Vec<u16>)> {
        let stream = &self.control.stream;
        let (from, to) = (stream.local_addr()?, stream.peer_addr()?);
        let generator = Generator::connect(load, canonical(from), canonical(to))?;
        let ports = generator.ports()?;
        Ok((generator, ports))
    }

    /// Runs a load until its time is over. A message or a close by the host under test interrupts
    /// it.
    fn load(&mut self, generator: &Generator) -> Result<Loaded> {
        let control = self.control.stream.try_clone()?;
        generator.run(&[control.as_fd(), self.stop], || {
            self.control.say(&Reply::Started)
        })
    }
}

/// Converts an IPv4-mapped address to IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V6(_) => address,
        v4 => SocketAddr::new(v4, address.port()),
    }
}

/// The host under test's side of a control connection.
pub struct Peer {
    control: RefCell<Control>,
    address: SocketAddr,
    /// Whether the next message is a request.
    at_rest: Cell<bool>,
}

impl Peer {
    /// Connects from a device's address, which becomes the destination of the load.
    ///
    /// # Errors
    /// Nothing listens, or the versions differ.
    pub fn connect(end: &End, to: SocketAddr) -> Result<Self> {
        let stream = end
            .netns
            .run(|| {
                let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
                let from = SocketAddr::new(end.address_towards(to.ip())?, 0);
                socket.bind(&from.into())?;
                socket.connect_timeout(&to.into(), TIMEOUT)?;
                Ok(TcpStream::from(socket))
            })
            .with_context(|| {
                format!(
                    "no connection from {} to {to}: does `rxlab bench serve` run there?",
                    end.name
                )
            })?;
        let mut control = Control::new(stream)?;
        let Heard::Line(Greeting { rxsteer }) = control
            .hear(None, TIMEOUT)
            .with_context(|| format!("{to} does not greet: does it serve another host?"))?
        else {
            bail!("{to} has ended the connection");
        };
        ensure!(
            rxsteer == VERSION,
            "{to} is rxsteer {rxsteer}, this is {VERSION}: use one version on both hosts"
        );
        Ok(Self {
            control: RefCell::new(control),
            address: to,
            at_rest: Cell::new(true),
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Makes the peer connect all sockets of a load. The server must listen with a backlog for all
    /// of them.
    ///
    /// # Errors
    /// When the peer can't connect.
    pub fn prepare(&self, load: &Load) -> Result<Session<'_>> {
        self.say(&Request::Connect(load.clone()))?;
        match self.hear(CONNECT_TIMEOUT)? {
            Reply::Connected(ports) => Ok(Session {
                peer: self,
                timeout: Duration::from_secs_f64(load.warm_up + load.seconds) + TIMEOUT,
                ports,
            }),
            reply => bail!("{}: unexpected {reply:?}", self.address),
        }
    }

    /// Runs a load from start to end.
    ///
    /// # Errors
    /// The load failed, or the peer is gone.
    pub fn load(&self, load: &Load) -> Result<Loaded> {
        let session = self.prepare(load)?;
        session.start()?;
        session.end()
    }

    fn say(&self, request: &Request) -> Result<()> {
        ensure!(
            self.at_rest.replace(false),
            "the peer {} is in the middle of another load",
            self.address
        );
        let mut control = self.control.borrow_mut();
        let said = control.say(request);
        said.with_context(|| format!("peer {}", self.address))
    }

    fn hear(&self, timeout: Duration) -> Result<Reply> {
        let mut control = self.control.borrow_mut();
        let heard = control.hear(None, timeout);
        let reply = match heard.with_context(|| format!("peer {}", self.address))? {
            Heard::Line(reply) => reply,
            Heard::End | Heard::Stop => bail!("the peer {} is gone", self.address),
        };
        self.at_rest.set(!matches!(reply, Reply::Started));
        match reply {
            Reply::Failed(why) => bail!("peer {}: {why}", self.address),
            reply => Ok(reply),
        }
    }
}

/// A load with connected sockets. Dropping it closes them.
pub struct Session<'a> {
    peer: &'a Peer,
    timeout: Duration,
    ports: Vec<u16>,
}

impl Session<'_> {
    /// Addresses of the peer's sockets.
    pub fn sources(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let ports = self.ports.iter();
        ports.map(|&port| SocketAddr::new(self.peer.address.ip(), port))
    }

    /// Starts the load; returns after its warm-up, when counting starts.
    ///
    /// # Errors
    /// The load failed, or the peer is gone.
    pub fn start(&self) -> Result<()> {
        self.peer.say(&Request::Start)?;
        match self.peer.hear(self.timeout)? {
            Reply::Started => Ok(()),
            reply => bail!("{}: unexpected {reply:?}", self.peer.address),
        }
    }

    /// Waits for the results.
    ///
    /// # Errors
    /// The load failed, or the peer is gone.
    pub fn end(&self) -> Result<Loaded> {
        match self.peer.hear(self.timeout)? {
            Reply::Loaded(loaded) => Ok(loaded),
            reply => bail!("{}: unexpected {reply:?}", self.peer.address),
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if self.peer.at_rest.get() {
            let _ = self.peer.say(&Request::Close);
            self.peer.at_rest.set(true);
        } else {
            // Closing the control connection ends a running load.
            let control = self.peer.control.borrow();
            let _ = control.stream.shutdown(Shutdown::Both);
        }
    }
}
