// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sockets that may write entries of the sock_flow_table.

use std::io::{self, Write};
use std::mem::zeroed;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, unshare};
use nix::unistd::Pid;
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::testing::app::App;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, until};
use rxsteer::api::client;
use rxsteer::api::explain::{Application, Name, Question};
use rxsteer::daemon::options::Options;
use rxsteer::datapath::flow::Flow;
use rxsteer::datapath::policy::Policy;
use socket2::{Domain, Socket, Type};

const ROOT: u32 = 0;
const NOBODY: u32 = 65534;

const TCP: u8 = libc::IPPROTO_TCP as u8;
const UDP: u8 = libc::IPPROTO_UDP as u8;

/// The peer of the sockets, which does not exist.
const PEER: (Ipv4Addr, u16) = (Ipv4Addr::new(198, 18, 9, 9), 4000);
const LOCAL_PORT: u16 = 5009;
/// An address beside the peer's.
const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(198, 18, 9, 10);

/// The flow's entry in the table, as `explain` reads it.
fn application(netns: &Netns, flow: &Flow) -> Result<Application> {
    let question = Question {
        names: vec![Name::Flow(*flow)],
        limit: 1,
        ..Question::default()
    };
    let answer = netns.run(|| client::explain(question))?;
    let [flow] = &answer.flows[..] else {
        anyhow::bail!("one flow, not {answer:?}");
    };
    Ok(flow.application.clone())
}

/// A process in a network namespace of its own with a [`conversation`] in it.
struct Elsewhere(Child);

impl Elsewhere {
    /// Made by user `uid` on `cpu`. A network namespace belongs to the user namespace in which it
    /// is made: with `user_namespace`, a new one, in which every user may make one.
    fn new(uid: u32, user_namespace: bool, cpu: u32) -> Result<Self> {
        let mut flags = CloneFlags::CLONE_NEWNET;
        flags.set(CloneFlags::CLONE_NEWUSER, user_namespace);
        let mut cpus = CpuSet::new();
        cpus.set(cpu as usize)?;
        let mut command = Command::new("cat"); // until its input ends
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        // SAFETY: the closure makes system calls only, between fork and exec.
        unsafe {
            command.pre_exec(move || {
                sched_setaffinity(Pid::from_raw(0), &cpus)?;
                Errno::result(libc::setresuid(uid, uid, uid))?;
                unshare(flags)?;
                lo_is_peer()?;
                let (_, socket) = conversation()?;
                // exec() leaves it open.
                Errno::result(libc::fcntl(socket.into_raw_fd(), libc::F_SETFD, 0))?;
                Ok(())
            });
        }
        let child = command.spawn();
        Ok(Self(child.context("a socket in another namespace")?))
    }

    fn end(mut self) -> Result<()> {
        drop(self.0.stdin.take());
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Gives `lo` the peer's address, in place of its own, and sets it up: all of the peer's network is
/// local then. Async-signal-safe.
fn lo_is_peer() -> io::Result<()> {
    let peer = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: 0,
        sin_addr: libc::in_addr {
            s_addr: PEER.0.to_bits().to_be(),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: the structure outlives the calls; an ifreq of zeros is valid, and an address fits.
    unsafe {
        let socket = Errno::result(libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0))?;
        let mut lo: libc::ifreq = zeroed();
        lo.ifr_name[0] = b'l' as libc::c_char;
        lo.ifr_name[1] = b'o' as libc::c_char;
        (&raw mut lo.ifr_ifru)
            .cast::<libc::sockaddr_in>()
            .write(peer);
        Errno::result(libc::ioctl(socket, libc::SIOCSIFADDR, &raw const lo))?;
        lo.ifr_ifru.ifru_flags = libc::IFF_UP as i16;
        Errno::result(libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw const lo))?;
        Errno::result(libc::close(socket))?;
    }
    Ok(())
}

/// A socket that is connected to [`PEER`], and has received nothing.
fn connected() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, LOCAL_PORT))?;
    socket.connect(PEER)?;
    Ok(socket)
}

/// The peer sends the socket a datagram, and is answered.
fn exchange(peer: &UdpSocket, socket: &UdpSocket) -> io::Result<()> {
    peer.send_to(b"x", socket.local_addr()?)?;
    socket.recv(&mut [0; 8])?;
    socket.send(b"x")?;
    Ok(())
}

/// [`PEER`] and a socket that is connected to it, and has received from there, behind [`lo_is_peer`].
/// Async-signal-safe.
fn conversation() -> io::Result<(UdpSocket, UdpSocket)> {
    let peer = UdpSocket::bind(PEER)?;
    let socket = connected()?;
    for _ in 0..4 {
        exchange(&peer, &socket)?;
    }
    Ok((peer, socket))
}

/// A thread in a namespace that goes on with a [`conversation`] there.
struct Talk {
    nr: Arc<AtomicU64>,
    _app: App,
}

impl Talk {
    fn start(netns: &Netns, cpu: u32) -> Result<Self> {
        let (peer, socket) = netns.run(|| {
            bind_to(cpu)?;
            lo_is_peer()?;
            Ok(conversation()?)
        })?;
        let nr = Arc::new(AtomicU64::new(0));
        let count = nr.clone();
        let take = move || {
            exchange(&peer, &socket)?;
            count.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
            Ok(1)
        };
        let app = App::start(netns, Box::new(take))?;
        app.move_to(cpu)?;
        Ok(Self { nr, _app: app })
    }

    /// Waits for some more datagrams.
    fn goes_on(&self) -> Result<()> {
        let before = self.nr.load(Ordering::Relaxed);
        until("more datagrams", || {
            Ok((self.nr.load(Ordering::Relaxed) > before + 8).then_some(()))
        })
    }
}

/// Binds the calling thread, which a test made for itself ([`Netns::run`]).
fn bind_to(cpu: u32) -> Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu as usize)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &cpus)?)
}

/// Senders of datagrams to local port `port` whose flows have the same entry of the table as `flow`.
fn senders(netns: &Netns, flow: &Flow, port: u16) -> Result<Vec<SocketAddr>> {
    let senders = (20_000..24_000).map(|sender| SocketAddr::from((Ipv4Addr::LOCALHOST, sender)));
    let names: Vec<_> = senders
        .map(|sender| Name::Flow(Flow::of_socket(UDP, sender, port)))
        .collect();
    let question = Question {
        limit: names.len(),
        names,
        ..Question::default()
    };
    let answer = netns.run(|| client::explain(question))?;
    let entry = application(netns, flow)?.entry;
    let same = answer.flows.iter().filter(|e| e.application.entry == entry);
    let senders = same.filter_map(|e| match e.flow {
        Some(Flow::Ports { remote, .. }) => Some(remote),
        _ => None,
    });
    Ok(senders.collect())
}

/// Datagrams with made-up senders don't take the entry of a connection, but for one in 1024.
#[test]
fn datagrams_do_not_take_the_entry_of_a_connection() -> Result<()> {
    const ROUNDS: usize = 200;
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let netns = &bed.link.dut.netns;
    // So few that many senders share one, so many that other flows of the host hardly do.
    let options = Options {
        rps_sock_flow_entries: 256,
        ..rfs(&bed)
    };
    let active = Active::steer(&bed.link.dut, options)?;
    let has_entry = |flow: &Flow| Ok::<_, anyhow::Error>(application(netns, flow)?.cpu.is_some());
    netns.run(|| {
        // A socket that threads on several CPUs read would not be recorded.
        let mut cpus = CpuSet::new();
        cpus.set(OTHER_CPU as usize)?;
        sched_setaffinity(Pid::from_raw(0), &cpus)?;

        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let connect = || {
            let client = TcpStream::connect(listener.local_addr()?)?;
            let port = client.local_addr()?.port();
            let flow = Flow::of_socket(TCP, listener.local_addr()?, port);
            Ok::<_, anyhow::Error>((client, flow))
        };
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let to = server.local_addr()?;
        let (mut client, connection) = connect()?;
        let sharing = senders(netns, &connection, to.port())?;
        let mut next = sharing.iter().cycle();
        // The server receives a datagram.
        let mut datagram = || -> Result<Flow> {
            let from = *next.next().context("a sender")?;
            UdpSocket::bind(from)?.send_to(b"x", to)?;
            assert_eq!(server.recv_from(&mut [0; 8])?.1, from);
            Ok(Flow::of_socket(UDP, from, to.port()))
        };
        assert!(has_entry(&datagram()?)?, "the entry was free");
        assert!(has_entry(&datagram()?)?, "and that of a datagram");

        let mut kept = 0;
        for _ in 0..ROUNDS {
            client.write_all(b"x")?;
            assert!(has_entry(&connection)?, "a connection takes every entry");
            datagram()?;
            kept += u32::from(has_entry(&connection)?);
        }
        // 199.8 are expected; chance gives less than 190 in one of 10^13 runs.
        assert!(kept >= 190, "{kept} of {ROUNDS}");

        // A connection that is not used any more does not keep it for ever.
        until("a datagram has the entry", || {
            Ok(has_entry(&datagram()?)?.then_some(()))
        })?;
        // The entry of a closed one is free at once.
        client.write_all(b"x")?;
        assert!(has_entry(&connection)?);
        drop(client);
        assert!(!has_entry(&connection)?);
        assert!(has_entry(&datagram()?)?);

        // The control: sockets that are connected take the entries of others.
        let (mut client, connection) = connect()?;
        client.write_all(b"x")?;
        assert!(has_entry(&connection)?);
        let sharing = senders(netns, &connection, to.port())?;
        let sender = UdpSocket::bind(sharing.first().context("a sender")?)?;
        server.connect(sender.local_addr()?)?;
        for _ in 0..2 {
            sender.send_to(b"x", to)?;
            server.recv(&mut [0; 8])?;
        }
        assert!(!has_entry(&connection)?);
        Ok(())
    })?;
    active.stop()
}

/// Policy rfs alone, on the test's link.
fn rfs(bed: &Testbed) -> Options {
    Options {
        policy: Policy::RFS,
        ..bed.options(&[POLLING_CPU])
    }
}

/// Only data that was received writes an entry, on a socket that has received from its peer.
#[test]
fn only_received_data_is_recorded() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let active = Active::steer(dut, rfs(&bed))?;
    let flow_of = |proto| Flow::of_socket(proto, SocketAddr::from(PEER), LOCAL_PORT);
    let cpu = |proto| Ok::<_, anyhow::Error>(application(&dut.netns, &flow_of(proto))?.cpu);
    dut.netns.run(|| {
        bind_to(OTHER_CPU)?;
        lo_is_peer()?;
        let peer = UdpSocket::bind(PEER)?;
        let socket = connected()?;
        socket.set_nonblocking(true)?;
        for _ in 0..4 {
            socket.send(b"x")?;
            assert!(socket.recv(&mut [0; 8]).is_err());
        }
        assert_eq!(cpu(UDP)?, None, "it has received nothing");
        drop(socket);

        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, LOCAL_PORT))?;
        let other = UdpSocket::bind((PEER.0, 0))?;
        for _ in 0..8 {
            other.send_to(b"x", (PEER.0, LOCAL_PORT))?;
        }
        socket.connect(PEER)?;
        for _ in 0..8 {
            socket.recv(&mut [0; 8])?;
            socket.send(b"x")?;
        }
        assert_eq!(cpu(UDP)?, None, "it has received from another one");
        // The control.
        for _ in 0..2 {
            exchange(&peer, &socket)?;
        }
        assert_eq!(cpu(UDP)?, Some(OTHER_CPU));
        // Nor does one that has received nothing remove the entry.
        let second = UdpSocket::bind((NEIGHBOUR, LOCAL_PORT))?;
        second.connect(PEER)?;
        drop(second);
        assert_eq!(cpu(UDP)?, Some(OTHER_CPU));
        drop(socket);
        assert_eq!(cpu(UDP)?, None, "closed");

        // The kernel answers no connection while another one waits to be accepted.
        let listener = TcpListener::bind(PEER)?;
        // SAFETY: no memory is passed.
        Errno::result(unsafe { libc::listen(listener.as_raw_fd(), 0) })?;
        let first = TcpStream::connect(PEER)?;
        let client = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        client.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, LOCAL_PORT)).into())?;
        client.set_nonblocking(true)?;
        for _ in 0..4 {
            assert!(client.connect(&SocketAddr::from(PEER).into()).is_err());
            assert!(client.send(b"x").is_err());
        }
        assert_eq!(cpu(TCP)?, None, "it is not connected");
        // The control.
        listener.accept()?;
        until("a connection", || Ok(client.send(b"x").ok()))?;
        assert_eq!(cpu(TCP)?, Some(OTHER_CPU));
        drop((first, client));
        assert_eq!(cpu(TCP)?, None, "closed");
        Ok(())
    })?;
    active.stop()
}

/// Sockets of a network namespace that no steered packet reaches write no entries, and remove none:
/// whoever has the namespace can send himself data from any address.
#[test]
fn namespaces_that_no_packet_reaches_have_no_entries() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let active = Active::steer(dut, rfs(&bed))?;
    let flow = Flow::of_socket(UDP, SocketAddr::from(PEER), LOCAL_PORT);
    let cpu = || Ok::<_, anyhow::Error>(application(&dut.netns, &flow)?.cpu);

    // Of a user, of root with users of its own, and of root; the senders' side of the device.
    let mut others = Vec::new();
    for (uid, user_namespace) in [(NOBODY, true), (ROOT, true), (ROOT, false)] {
        match Elsewhere::new(uid, user_namespace, OTHER_CPU) {
            Ok(other) => others.push(other),
            Err(e) if uid == NOBODY => {
                let reason = format!("users can't make namespaces here: {e:#}");
                rxlab::testing::not_run(rxlab::test_name!(), &reason);
            }
            Err(e) => return Err(e),
        }
        assert_eq!(cpu()?, None, "{uid} {user_namespace}");
    }
    let alone = Netns::new("alone")?;
    let forgers = [&alone, &bed.link.tester.netns];
    let forgers = forgers.map(|netns| Talk::start(netns, OTHER_CPU));
    let forgers: Vec<Talk> = forgers.into_iter().collect::<Result<_>>()?;
    assert_eq!(cpu()?, None);

    // The control: the namespace of a container, behind a veth of the device's.
    let config = LinkConfig {
        id: dut.id + 1,
        ..Default::default()
    };
    let container = Link::new(&dut.netns, &Netns::new("container")?, &config)?;
    let talk = Talk::start(&container.dut.netns, POLLING_CPU)?;
    until("a container's socket has the entry", || {
        Ok(cpu()?.map(|cpu| assert_eq!(cpu, POLLING_CPU)))
    })?;
    // By now it is known of the others too what they are.
    for forger in forgers {
        forger.goes_on()?;
        assert_eq!(cpu()?, Some(POLLING_CPU), "changed");
        drop(forger);
        talk.goes_on()?;
        assert_eq!(cpu()?, Some(POLLING_CPU), "removed");
    }
    for other in others {
        other.end()?;
    }
    assert_eq!(cpu()?, Some(POLLING_CPU), "removed");
    drop(talk);
    assert_eq!(cpu()?, None, "closed");
    active.stop()
}
