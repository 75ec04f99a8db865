// SPDX-License-Identifier: MIT OR Apache-2.0
//! `crr`: netperf's TCP_CRR, one connection per request, with 100 concurrent clients.

use std::net::SocketAddr;

use anyhow::Result;

use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, fit,
};
use crate::bench::scenario::closed_loop::{ClosedLoop, MODES, Sample};
use crate::bench::setup::mode::Way;
use crate::bench::setup::testbed::Testbed;
use crate::bench::setup::watch::Seen;
use crate::lab::client::Client;
use crate::lab::frame::UdpFlows;
use crate::lab::server::Server;

/// Number of clients, each with one connection at a time.
const CLIENTS: u32 = 100;

/// TCP counters of refused connections (/proc/net/snmp and netstat).
const REFUSALS: [&str; 4] = [
    "ListenOverflows",
    "ListenDrops",
    "SyncookiesSent",
    "OutRsts",
];

pub struct Crr {
    conditions: Vec<Condition>,
    testbeds: Vec<Testbed>,
    ways: Vec<Way>,
    seconds: f64,
}

impl Crr {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Interrupt], &[Gro::On]);
        let testbeds = Testbed::each(&conditions)?;
        Ok(Self {
            ways: testbeds[0].masks().ways(&MODES),
            conditions,
            testbeds,
            seconds: effort.seconds,
        })
    }
}

/// Checks that the server refused no connection.
fn check(seen: &Seen) -> Result<()> {
    for counter in REFUSALS {
        let refused = seen.tcp.get(counter).copied().unwrap_or(0);
        fit!(
            refused == 0,
            "the server refused connections: TCP counts {counter} {refused}"
        );
    }
    Ok(())
}

impl Experiment for Crr {
    fn plan(&self) -> Plan {
        let name = format!("{CLIENTS} clients");
        let cases = self.conditions.iter().map(|condition| CasePlan {
            case: condition.case(&name, &self.conditions),
            modes: self.ways.iter().map(Way::to_string).collect(),
        });
        Plan {
            scenario: "crr",
            question: "How many connections with one request each does a server take, and how long \
                       does one take?",
            metrics: ClosedLoop::metrics(),
            cases: cases.collect(),
            conditions: self.testbeds[0].conditions(&self.conditions),
            notes: vec![
                "A transaction is a connection: SYN, one byte to and fro, FIN. Its latency ends with \
                 the reply, not with the close. The server has a listener (SO_REUSEPORT), an epoll \
                 and a thread on each CPU that does not poll the queue. The client is an XDP program \
                 at the other end that sends segments without options, the request with the \
                 acknowledgement of the SYN-ACK, and its FIN first: the server keeps no TIME_WAIT. A \
                 client that makes no progress for half a second begins a new connection; such \
                 connections count as sent again."
                    .to_owned(),
            ],
            seconds_each: self.seconds + 0.35,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (testbed, way) = (&self.testbeds[case], self.ways[mode]);
        let dut = &testbed.link.dut;
        let flows = UdpFlows::to(dut, CLIENTS);
        let active = testbed.start(way)?;
        let local = SocketAddr::new(flows.daddr, flows.dport);
        let server = Server::listen(&dut.netns, local, &testbed.masks().others)?;
        let client = Client::connecting(&testbed.link, &flows)?;
        let sample = Sample::take(testbed, client, server, None, self.seconds)?;
        sample.check()?;
        check(&sample.seen)?;
        testbed.verify(&active, way, &sample.seen, CLIENTS)?;
        active.stop()?;
        Ok(sample.values(way))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::experiment::Unfit;

    #[test]
    fn a_server_that_refused_connections_gives_no_figure() {
        let seen = |counters: &[(&str, u64)]| Seen {
            tcp: counters.iter().map(|&(n, v)| (n.to_owned(), v)).collect(),
            ..Default::default()
        };
        check(&seen(&[("ListenOverflows", 0), ("InSegs", 5)])).unwrap();
        for counter in REFUSALS {
            let refused = check(&seen(&[(counter, 1)]));
            assert!(refused.is_err_and(|error| error.is::<Unfit>()));
        }
    }
}
