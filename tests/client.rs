// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lab's closed loop: requests and replies add up, and what was lost is sent again.

mod common;

use std::time::Duration;

use anyhow::Result;
use common::bed::{lab, until};
use rxsteer::bench::bed::Bed;
use rxsteer::bench::closed_loop::ClosedLoop;
use rxsteer::bench::mode::{Mode, Way};
use rxsteer::bench::place::Place;
use rxsteer::bench::{Condition, Gro, Napi, Unfit};
use rxsteer::device::XdpMode;
use rxsteer::lab::client::Client;
use rxsteer::lab::ethtool::Offload;
use rxsteer::lab::frame::{Frames, TcpFlows, UdpFlows};
use rxsteer::lab::link::{Link, LinkConfig};
use rxsteer::lab::netns::Netns;
use rxsteer::lab::server::Server;
use rxsteer::lab::sockets;
use rxsteer::lab::xdp::Xdp;

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

/// Every request is answered once, and every latency counted.
fn adds_up(tcp: bool, connections: u32, len: usize) -> Result<()> {
    let Some(_guard) = lab("client") else {
        return Ok(());
    };
    let link = link()?;
    // Without a program here, what one at the other end sends back never arrives.
    let _pass = Xdp::pass(&link.dut, XdpMode::Native)?;
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

/// What a device drops is sent again, and counted.
#[test]
fn lost_requests_are_sent_again() -> Result<()> {
    let Some(_guard) = lab("client") else {
        return Ok(());
    };
    for tcp in [false, true] {
        let link = link()?;
        let frames = frames(&link, tcp, 3);
        let server = server(&link, &frames)?;
        let mut client = Client::new(&link, &frames, 1)?;
        let drop = Xdp::drop(&link.dut, XdpMode::Native)?;
        client.start()?;
        until("the first requests are dropped", || {
            Ok((drop.received(0) >= 3).then_some(()))
        })?;
        assert_eq!(client.run(A_WHILE)?.latency.len(), 0);
        std::mem::drop(drop);
        let _pass = Xdp::pass(&link.dut, XdpMode::Native)?;
        let mut lost = 0;
        until("all flows go on", || {
            lost += client.run(A_WHILE)?.lost;
            Ok((lost >= 3 && server.answered() > 100).then_some(()))
        })?;
        assert_eq!(client.stop()?.unanswered, 0);
    }
    Ok(())
}

/// A measurement whose application does not do what the mode says gives no figure.
#[test]
fn polling_that_finds_nothing_gives_no_figure() -> Result<()> {
    let Some(_guard) = lab("client") else {
        return Ok(());
    };
    let measure = |busy_poll, connections| {
        let condition = Condition {
            napi: Napi::Interrupt,
            gro: Gro::On,
        };
        let case = ClosedLoop {
            tcp: false,
            len: 1,
            connections,
            threads: 1,
            work: None,
            busy_poll,
            others: None,
        };
        let way = Way::by_default(Mode::None);
        case.measure(
            &Place::Lab(Bed::new(condition)?),
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
    // Sockets that are waited for by epoll don't poll when they are read.
    let error = measure(true, 2).expect_err("nothing was polled");
    assert!(error.is::<Unfit>(), "{error:#}");
    Ok(())
}
