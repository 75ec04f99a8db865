// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two hosts in two namespaces: the one under test, and the peer that generates its load.

mod device;
mod hosts;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use hosts::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::bench::peer::load::{CONNECTIONS_MAX, Kind, Load, SIZE_MAX, Transport};
use rxlab::bench::peer::server::Peer;
use rxlab::in_lab;
use rxlab::lab::link::{End, Link, LinkConfig};
use rxlab::testing::testbed::until;

#[test]
fn transactions() -> Result<()> {
    in_lab!();
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
            // Little's law: each connection has one request under way all the time.
            let waited = latency.mean * latency.count as f64 / 1e6;
            let share = waited / loaded.seconds / f64::from(connections);
            assert!((0.2..1.5).contains(&share), "{share}: {loaded:?}");
            assert!(loaded.busy_share > 0.0 && loaded.busiest_share <= 1.0);

            // Counted at the server: these, and at most one more per connection.
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
    in_lab!();
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
    in_lab!();
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
    in_lab!();
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
    // Dropping it closes the connections; the peer then takes another load.
    drop(session);
    for (stream, _) in &mut accepted {
        assert!(stream.read(&mut [0]).is_err());
    }
    drop(listener);
    let _echo = Echo::start(&hosts.end.netns, Transport::Tcp, Does::Answer)?;
    assert!(peer.load(&rr(Transport::Tcp, 5))?.transactions > 0);
    Ok(())
}

/// Independent of the interface that the control connection uses.
#[test]
fn the_load_comes_to_the_device() -> Result<()> {
    in_lab!();
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
    // The peer's address is on the other link.
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
    in_lab!();
    let hosts = Hosts::new()?;
    let peer = hosts.connect()?;
    // Without pacing, more arrives than the paced streams may send.
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
        // Data acknowledged but not yet read is in the server's buffers.
        until("all is read", || {
            Ok((echo.got() >= loaded.bytes).then_some(()))
        })?;
    }
    Ok(())
}

#[test]
fn a_lost_request_is_counted_and_sent_again() -> Result<()> {
    in_lab!();
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
    // Not if it was lost before counting starts.
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
    in_lab!();
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
    in_lab!();
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
    // The peer still serves after all of that.
    assert!(peer.load(&tcp)?.transactions > 0);
    Ok(())
}

#[test]
fn the_load_ends_with_the_control_connection() -> Result<()> {
    in_lab!();
    let mut hosts = Hosts::new()?;
    let echo = Echo::start(&hosts.end.netns, Transport::Udp, Does::Answer)?;
    let peer = hosts.connect()?;
    let session = peer.prepare(&endless(Transport::Udp))?;
    session.start()?;
    until("it runs", || Ok((echo.got() > 100).then_some(())))?;
    drop(session);
    drop(peer);
    // The next host is greeted once the load has ended.
    let peer = hosts.connect()?;
    let got = echo.got();
    let session = peer.prepare(&endless(Transport::Udp))?;
    assert_eq!(echo.got(), got);
    session.start()?;
    // The same for a peer that is stopped.
    hosts.stop()?;
    let error = session.end().expect_err("it was stopped");
    assert!(format!("{error:#}").contains("interrupted"), "{error:#}");
    let error = hosts.connect().err().context("nobody is there")?;
    assert!(format!("{error:#}").contains("bench serve"), "{error:#}");
    Ok(())
}

/// `rxlab bench serve` as a process, killed during a load.
#[test]
fn a_peer_that_dies_is_missed() -> Result<()> {
    in_lab!();
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

/// A peer that sends `greeting`.
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
    in_lab!();
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
fn invalid_requests_are_not_served() -> Result<()> {
    in_lab!();
    let hosts = Hosts::new()?;
    for request in ["GET / HTTP/1.1\r\n", "\"start\"\n", "{\"connect\":{}}\n"] {
        let mut stream = hosts
            .end
            .netns
            .run(|| Ok(TcpStream::connect(hosts.peer)?))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        BufReader::new(stream).read_to_string(&mut answer)?;
        // The greeting, then the end of the connection.
        assert_eq!(answer.lines().count(), 1, "{answer}");
    }
    // A request can't name a target: the load goes to the caller.
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
