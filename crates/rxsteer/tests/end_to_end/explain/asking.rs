// SPDX-License-Identifier: MIT OR Apache-2.0
//! Questions, and applications to ask about.

use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::process::Output;

use anyhow::Result;
use nix::errno::Errno;
use rxlab::bench::setup::mode::Active;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::netns::Netns;
use rxlab::testing::app::{App, soon};
use rxlab::testing::testbed::{OTHER_CPU, Testbed, status, until};
use rxsteer::api::client;
use rxsteer::api::explain::{Explanation, Seen};
use rxsteer::api::flows::{Flows, Location, Query};
use rxsteer::cli::explain;
use rxsteer::cli::explain::{Answer, Target};
use rxsteer::daemon::options::Options;
use rxsteer::datapath::flow::Flow;
use rxsteer::datapath::policy::Policy;

use crate::helpers::threads::kthreads;

pub const UDP: u8 = libc::IPPROTO_UDP as u8;

/// Flows from a source port of this process: applications are watched on the whole host, and
/// another lab may use the same addresses.
pub fn own(flows: UdpFlows) -> UdpFlows {
    UdpFlows {
        sport: 1024 + (std::process::id() % 32768) as u16,
        ..flows
    }
}

/// The first of these flows.
pub fn flow_of(flows: &UdpFlows) -> Flow {
    Flow::of_socket(UDP, SocketAddr::new(flows.saddr, flows.sport), flows.dport)
}

/// Options with small tables, which are read quickly.
pub fn options(bed: &Testbed) -> Options {
    Options {
        policy: Policy::RFS,
        rps_flow_cnt: 1 << 16,
        ..bed.options(&[OTHER_CPU])
    }
}

pub fn bind(netns: &Netns, flows: &UdpFlows, connect: bool) -> Result<UdpSocket> {
    netns.run(|| {
        let socket = UdpSocket::bind(SocketAddr::new(flows.daddr, flows.dport))?;
        if connect {
            socket.connect(SocketAddr::new(flows.saddr, flows.sport))?;
        }
        soon(socket)
    })
}

/// An application that receives packets without the sender's address.
pub fn app(netns: &Netns, socket: UdpSocket) -> Result<App> {
    let mut buffer = [0; 2048];
    App::start(netns, Box::new(move || socket.recv(&mut buffer)))
}

pub fn flows(netns: &Netns, limit: usize) -> Result<Flows> {
    netns.run(|| {
        client::flows(Query {
            limit,
            ..Query::default()
        })
    })
}

pub fn explain(netns: &Netns, target: &str) -> Result<Answer> {
    let target: Target = target.parse().map_err(anyhow::Error::msg)?;
    netns.run(|| explain::ask(target, 100))
}

/// The only explained flow and its only queue.
pub fn one(answer: &Answer) -> Result<(&Explanation, &Seen)> {
    let [explanation] = &answer.explanations.flows[..] else {
        anyhow::bail!("not one flow: {answer:?}");
    };
    match &explanation.seen[..] {
        [seen] => Ok((explanation, seen)),
        _ => anyhow::bail!("not on one queue: {answer:?}"),
    }
}

pub fn command(netns: &Netns, args: &[&str]) -> Result<Output> {
    Ok(netns
        .command(Path::new(env!("CARGO_BIN_EXE_rxsteer")))?
        .args(args)
        .output()?)
}

/// The command must exit with status 1 and print one line that contains `why`.
pub fn refused(netns: &Netns, args: &[&str], why: &str) -> Result<()> {
    let output = command(netns, args)?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
    assert!(output.stdout.is_empty(), "{args:?}: {output:?}");
    assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    assert!(stderr.contains(why), "{args:?}: not {why:?} in {stderr}");
    Ok(())
}

/// Sends until the flow is at this location and wants to be there.
pub fn settle_at(bed: &Testbed, flows: &UdpFlows, place: Location) -> Result<Answer> {
    let name = flow_of(flows).to_string();
    until(&format!("the flow is at {place}"), || {
        bed.send(Frames::Udp(flows.clone()), 20)?;
        let answer = explain(&bed.link.dut.netns, &name)?;
        let entry = &one(&answer)?.1.entry;
        Ok((entry.location == place && entry.wanted == place).then_some(answer))
    })
}

/// Sets the scheduling policy of the threads of cpumaps.
pub fn schedule(cpumaps: &BTreeSet<u32>, policy: i32) -> Result<()> {
    for thread in kthreads(cpumaps)? {
        let param = libc::sched_param { sched_priority: 0 };
        // SAFETY: the callee reads the parameter.
        let ret = unsafe { libc::sched_setscheduler(thread as i32, policy, &raw const param) };
        Errno::result(ret)?;
    }
    Ok(())
}

/// Waits until no packet is queued and the tables have all packets sent.
pub fn rest(active: &Active<'_>) -> Result<u64> {
    until("all packets have been processed", || {
        let queue = &status(active)?.devices[0].queues[0];
        Ok((queue.sums.queued == 0).then_some(queue.received))
    })
}
