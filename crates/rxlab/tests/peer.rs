// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two hosts, played by two namespaces: one under test, and the peer that puts the load on it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::bench::experiment::{Effort, On, Only, Unfit};
use rxlab::bench::peer::load::{CONNECTIONS_MAX, Kind, Load, SIZE_MAX, Transport};
use rxlab::bench::peer::server::{Peer, Server};
use rxlab::bench::scenario::Scenario;
use rxlab::bench::setup::mode::{Active, Mode};
use rxlab::bench::setup::pair::Pair;
use rxlab::lab::link::{End, Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::xdp::Xdp;
use rxlab::testing::bed::{OTHER_CPU, lab, mask, until};
use rxsteer::host::device::{Device, XdpMode};
use rxsteer::host::setting::Setting;

const RXLAB: &str = env!("CARGO_BIN_EXE_rxlab");

/// The server's.
const PORT: u16 = 7;

/// Bytes of requests.
const REQUEST: usize = 64;

/// The two hosts, and the peer's rxsteer.
struct Hosts {
    link: Link,
    /// The device under test, as its host sees it.
    end: End,
    peer: SocketAddr,
    stop: Option<OwnedFd>,
    serving: Option<JoinHandle<Option<Result<()>>>>,
}

impl Hosts {
    fn new() -> Result<Self> {
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

    fn connect(&self) -> Result<Peer> {
        Peer::connect(&self.end, self.peer)
    }

    /// Ends `serve`, which must end by itself.
    fn stop(&mut self) -> Result<()> {
        self.stop = None;
        let serving = self.serving.take().context("it is stopped once")?;
        until("serve ends", || Ok(serving.is_finished().then_some(())))?;
        serving.join().expect("no panic").context("it ran")?
    }
}

/// A server that sends back what it gets, and counts.
struct Echo {
    stop: Arc<AtomicBool>,
    /// Datagrams, or bytes.
    got: Arc<AtomicU64>,
    accepted: Arc<AtomicU64>,
    thread: Option<JoinHandle<Option<()>>>,
}

/// What an [`Echo`] does.
#[derive(Clone, Copy, PartialEq)]
enum Does {
    Answer,
    /// Reads and is silent.
    Swallow,
    /// Answers each datagram but the first.
    MissOne,
    /// Answers to a request that there was not.
    Confuse,
    /// Answers to a few, and ends the connection.
    Leave,
}

impl Echo {
    fn start(netns: &Netns, transport: Transport, does: Does) -> Result<Self> {
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

    fn got(&self) -> u64 {
        self.got.load(Ordering::Relaxed)
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn converse(mut stream: TcpStream, got: &AtomicU64, stop: &AtomicBool, does: Does) {
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

fn rr(transport: Transport, connections: u32) -> Load {
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

/// Longer than anybody waits.
fn endless(transport: Transport) -> Load {
    Load {
        seconds: 500.0,
        ..rr(transport, 3)
    }
}

#[test]
fn transactions() -> Result<()> {
    let Some(_guard) = lab("transactions") else {
        return Ok(());
    };
    let mut hosts = Hosts::new()?;
    let peer = hosts.connect()?;
    for transport in [Transport::Tcp, Transport::Udp] {
        for connections in [1, 50] {
            let echo = Echo::start(&hosts.end.netns, transport, Does::Answer)?;
            let load = rr(transport, connections);
            let loaded = peer.load(&load).with_context(|| load.to_string())?;
            let latency = loaded.latency.context("there were responses")?;
            assert_eq!(latency.count, loaded.transactions, "{loaded:?}");
            assert_eq!((loaded.lost, latency.out_of_range), (0, 0), "{loaded:?}");
            assert!(loaded.seconds >= load.seconds, "{loaded:?}");
            let quantiles = [
                0.0,
                latency.min,
                latency.p50,
                latency.p90,
                latency.p99,
                latency.p999,
                latency.max,
            ];
            assert!(quantiles.is_sorted(), "{loaded:?}");
            assert!(latency.min > 0.0 && latency.max < loaded.seconds * 1e6 + 1e5);
            // Little's law: each connection waits all the time.
            let waited = latency.mean * latency.count as f64 / 1e6;
            let share = waited / loaded.seconds / f64::from(connections);
            assert!((0.2..1.5).contains(&share), "{share}: {loaded:?}");
            assert!(loaded.busy_share > 0.0 && loaded.busiest_share <= 1.0);

            // The server saw these, and at most one more of each connection.
            let requests = match transport {
                Transport::Tcp => echo.got() / REQUEST as u64,
                Transport::Udp => echo.got(),
            };
            let more = requests - loaded.transactions;
            assert!(more <= u64::from(connections), "{requests}: {loaded:?}");
        }
    }
    drop(peer);
    hosts.stop()
}

#[test]
fn nothing_is_counted_before_the_start() -> Result<()> {
    let Some(_guard) = lab("nothing_is_counted_before_the_start") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let peer = hosts.connect()?;
    let echo = Echo::start(&hosts.end.netns, Transport::Udp, Does::Answer)?;
    let session = peer.prepare(&Load {
        warm_up: 0.2,
        ..rr(Transport::Udp, 4)
    })?;
    assert_eq!(echo.got(), 0);
    session.start()?;
    let before = echo.got();
    assert!(before > 4);
    let loaded = session.end()?;
    let (all, counted) = (echo.got(), loaded.transactions);
    assert!(counted > 0 && counted < all, "{counted} of {all}");
    Ok(())
}

#[test]
fn over_ipv6() -> Result<()> {
    let Some(_guard) = lab("over_ipv6") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let to = SocketAddr::new(hosts.link.tester.ipv6.into(), hosts.peer.port());
    let peer = Peer::connect(&hosts.end, to)?;
    for transport in [Transport::Tcp, Transport::Udp] {
        let echo = Echo::start(&hosts.end.netns, transport, Does::Answer)?;
        assert!(peer.load(&rr(transport, 2))?.transactions > 0);
        assert!(echo.got() > 0);
    }
    Ok(())
}

#[test]
fn connections_are_there_before_the_start_and_come_from_known_ports() -> Result<()> {
    let Some(_guard) = lab("connections_are_there_before_the_start") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let peer = hosts.connect()?;
    let listener = hosts
        .end
        .netns
        .run(|| Ok(TcpListener::bind((hosts.end.ipv4, PORT))?))?;
    let session = peer.prepare(&rr(Transport::Tcp, 5))?;
    let mut sources: Vec<_> = session.sources().collect();
    let mut accepted = Vec::new();
    for _ in 0..5 {
        accepted.push(listener.accept()?);
    }
    let mut seen: Vec<_> = accepted.iter().map(|(_, from)| *from).collect();
    sources.sort();
    seen.sort();
    assert_eq!(sources, seen);
    // Dropped, the connections end; the peer takes another load.
    drop(session);
    for (stream, _) in &mut accepted {
        assert!(stream.read(&mut [0]).is_err());
    }
    drop(listener);
    let _echo = Echo::start(&hosts.end.netns, Transport::Tcp, Does::Answer)?;
    assert!(peer.load(&rr(Transport::Tcp, 5))?.transactions > 0);
    Ok(())
}

/// Whichever way the control connection takes.
#[test]
fn the_load_comes_to_the_device() -> Result<()> {
    let Some(_guard) = lab("the_load_comes_to_the_device") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let netns = &hosts.end.netns;
    let config = LinkConfig {
        id: 1,
        ..Default::default()
    };
    let second = Link::new(&hosts.link.tester.netns, netns, &config)?;
    let end = netns.run(|| End::of_host(&second.dut.name))?;
    let received = |end: &End| {
        let path = format!("/sys/class/net/{}/statistics/rx_packets", end.name);
        let text = netns.run(|| Ok(fs::read_to_string(path)?))?;
        anyhow::Ok(text.trim().parse::<u64>()?)
    };
    let _echo = Echo::start(netns, Transport::Tcp, Does::Answer)?;
    // The peer's address is one of the other link.
    let peer = Peer::connect(&end, hosts.peer)?;
    let before = received(&hosts.end)?;
    let loaded = peer.load(&rr(Transport::Tcp, 4))?;
    assert!(loaded.transactions > 0);
    assert!(received(&end)? >= loaded.transactions);
    assert_eq!(received(&hosts.end)?, before);
    Ok(())
}

#[test]
fn streams() -> Result<()> {
    let Some(_guard) = lab("streams") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let peer = hosts.connect()?;
    // Without a pace, more comes than the paced ones may send.
    let paced = Some(2 << 20);
    for (connections, pace, bytes) in [
        (1, None, 1 << 20..u64::MAX),
        (4, None, 1 << 20..u64::MAX),
        (1, paced, 1..1 << 20),
    ] {
        let echo = Echo::start(&hosts.end.netns, Transport::Tcp, Does::Swallow)?;
        let session = peer.prepare(&Load {
            kind: Kind::Stream { pace },
            ..rr(Transport::Tcp, connections)
        })?;
        session.start()?;
        let loaded = session.end()?;
        assert!(bytes.contains(&loaded.bytes), "{loaded:?}");
        assert_eq!((loaded.transactions, loaded.latency), (0, None));
        // What is acknowledged and not read yet is in the server's buffers.
        until("all is read", || {
            Ok((echo.got() >= loaded.bytes).then_some(()))
        })?;
    }
    Ok(())
}

#[test]
fn a_lost_request_is_counted_and_sent_again() -> Result<()> {
    let Some(_guard) = lab("a_lost_request_is_counted_and_sent_again") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let peer = hosts.connect()?;
    let echo = Echo::start(&hosts.end.netns, Transport::Udp, Does::MissOne)?;
    let load = Load {
        seconds: 1.5,
        ..rr(Transport::Udp, 1)
    };
    let loaded = peer.load(&load)?;
    assert_eq!(loaded.lost, 1);
    let latency = loaded.latency.context("the second was answered")?;
    assert!(latency.max > 1e6, "{latency:?}");
    assert!(echo.got() > loaded.transactions);
    drop(echo);
    // Unless it was lost before anything counts.
    let _echo = Echo::start(&hosts.end.netns, Transport::Udp, Does::MissOne)?;
    let loaded = peer.load(&Load {
        warm_up: 1.5,
        ..load
    })?;
    assert_eq!(loaded.lost, 0);
    let latency = loaded.latency.context("it goes on")?;
    assert!(latency.max < 1e6, "{latency:?}");
    Ok(())
}

#[test]
fn answers_to_another_request_are_not_counted() -> Result<()> {
    let Some(_guard) = lab("answers_to_another_request_are_not_counted") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let peer = hosts.connect()?;
    let echo = Echo::start(&hosts.end.netns, Transport::Udp, Does::Confuse)?;
    let loaded = peer.load(&Load {
        seconds: 1.5,
        ..rr(Transport::Udp, 2)
    })?;
    assert_eq!((loaded.transactions, loaded.latency), (0, None));
    assert_eq!((loaded.lost, echo.got()), (2, 4));
    Ok(())
}

#[test]
fn what_fails_is_said_and_does_not_hang() -> Result<()> {
    let Some(_guard) = lab("what_fails_is_said_and_does_not_hang") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let peer = hosts.connect()?;
    let says = |load: &Load, what: &str| {
        let error = peer.load(load).expect_err("it can't be done");
        assert!(format!("{error:#}").contains(what), "{error:#}");
    };
    for transport in [Transport::Tcp, Transport::Udp] {
        says(&endless(transport), "is the server there?");
    }
    {
        let _echo = Echo::start(&hosts.end.netns, Transport::Tcp, Does::Leave)?;
        says(&endless(Transport::Tcp), "the server has ended");
    }
    let echo = Echo::start(&hosts.end.netns, Transport::Tcp, Does::Answer)?;
    let tcp = rr(Transport::Tcp, 1);
    let kind = |request, response| Kind::Rr {
        transport: Transport::Tcp,
        request,
        response,
    };
    for load in [
        Load {
            connections: 0,
            ..tcp.clone()
        },
        Load {
            connections: CONNECTIONS_MAX + 1,
            ..tcp.clone()
        },
        Load {
            seconds: 601.0,
            ..tcp.clone()
        },
        Load {
            warm_up: -1.0,
            ..tcp.clone()
        },
        Load {
            kind: kind(0, 1),
            ..tcp.clone()
        },
        Load {
            kind: kind(1, SIZE_MAX + 1),
            ..tcp.clone()
        },
    ] {
        says(&load, "choose");
    }
    assert_eq!(echo.accepted.load(Ordering::Relaxed), 0);
    // After all of that it serves.
    assert!(peer.load(&tcp)?.transactions > 0);
    Ok(())
}

#[test]
fn the_load_ends_with_the_control_connection() -> Result<()> {
    let Some(_guard) = lab("the_load_ends_with_the_control_connection") else {
        return Ok(());
    };
    let mut hosts = Hosts::new()?;
    let echo = Echo::start(&hosts.end.netns, Transport::Udp, Does::Answer)?;
    let peer = hosts.connect()?;
    let session = peer.prepare(&endless(Transport::Udp))?;
    session.start()?;
    until("it runs", || Ok((echo.got() > 100).then_some(())))?;
    drop(session);
    drop(peer);
    // The next one is greeted when the load has ended.
    let peer = hosts.connect()?;
    let got = echo.got();
    let session = peer.prepare(&endless(Transport::Udp))?;
    assert_eq!(echo.got(), got);
    session.start()?;
    // The same of a peer that is stopped.
    hosts.stop()?;
    let error = session.end().expect_err("it was stopped");
    assert!(format!("{error:#}").contains("interrupted"), "{error:#}");
    let error = hosts.connect().err().context("nobody is there")?;
    assert!(format!("{error:#}").contains("bench serve"), "{error:#}");
    Ok(())
}

/// `rxlab bench serve` as its users start it, killed in the middle of a load.
#[test]
fn a_peer_that_dies_is_missed() -> Result<()> {
    let Some(_guard) = lab("a_peer_that_dies_is_missed") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let _echo = Echo::start(&hosts.end.netns, Transport::Tcp, Does::Answer)?;
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let tester = &hosts.link.tester;
        let mut child = tester
            .netns
            .command(RXLAB)?
            .args(["bench", "serve"])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("piped")?).lines();
        let line = lines.next().context("it says that it listens")??;
        assert_eq!(line, "listening on [::]:5533");
        let peer = Peer::connect(&hosts.end, SocketAddr::new(tester.ipv4.into(), 5533))?;
        let session = peer.prepare(&endless(Transport::Tcp))?;
        session.start()?;
        let line = lines.next().context("it says what it does")??;
        let from = hosts.end.ipv4;
        assert_eq!(
            line,
            format!("{from}: requests over Tcp to port 7, 3 connections, 500 s")
        );
        kill(Pid::from_raw(child.id() as i32), signal)?;
        let error = session.end().expect_err("it is gone");
        let why = match signal {
            Signal::SIGKILL => "is gone",
            _ => "interrupted",
        };
        assert!(format!("{error:#}").contains(why), "{error:#}");
        let code = child.wait()?.code();
        assert_eq!(code, (signal == Signal::SIGTERM).then_some(0));
    }
    Ok(())
}

/// A peer that greets with `greeting`.
fn impostor(hosts: &Hosts, greeting: &'static str) -> Result<SocketAddr> {
    let address = SocketAddr::new(hosts.link.tester.ipv4.into(), 0);
    let listener = hosts
        .link
        .tester
        .netns
        .run(|| Ok(TcpListener::bind(address)?))?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept()?;
        stream.write_all(greeting.as_bytes())
    });
    Ok(address)
}

#[test]
fn other_versions_are_refused() -> Result<()> {
    let Some(_guard) = lab("other_versions_are_refused") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let own = concat!("{\"rxsteer\":\"", env!("CARGO_PKG_VERSION"), "\"}\n");
    Peer::connect(&hosts.end, impostor(&hosts, own)?)?;
    for (greeting, why) in [
        ("{\"rxsteer\":\"0.0.7\"}\n", "0.0.7"),
        ("SSH-2.0-OpenSSH_9.9\r\n", "not rxsteer"),
        ("", "ended the connection"),
    ] {
        let error = Peer::connect(&hosts.end, impostor(&hosts, greeting)?)
            .err()
            .context("it is another")?;
        assert!(format!("{error:#}").contains(why), "{error:#}");
    }
    Ok(())
}

#[test]
fn whoever_asks_for_something_else_is_not_served() -> Result<()> {
    let Some(_guard) = lab("whoever_asks_for_something_else") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    for request in ["GET / HTTP/1.1\r\n", "\"start\"\n", "{\"connect\":{}}\n"] {
        let mut stream = hosts
            .end
            .netns
            .run(|| Ok(TcpStream::connect(hosts.peer)?))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        BufReader::new(stream).read_to_string(&mut answer)?;
        // The greeting, and the end.
        assert_eq!(answer.lines().count(), 1, "{answer}");
    }
    // A target is nothing that can be asked for: whatever else is in a request, it is the caller.
    let echo = Echo::start(&hosts.end.netns, Transport::Udp, Does::Answer)?;
    let load = serde_json::to_string(&rr(Transport::Udp, 1))?;
    let load = load.replacen(
        '{',
        "{\"host\":\"198.18.0.99\",\"to\":\"198.18.0.99:7\",",
        1,
    );
    let mut stream = hosts
        .end
        .netns
        .run(|| Ok(TcpStream::connect(hosts.peer)?))?;
    stream.write_all(format!("{{\"connect\":{load}}}\n\"start\"\n").as_bytes())?;
    until("the caller has the load", || {
        Ok((echo.got() > 0).then_some(()))
    })
}

#[test]
fn devices_that_can_not_be_used() -> Result<()> {
    let Some(_guard) = lab("devices_that_can_not_be_used") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let (netns, name) = (&hosts.end.netns, hosts.end.name.as_str());
    assert_eq!(hosts.end.ipv4, hosts.link.dut.ipv4);
    assert_eq!(hosts.end.ipv6, hosts.link.dut.ipv6);
    assert_eq!(hosts.end.mac, hosts.link.dut.mac);
    assert_eq!(hosts.end.ifindex, hosts.link.dut.ifindex);
    assert_eq!(hosts.end.queues, 2);
    assert_eq!(hosts.end.netns.inode()?, netns.inode()?);

    let says = |name: &str, what: &str| {
        let error = netns
            .run(|| End::of_host(name))
            .err()
            .expect("it is no use");
        assert!(format!("{error:#}").contains(what), "{error:#}");
    };
    says("nothing0", "there is no network device `nothing0`");
    let ip = |args: &[&str]| -> Result<()> {
        let done = netns.command("ip")?.args(args).status()?;
        anyhow::ensure!(done.success(), "ip {args:?}");
        Ok(())
    };
    let on = On {
        device: name.to_owned(),
        peer: hosts.peer,
    };
    let no_pair = |what: &str| {
        let error = netns.run(|| Pair::meet(&on).map(drop)).expect_err("no use");
        assert!(format!("{error:#}").contains(what), "{error:#}");
    };
    netns.run(|| Pair::meet(&on).map(drop))?;
    {
        let _foreign = Xdp::drop(&hosts.link.dut, XdpMode::Native)?;
        no_pair("XDP program");
    }
    ip(&["-6", "address", "flush", "dev", name])?;
    let only_v4 = netns.run(|| End::of_host(name))?;
    let to = SocketAddr::new(hosts.link.tester.ipv6.into(), hosts.peer.port());
    let error = Peer::connect(&only_v4, to).err().context("no IPv6")?;
    assert!(format!("{error:#}").contains("no address of the family"));
    ip(&["address", "flush", "dev", name])?;
    says(name, "has no address");
    ip(&["link", "set", "dev", name, "down"])?;
    says(name, "is down");
    no_pair("is down");
    Ok(())
}

/// The files of kernel RPS on a device with two queues, and what they hold.
fn kernel_rps(end: &End) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for queue in 0..2 {
        for file in ["rps_cpus", "rps_flow_cnt"] {
            let path = format!("/sys/class/net/{}/queues/rx-{queue}/{file}", end.name);
            let value = end.netns.run(|| Ok(fs::read_to_string(&path)?))?;
            files.push((path, value));
        }
    }
    Ok(files)
}

const ENTRIES: &str = "/proc/sys/net/core/rps_sock_flow_entries";

/// Gives a device's host settings of its own, different ones in each file.
fn set_up_kernel_rps(end: &End) -> Result<()> {
    let values = ["1", "256", "2", "512"];
    for ((path, _), value) in kernel_rps(end)?.into_iter().zip(values) {
        end.netns.run(|| Ok(fs::write(path, value)?))?;
    }
    Ok(())
}

#[test]
fn every_mode_works_on_a_device_and_leaves_it_as_it_was() -> Result<()> {
    let Some(_guard) = lab("every_mode_works_on_a_device") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let end = &hosts.end;
    let xdp = || end.netns.run(|| Ok(Device::open(&end.name)?.xdp));
    set_up_kernel_rps(end)?;
    let (before, entries) = (kernel_rps(end)?, fs::read_to_string(ENTRIES)?);
    let peer = hosts.connect()?;
    let echo = Echo::start(&end.netns, Transport::Udp, Does::Answer)?;
    for mode in [
        Mode::None,
        Mode::KernelRps,
        Mode::KernelRfs,
        Mode::Cpumap,
        Mode::RxsteerRps,
        Mode::RxsteerRfs,
        Mode::RxsteerRfsIdle,
        Mode::Rxsteer,
    ] {
        let cpus = mask(&[OTHER_CPU]);
        let active = Active::start(end, mode, Some(&cpus)).with_context(|| mode.to_string())?;
        let program = xdp()?.map(|xdp| xdp.name);
        let expected = match mode {
            Mode::None | Mode::KernelRps | Mode::KernelRfs => None,
            Mode::Cpumap => Some("cpumap"),
            _ => Some("rxsteer"),
        };
        assert_eq!(program.as_deref(), expected, "{mode}");
        let now: Vec<String> = kernel_rps(end)?
            .iter()
            .map(|(_, value)| value.trim().trim_start_matches(['0', ',']).to_owned())
            .collect();
        let (cpus, slots) = match mode {
            Mode::KernelRps => ("2", ""),
            Mode::KernelRfs => ("2", "4096"),
            _ => ("", ""),
        };
        assert_eq!(now, [cpus, slots, cpus, slots], "{mode}");
        if mode == Mode::KernelRfs {
            assert_eq!(fs::read_to_string(ENTRIES)?.trim(), "32768");
        }
        let loaded = peer.load(&rr(Transport::Udp, 20))?;
        assert!(loaded.transactions > 0, "{mode}: {loaded:?}");
        active.stop()?;
        assert_eq!(kernel_rps(end)?, before, "{mode}");
        assert_eq!(fs::read_to_string(ENTRIES)?, entries, "{mode}");
        assert!(xdp()?.is_none(), "{mode}");
    }
    drop(echo);

    // Nobody's program is replaced, nor taken for none.
    let _foreign = Xdp::pass(end, XdpMode::Native)?;
    for mode in [Mode::None, Mode::KernelRps, Mode::Cpumap, Mode::Rxsteer] {
        let cpus = mask(&[OTHER_CPU]);
        let error = Active::start(end, mode, Some(&cpus)).err();
        let error = error.with_context(|| format!("{mode} beside another program"))?;
        assert!(format!("{error:#}").contains("`pass`"), "{error:#}");
        assert_eq!(kernel_rps(end)?, before, "{mode}");
    }
    Ok(())
}

/// Set in the process that is to be killed: the device.
const VICTIM: &str = "RXSTEER_TEST_VICTIM";

#[test]
fn settings_come_back_when_killed() -> Result<()> {
    let test = "settings_come_back_when_killed";
    if let Ok(device) = std::env::var(VICTIM) {
        let end = End::of_host(&device)?;
        let _active = Active::start(&end, Mode::KernelRps, Some(&mask(&[OTHER_CPU])))?;
        // Entries are kept in the initial network namespace alone: the parent's.
        eprintln!("on");
        std::thread::sleep(Duration::from_secs(30));
        return Ok(());
    }
    let Some(_guard) = lab(test) else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let end = &hosts.end;
    set_up_kernel_rps(end)?;
    let before = kernel_rps(end)?;
    let mut victim = end
        .netns
        .command(std::env::current_exe()?)?
        .args(["--exact", test, "--nocapture"])
        .env(VICTIM, &end.name)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    let mut stderr = BufReader::new(victim.stderr.take().context("piped")?);
    stderr.read_line(&mut line)?;
    let changed = kernel_rps(end)?;
    victim.kill()?;
    victim.wait()?;
    stderr.read_to_string(&mut line)?;
    assert_eq!(line.lines().next(), Some("on"), "{line}");
    assert_ne!(changed, before);
    until("the settings are back", || {
        Ok((kernel_rps(end)? == before).then_some(()))
    })
}

#[test]
fn what_needs_the_lab_says_so() -> Result<()> {
    let effort = Effort {
        rounds: 1,
        seconds: 0.1,
        napi: Vec::new(),
        gro: Vec::new(),
        only: Only::default(),
        on: Some(On {
            device: "eth0".to_owned(),
            peer: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1),
        }),
    };
    for scenario in [Scenario::Flood, Scenario::Reorder, Scenario::Decide] {
        let error = scenario.prepare(&effort).err().context("not on a device")?;
        let text = format!("{error:#}");
        let name = format!("{scenario:?}").to_lowercase();
        assert!(text.starts_with(&name), "{text}");
        assert!(text.contains("runs in the lab alone"), "{text}");
    }
    Ok(())
}

/// One guardian for several files: each gets back its own.
#[test]
fn settings_are_put_back_together() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let paths = vec![file("a file"), file("another")];
    fs::write(&paths[0], "0,1\n")?;
    fs::write(&paths[1], "*\n")?;
    let setting = Setting::keep_all(paths.clone())?;
    setting.set("7")?;
    assert_eq!(fs::read_to_string(&paths[0])?, "7");
    assert_eq!(fs::read_to_string(&paths[1])?, "7");
    drop(setting);
    assert_eq!(fs::read_to_string(&paths[0])?, "0,1\n");
    assert_eq!(fs::read_to_string(&paths[1])?, "*\n");
    Ok(())
}

/// Two that keep one setting would each put back what the other has written.
#[test]
fn who_keeps_a_setting_keeps_it_alone() -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let path = file.path().to_string_lossy().into_owned();
    fs::write(&path, "0\n")?;
    let first = Setting::keep(&path)?;
    first.set("1")?;
    let second = std::thread::spawn(move || Setting::keep(&path)?.set("2"));
    // Long enough for it to read what is there, if it does not wait.
    std::thread::sleep(Duration::from_millis(200));
    drop(first);
    second.join().expect("no panic")?;
    assert_eq!(fs::read_to_string(file.path())?, "0\n");
    Ok(())
}

/// The scenarios that a peer can put its load on, as `rxlab bench --on` runs them.
#[test]
fn scenarios_on_a_device() -> Result<()> {
    let Some(_guard) = lab("scenarios_on_a_device") else {
        return Ok(());
    };
    let hosts = Hosts::new()?;
    let effort = Effort {
        rounds: 1,
        seconds: 0.1,
        napi: Vec::new(),
        gro: Vec::new(),
        only: Only::default(),
        on: Some(On {
            device: hosts.end.name.clone(),
            peer: hosts.peer,
        }),
    };
    let able = Scenario::value_variants().iter().filter(|s| s.takes_peer());
    for scenario in able {
        hosts.end.netns.run(|| {
            let mut experiment = scenario.prepare(&effort)?;
            let plan = experiment.plan();
            for (c, case) in plan.cases.iter().enumerate() {
                let name = format!("{}: {}", plan.scenario, case.case);
                for mode in ["none", "kernel-rps (all)", "rxsteer"] {
                    let m = case.modes.iter().position(|m| m == mode);
                    let m = m.with_context(|| format!("{name}: no {mode}"))?;
                    match experiment.measure(c, m) {
                        // A host with other things to do loses packets, and a peer on it is busy.
                        Err(error) if error.is::<Unfit>() => eprintln!("{name}, {mode}: {error:#}"),
                        measured => {
                            let values = measured.with_context(|| format!("{name}, {mode}"))?;
                            assert!(values[0].1 > 0.0, "{name}, {mode}: {values:?}");
                        }
                    }
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}
