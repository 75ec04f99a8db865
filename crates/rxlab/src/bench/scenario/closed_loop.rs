// SPDX-License-Identifier: MIT OR Apache-2.0
//! Closed loops of transactions: one request under way per connection, and a server that answers.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::Result;
use indexmap::IndexMap;
use socket2::{Domain, Socket, Type};

use crate::bench::experiment::{Unfit, Values, detail, fit, flow_limit_drops, headline};
use crate::bench::peer::latency::Latency;
use crate::bench::peer::load::{Kind, Load, Transport};
use crate::bench::report::document::{Better, Metric};
use crate::bench::setup::confined::Confined;
use crate::bench::setup::mode::{Active, Mode, Way};
use crate::bench::setup::pair::Pair;
use crate::bench::setup::place::Place;
use crate::bench::setup::testbed::{Masks, Testbed};
use crate::bench::setup::watch::{Seen, Watch};
use crate::lab::client::Client;
use crate::lab::frame::{Frames, TcpFlows, UdpFlows};
use crate::lab::generator::{Generator, GeneratorConfig};
use crate::lab::netns::Netns;
use crate::lab::receiver::{Receiver, ReceiverConfig};
use crate::lab::server::{Server, Work};
use crate::lab::sockets;

/// Modes to compare, without those for busy polling.
pub(super) const MODES: [Mode; 7] = [
    Mode::None,
    Mode::KernelRps,
    Mode::KernelRfs,
    Mode::RxsteerRfs,
    Mode::Rxsteer,
    Mode::RxsteerSoftirqRfs,
    Mode::RxsteerSoftirq,
];

/// Remark for the reader of the lab's figures.
pub const NOTE: &str = "A server has a thread for each connection, unless the case says otherwise; a \
     single one is bound to the first CPU that does not poll the queue. The client is an XDP program \
     at the other end: unless it has CPUs of its own, what it costs, some hundred ns for each \
     transaction, is part of the service demand in all modes.";

/// Limit on waiting for connections.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Above this busy share, the peer's or the client's CPU is the limit.
const SATURATED: f64 = 0.95;

/// Time before counting starts: TCP leaves slow start, flows find their CPUs.
const WARM_UP: Duration = Duration::from_millis(150);

/// Largest share of transactions with a lost request; above, figures would reflect the loss.
const LOST: f64 = 0.001;

/// Receive buffer of each socket, bytes.
const RCVBUF: usize = 1 << 18;

/// Busy polling per read, us: the value that the kernel's documentation recommends
/// (admin-guide/sysctl/net.rst).
pub const BUSY_POLL_US: u32 = 50;

/// Server and requests of a case.
#[derive(Clone)]
pub struct ClosedLoop {
    /// TCP, or connected UDP sockets.
    pub tcp: bool,
    /// Size of requests and replies, bytes.
    pub len: usize,
    /// Number of flows, each with a socket of its own.
    pub connections: u32,
    /// Threads of the server. With fewer than connections, each uses epoll on several sockets.
    pub threads: u32,
    /// Work per request.
    pub work: Option<Work>,
    /// Reads busy-poll the device's queue.
    pub busy_poll: bool,
    /// Flows to another application at the same time, in the lab only.
    pub others: Option<Others>,
    /// Requests in a second, in the lab only. Without, each reply is followed by the next request.
    pub pace: Option<f64>,
}

/// Flows beside those that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Others {
    pub flows: u32,
    /// Packets per second of all of them.
    pub pps: u64,
}

/// Limit on the connections if the client has CPUs of its own: all requests may then wait in the
/// device's ring of 256 frames.
const MOST_APART: u32 = 200;

/// Number of connections in this place, of those wanted.
pub(super) fn connections(wanted: u32, masks: &Masks) -> u32 {
    match masks.apart() {
        true => wanted.min(MOST_APART),
        false => wanted,
    }
}

/// Smallest share of the requested rate that the generator must send.
const SENT: f64 = 0.9;

/// The generator and the receiver of [`Others`].
struct OthersSent {
    generator: Generator,
    receiver: Receiver,
    pps: u64,
}

impl Others {
    /// Sends to a port of its own.
    fn start(self, testbed: &Testbed) -> Result<OthersSent> {
        let dut = &testbed.link.dut;
        let to = UdpFlows::to(dut, self.flows);
        let to = UdpFlows {
            dport: to.dport + 1,
            ..to
        };
        let local = SocketAddr::new(to.daddr, to.dport);
        let config = GeneratorConfig::flood(Frames::Udp(to)).at(self.pps);
        Ok(OthersSent {
            receiver: Receiver::start(&dut.netns, &ReceiverConfig::new(local))?,
            generator: testbed.send(&config)?,
            pps: self.pps,
        })
    }
}

impl OthersSent {
    fn stop(self) -> Result<()> {
        let sent = self.generator.stop()?;
        self.receiver.stop()?;
        let pps = sent.sent as f64 * 1e9 / sent.elapsed_ns as f64;
        fit!(
            pps >= SENT * self.pps as f64,
            "only {pps:.0} packets of other flows were sent in a second"
        );
        Ok(())
    }
}

impl ClosedLoop {
    /// One byte to and fro, with a thread for each connection.
    pub fn rr(tcp: bool, connections: u32) -> Self {
        Self {
            tcp,
            len: 1,
            connections,
            threads: connections,
            work: None,
            busy_poll: false,
            others: None,
            pace: None,
        }
    }

    /// Metrics of [`measure`](Self::measure).
    pub fn metrics() -> IndexMap<String, Metric> {
        use Better::{Higher, Lower, Neither};
        let mut metrics = IndexMap::from([
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
            detail("sent_again", "Requests sent again", "1", Neither),
            detail("clipped", "Latencies beyond the histogram", "1", Neither),
            flow_limit_drops("packets"),
            detail("latency_us_p999", "Latency, 99.9th percentile", "us", Lower),
        ]);
        metrics.extend(Active::metrics());
        metrics
    }

    /// Measures the loop under a way to steer.
    ///
    /// # Errors
    /// When the lab failed; [`Unfit`](crate::bench::experiment::Unfit) when the way was not in
    /// effect, or requests were lost.
    pub fn measure(&self, place: &Place, way: Way, seconds: f64) -> Result<Values> {
        let active = place.start(way)?;
        let sample = match place {
            Place::Lab(testbed) => self.in_the_lab(testbed, seconds)?,
            Place::Device(pair) => self.on_device(pair, seconds)?,
        };
        sample.check()?;
        place.verify(&active, way, &sample.seen, self.connections)?;
        let polled = sample
            .seen
            .tcp
            .get("BusyPollRxPackets")
            .copied()
            .unwrap_or(0);
        // Behind a cpumap's redirect, busy polling finds nothing.
        fit!(
            !self.busy_poll || polled > 0 || way.mode == Mode::Cpumap,
            "no packet was found by busy polling"
        );
        fit!(
            self.busy_poll || polled == 0,
            "{polled} packets were found by busy polling: is net.core.busy_read set?"
        );
        let mut values = sample.values(way);
        values.extend(active.counted()?);
        active.stop()?;
        Ok(values)
    }

    /// The client is an XDP program at the tester's end.
    fn in_the_lab(&self, testbed: &Testbed, seconds: f64) -> Result<Sample> {
        let flows = testbed.flows(self.connections)?;
        let (netns, served) = testbed.applications(&flows);
        let tcp = |flows| TcpFlows {
            flows,
            first_seq: 1,
            ack: 1,
            push: true,
        };
        let (frames, sockets) = match self.tcp {
            true => (
                Frames::Tcp(tcp(flows)),
                sockets::established(netns, &tcp(served), RCVBUF)?,
            ),
            false => (
                Frames::Udp(flows),
                sockets::connected(netns, &served, RCVBUF)?,
            ),
        };
        let server = self.serve(netns, sockets, testbed.masks())?;
        let client = Client::new(&testbed.link, &frames, self.len)?;
        let client = match self.pace {
            Some(rate) => client.paced(rate)?,
            None => client,
        };
        Sample::take(testbed, client, server, self.others, seconds)
    }

    /// The peer is the client.
    fn on_device(&self, pair: &Pair, seconds: f64) -> Result<Sample> {
        let netns = &pair.end.netns;
        let (address, peer) = (pair.address()?, pair.peer()?);
        let load = |transport, port| Load {
            kind: Kind::Rr {
                transport,
                request: self.len,
                response: self.len,
            },
            connections: self.connections,
            port,
            warm_up: WARM_UP.as_secs_f64(),
            seconds,
        };
        let (session, sockets) = match self.tcp {
            true => {
                let listener = netns.run(|| listener(address, self.connections))?;
                let port = listener.local_addr()?.port();
                let session = peer.prepare(&load(Transport::Tcp, port))?;
                let streams = sockets::accepted(&listener, self.connections, TIMEOUT)?;
                (session, streams.into_iter().map(OwnedFd::from).collect())
            }
            false => {
                // Reserves the port until the sockets exist, which need the peer's ports.
                let holder = netns.run(|| sockets::reuseaddr(SocketAddr::new(address, 0)))?;
                let local = holder.local_addr()?;
                let session = peer.prepare(&load(Transport::Udp, local.port()))?;
                let sources: Vec<SocketAddr> = session.sources().collect();
                let sockets = sockets::connected_to(netns, local, sources.into_iter(), RCVBUF)?;
                (session, sockets)
            }
        };
        let server = self.serve(netns, sockets, pair.masks())?;
        session.start()?;
        let watch = Watch::begin(netns, &pair.masks().all)?;
        let loaded = session.end()?;
        let seen = watch.end()?;
        server.stop()?;
        let busiest = match pair.is_local() {
            // Without CPUs of its own, the client's are the device's.
            true => seen.busiest_generator,
            false => loaded.busiest_share,
        };
        fit!(
            busiest < SATURATED,
            "a CPU of the peer was busy for {:.0} % of the time: that is what was measured",
            100.0 * busiest
        );
        Ok(Sample {
            seconds: loaded.seconds,
            latency: loaded.latency.ok_or_else(unanswered)?,
            lost: loaded.lost,
            seen,
        })
    }

    fn serve(&self, netns: &Netns, sockets: Vec<OwnedFd>, masks: &Masks) -> Result<Server> {
        let mut threads: Vec<Vec<_>> = (0..self.threads).map(|_| Vec::new()).collect();
        for (index, socket) in sockets.into_iter().enumerate() {
            if self.busy_poll {
                sockets::busy_poll(&socket, BUSY_POLL_US)?;
            }
            threads[index % self.threads as usize].push(socket);
        }
        // The scheduler would place a single thread on varying CPUs.
        let cpu = masks.others.first().filter(|_| self.threads == 1);
        Server::start(netns, threads, cpu, self.work.as_ref())
    }
}

/// Result of one measurement.
pub(super) struct Sample {
    seconds: f64,
    latency: Latency,
    /// Lost requests since the start.
    lost: u64,
    pub(super) seen: Seen,
}

impl Sample {
    /// Runs the lab's client against a server, and stops both.
    pub(super) fn take(
        testbed: &Testbed,
        mut client: Client,
        server: Server,
        others: Option<Others>,
        seconds: f64,
    ) -> Result<Self> {
        // The tester's NAPI acts as wire and interrupt.
        let apart = testbed.masks().apart();
        let _far_end = match testbed.nic {
            Some(_) if !apart => None,
            _ => Some(testbed.far_end(&testbed.senders())?.before_others()?),
        };
        // Where it sends the requests itself.
        let _confined = apart.then(|| Confined::to(&testbed.masks().generators));
        let _confined = _confined.transpose()?;
        client.start()?;
        let others = others.map(|others| others.start(testbed)).transpose()?;
        client.run(WARM_UP)?;
        let watch = testbed.watch()?;
        let replies = client.run(Duration::from_secs_f64(seconds))?;
        let seen = watch.end()?;
        // A paced generator never sleeps on CPUs of its own, so their load tells nothing.
        fit!(
            !apart || others.is_some() || seen.busiest_generator < SATURATED,
            "a CPU of the client was busy for {:.0} % of the time: that is what was measured",
            100.0 * seen.busiest_generator
        );
        others.map(OthersSent::stop).transpose()?;
        let ended = client.stop()?;
        let answered = server.stop()?;
        let lost = ended.lost + ended.unanswered;
        fit!(
            ended.replies.abs_diff(answered) <= lost,
            "the server answered {answered} requests, and {} replies came",
            ended.replies
        );
        let latency = Latency::of(&replies.latency, replies.clipped);
        Ok(Self {
            seconds: replies.seconds,
            latency: latency.ok_or_else(unanswered)?,
            lost,
            seen,
        })
    }

    /// Checks that few requests were lost.
    pub(super) fn check(&self) -> Result<()> {
        let (count, lost) = (self.latency.count as f64, self.lost);
        fit!(
            lost as f64 <= (LOST * count).max(1.0),
            "of {count} requests {lost} were lost"
        );
        Ok(())
    }

    pub(super) fn values(&self, way: Way) -> Values {
        let latency = &self.latency;
        let count = latency.count as f64;
        let mut values = vec![
            ("tps", count / self.seconds),
            ("latency_us_p99", latency.p99),
            ("demand_us", self.seen.busy * 1e6 / count),
            ("latency_us_p50", latency.p50),
            ("latency_us_p90", latency.p90),
            ("latency_us_sd", latency.stddev),
            ("cpu_percent", 100.0 * self.seen.busy_share),
            ("sent_again", self.lost as f64),
            ("clipped", latency.out_of_range as f64),
            ("latency_us_p999", latency.p999),
        ];
        if way.mode.is_kernels() {
            values.push(("flow_limit_drops", self.seen.flow_limit() as f64));
        }
        values
    }
}

fn unanswered() -> Unfit {
    Unfit("no request was answered".to_owned())
}

/// With a backlog for all connections.
fn listener(address: IpAddr, connections: u32) -> Result<TcpListener> {
    let address = SocketAddr::new(address, 0);
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.bind(&address.into())?;
    socket.listen(connections as i32)?;
    Ok(socket.into())
}
