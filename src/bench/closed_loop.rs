// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transactions: each connection has one request under way, and a server that answers.

use std::time::Duration;

use anyhow::Result;
use indexmap::IndexMap;

use super::bed::{Bed, INTERRUPT_CPU};
use super::mode::{Mode, Way};
use super::watch::Watch;
use super::{Better, Metric, Values, detail, fit, headline};
use crate::lab::client::{Client, Replies};
use crate::lab::frame::{Frames, TcpFlows, UdpFlows};
use crate::lab::nic::Nic;
use crate::lab::server::{Server, Work};
use crate::lab::sockets;

/// Before anything is counted: connections leave their slow beginning, flows arrive at their CPUs.
const WARM_UP: Duration = Duration::from_millis(150);

/// Of the transactions, those whose request had to be sent again: more than that, and the figures
/// are about loss.
const LOST: f64 = 0.001;

/// Bytes of each socket's buffers.
const RCVBUF: usize = 1 << 18;

/// How long a read may poll, us: what the text on busy polling recommends.
pub const BUSY_POLL_US: u32 = 50;

/// What answers, and what is asked.
#[derive(Clone)]
pub struct ClosedLoop {
    /// TCP, or connected UDP sockets.
    pub tcp: bool,
    /// Of requests and replies, bytes.
    pub len: usize,
    /// Flows, each on a socket of its own.
    pub connections: u32,
    /// The server's; with fewer than connections each reads several by epoll.
    pub threads: u32,
    /// Done for each request.
    pub work: Option<Work>,
    /// Reads poll the device's queue themselves.
    pub busy_poll: bool,
}

impl ClosedLoop {
    /// What [`measure`](Self::measure) finds.
    pub fn metrics() -> IndexMap<String, Metric> {
        use Better::{Higher, Lower, Neither};
        IndexMap::from([
            headline("tps", "Transactions", "1/s", Higher),
            headline("latency_us_p99", "Latency, 99th percentile", "us", Lower),
            headline(
                "demand_us",
                "Service demand",
                "us of CPU per transaction",
                Lower,
            ),
            detail("latency_us_p50", "Latency, median", "us", Lower),
            detail("latency_us_p90", "Latency, 90th percentile", "us", Lower),
            detail("latency_us_sd", "Latency, standard deviation", "us", Lower),
            detail("cpu_percent", "CPU, of all CPUs", "%", Neither),
            detail("sent_again", "Requests sent again", "1", Lower),
            detail("clipped", "Latencies beyond the histogram", "1", Lower),
        ])
    }

    /// Runs it in one way to steer.
    ///
    /// # Errors
    /// When something of the lab failed; [`Unfit`](super::Unfit) when the way was not in effect, or
    /// requests were lost.
    pub fn measure(&self, bed: &Bed, way: Way, seconds: f64) -> Result<Values> {
        let (link, others) = (&bed.link, &bed.masks().others);
        let active = bed.start(way)?;
        let frames = self.frames(bed);
        let sockets = match &frames {
            Frames::Tcp(tcp) => sockets::established(&link.dut.netns, tcp, RCVBUF)?,
            _ => sockets::connected(&link.dut.netns, &self.flows(bed), RCVBUF)?,
        };
        if self.busy_poll {
            for socket in &sockets {
                sockets::busy_poll(socket, BUSY_POLL_US)?;
            }
        }
        let mut threads: Vec<Vec<_>> = (0..self.threads).map(|_| Vec::new()).collect();
        for (index, socket) in sockets.into_iter().enumerate() {
            threads[index % self.threads as usize].push(socket);
        }
        // A single one would be put now here, now there by the scheduler, and that be measured.
        let cpu = others.first().filter(|_| self.threads == 1);
        let server = Server::start(&link.dut.netns, threads, cpu, self.work.as_ref())?;
        let mut client = Client::new(link, &frames, self.len)?;
        // The sender's side stands for the wire and the interrupt.
        let _interrupt = match bed.nic {
            Some(_) => None,
            None => Some(Nic::new(&link.tester, &[INTERRUPT_CPU])?.before_others()?),
        };
        client.start()?;
        client.run(WARM_UP)?;
        let watch = Watch::begin(&link.dut.netns)?;
        let replies = client.run(Duration::from_secs_f64(seconds))?;
        let seen = watch.end()?;
        let ended = client.stop()?;
        let answered = server.stop()?;

        let count = replies.latency.len();
        fit!(count > 0, "no request was answered");
        let lost = ended.lost + ended.unanswered;
        fit!(
            lost as f64 <= (LOST * ended.replies as f64).max(1.0),
            "of {} requests {lost} were lost",
            ended.replies + lost
        );
        fit!(
            ended.replies.abs_diff(answered) <= lost,
            "the server answered {answered} requests, and {} replies came",
            ended.replies
        );
        bed.verify(&active, way, &seen, self.connections)?;
        let polled = seen.tcp.get("BusyPollRxPackets").copied().unwrap_or(0);
        fit!(
            !self.busy_poll || polled > 0 || way.mode == Mode::Cpumap,
            "no packet was found by busy polling"
        );
        fit!(
            self.busy_poll || polled == 0,
            "{polled} packets were found by busy polling: is net.core.busy_read set?"
        );
        active.stop()?;
        Ok(self.values(&replies, seen.busy, seen.busy_share))
    }

    fn flows(&self, bed: &Bed) -> UdpFlows {
        UdpFlows::to(&bed.link.dut, self.connections)
    }

    fn frames(&self, bed: &Bed) -> Frames {
        let flows = self.flows(bed);
        match self.tcp {
            false => Frames::Udp(flows),
            true => Frames::Tcp(TcpFlows {
                flows,
                first_seq: 1,
                ack: 1,
                push: true,
            }),
        }
    }

    fn values(&self, replies: &Replies, busy: f64, busy_share: f64) -> Values {
        let latency = &replies.latency;
        let us = |quantile| latency.value_at_quantile(quantile) as f64 / 1e3;
        let count = latency.len() as f64;
        vec![
            ("tps", count / replies.seconds),
            ("latency_us_p99", us(0.99)),
            ("demand_us", busy * 1e6 / count),
            ("latency_us_p50", us(0.5)),
            ("latency_us_p90", us(0.9)),
            ("latency_us_sd", latency.stdev() / 1e3),
            ("cpu_percent", 100.0 * busy_share),
            ("sent_again", replies.lost as f64),
            ("clipped", replies.clipped as f64),
        ]
    }
}
