// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lab's closed loop: the counts of requests and replies agree, and lost requests are sent
//! again.

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use rxlab::bench::experiment::{Condition, DeviceKind, Gro, Napi, Unfit};
use rxlab::bench::scenario::closed_loop::ClosedLoop;
use rxlab::bench::setup::mode::{Mode, Way};
use rxlab::bench::setup::place::Place;
use rxlab::bench::setup::testbed::Testbed;
use rxlab::in_lab;
use rxlab::lab::client::Client;
use rxlab::lab::ethtool::Offload;
use rxlab::lab::frame::{Frames, TcpFlows, UdpFlows};
use rxlab::lab::link::{Link, LinkConfig};
use rxlab::lab::netns::Netns;
use rxlab::lab::server::Server;
use rxlab::lab::snmp;
use rxlab::lab::sockets;
use rxlab::lab::xdp::Xdp;
use rxlab::testing::testbed::until;
use rxsteer::host::cpumask::CpuMask;

const A_WHILE: Duration = Duration::from_millis(200);

fn link() -> Result<Link> {
    let link = Link::new(
        &Netns::new("tester")?,
        &Netns::new("dut")?,
        &LinkConfig::default(),
    )?;
    link.dut.ethtool.set(Offload::TxChecksum, false)?;
    Ok(link)
}

fn frames(link: &Link, tcp: bool, connections: u32) -> Frames {
    let flows = UdpFlows::to(&link.dut, connections);
    match tcp {
        false => Frames::Udp(flows),
        true => Frames::Tcp(TcpFlows {
            flows,
            // The sequence numbers wrap on the way.
            first_seq: u32::MAX - 100,
            ack: u32::MAX - 50,
            push: true,
        }),
    }
}

fn server(link: &Link, frames: &Frames) -> Result<Server> {
    let sockets = match frames {
        Frames::Tcp(tcp) => sockets::established(&link.dut.netns, tcp, 1 << 16)?,
        Frames::Udp(flows) => sockets::connected(&link.dut.netns, flows, 1 << 16)?,
        _ => unreachable!("requests are plain"),
    };
    Server::start(&link.dut.netns, vec![sockets], None, None)
}

/// Each request is answered once, and each latency is counted.
fn adds_up(tcp: bool, connections: u32, len: usize) -> Result<()> {
    in_lab!();
    let link = link()?;
    // A veth delivers XDP_TX frames only to a peer with an XDP program.
    let _pass = Xdp::pass(&link.dut)?;
    let frames = frames(&link, tcp, connections);
    let server = server(&link, &frames)?;
    let mut client = Client::new(&link, &frames, len)?;
    client.start()?;
    let replies = client.run(A_WHILE)?;
    let ended = client.stop()?;
    assert!(!replies.latency.is_empty());
    assert_eq!((ended.lost, ended.unanswered, replies.clipped), (0, 0, 0));
    assert!(ended.replies >= replies.latency.len() + u64::from(connections) - 1);
    assert_eq!(server.stop()?, ended.replies);
    Ok(())
}

#[test]
fn one_of_udp() -> Result<()> {
    adds_up(false, 1, 1)
}

#[test]
fn many_of_udp() -> Result<()> {
    adds_up(false, 50, 64)
}

#[test]
fn one_of_tcp() -> Result<()> {
    adds_up(true, 1, 1)
}

#[test]
fn many_of_tcp() -> Result<()> {
    adds_up(true, 50, 64)
}

/// A server that listens at the flows' destination.
fn listening(link: &Link, flows: &UdpFlows) -> Result<Server> {
    let local = SocketAddr::new(flows.daddr, flows.dport);
    Server::listen(&link.dut.netns, local, &CpuMask::from_iter([0, 1]))
}

/// The server's TCP sockets in use, and in TIME_WAIT.
fn in_use(link: &Link) -> Result<(u64, u64)> {
    let text = link
        .dut
        .netns
        .run(|| Ok(fs::read_to_string("/proc/thread-self/net/sockstat")?))?;
    let words: Vec<&str> = text.split_whitespace().collect();
    let tcp = words.iter().position(|&word| word == "TCP:").expect("TCP");
    let value = |name| -> Result<u64> {
        let at = words[tcp..].iter().position(|&word| word == name);
        Ok(words[tcp + at.expect(name) + 1].parse()?)
    };
    Ok((value("inuse")?, value("tw")?))
}

/// Each connection has its request answered once and ends: nothing is sent twice, and no server
/// socket is left in TIME_WAIT.
#[test]
fn a_connection_for_each_request() -> Result<()> {
    in_lab!();
    // Many connections of one flow reuse its range of 16 ports.
    for (nr_flows, nr_saddrs, sport) in [(1, 1, 65_520), (100, 16, 1024)] {
        let link = link()?;
        let _pass = Xdp::pass(&link.dut)?;
        let flows = UdpFlows {
            nr_saddrs,
            sport,
            ..UdpFlows::to(&link.dut, nr_flows)
        };
        let server = listening(&link, &flows)?;
        let before = snmp::tcp(&link.dut.netns)?;
        let mut client = Client::connecting(&link, &flows)?;
        client.start()?;
        let replies = client.run(A_WHILE)?;
        let ended = client.stop()?;
        assert!(replies.latency.len() > 50, "{ended:?}");
        assert_eq!((ended.lost, ended.unanswered, replies.clipped), (0, 0, 0));
        assert!(ended.replies >= replies.latency.len());
        until(
            "the server's connections are gone, but for its listeners",
            || Ok((in_use(&link)? == (2, 0)).then_some(())),
        )?;
        let seen = snmp::since(&before, snmp::tcp(&link.dut.netns)?);
        assert_eq!(seen["PassiveOpens"], ended.replies, "{seen:?}");
        for counter in ["OutRsts", "InErrs", "ListenDrops", "RetransSegs"] {
            assert_eq!(seen[counter], 0, "{counter}: {seen:?}");
        }
        assert_eq!(server.stop()?, ended.replies);
    }
    Ok(())
}

/// Control: the server reads no request.
#[test]
fn connections_that_are_not_answered_are_counted() -> Result<()> {
    in_lab!();
    let link = link()?;
    let _pass = Xdp::pass(&link.dut)?;
    let flows = UdpFlows::to(&link.dut, 3);
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let _listener = link.dut.netns.run(|| sockets::listener(local))?;
    let mut client = Client::connecting(&link, &flows)?;
    client.start()?;
    let mut lost = 0;
    until("the flows try again", || {
        lost += client.run(A_WHILE)?.lost;
        Ok((lost >= 3).then_some(()))
    })?;
    // The kernel accepted the first connections and the repeated ones.
    assert!(snmp::tcp(&link.dut.netns)?["PassiveOpens"] >= 6);
    let ended = client.stop()?;
    assert_eq!((ended.replies, ended.unanswered), (0, 3), "{ended:?}");
    Ok(())
}

/// Requests that a device drops are sent again and counted.
#[test]
fn lost_requests_are_sent_again() -> Result<()> {
    in_lab!();
    for tcp in [false, true] {
        let link = link()?;
        let frames = frames(&link, tcp, 3);
        let server = server(&link, &frames)?;
        let mut client = Client::new(&link, &frames, 1)?;
        let drop = Xdp::drop(&link.dut)?;
        client.start()?;
        until("the first requests are dropped", || {
            client.run(A_WHILE)?;
            Ok((drop.received(0) >= 3).then_some(()))
        })?;
        assert_eq!(client.run(A_WHILE)?.latency.len(), 0);
        std::mem::drop(drop);
        let _pass = Xdp::pass(&link.dut)?;
        let mut lost = 0;
        until("all flows go on", || {
            lost += client.run(A_WHILE)?.lost;
            Ok((lost >= 3 && server.answered() > 100).then_some(()))
        })?;
        assert_eq!(client.stop()?.unanswered, 0);
    }
    Ok(())
}

/// A measurement gives no figure if the application does not do what the mode says.
#[test]
fn polling_that_finds_nothing_gives_no_figure() -> Result<()> {
    in_lab!();
    let measure = |busy_poll, connections| {
        let condition = Condition {
            napi: Napi::Interrupt,
            gro: Gro::On,
            device: DeviceKind::Nic,
        };
        let case = ClosedLoop {
            threads: 1,
            busy_poll,
            ..ClosedLoop::rr(false, connections)
        };
        let way = Way::by_default(Mode::None);
        case.measure(
            &Place::Lab(Testbed::new(condition)?.into()),
            way,
            A_WHILE.as_secs_f64(),
        )
    };
    let values = measure(true, 1)?;
    assert!(
        values
            .iter()
            .any(|(name, tps)| *name == "tps" && *tps > 0.0)
    );
    // A non-blocking read after epoll does not busy-poll.
    let error = measure(true, 2).expect_err("nothing was polled");
    assert!(error.is::<Unfit>(), "{error:#}");
    Ok(())
}
