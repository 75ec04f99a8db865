// SPDX-License-Identifier: MIT OR Apache-2.0
//! `stream`: netperf's TCP_STREAM, to a consumer that polls and works in between, at full speed and
//! paced, and over 1, 4 and 16 connections to consumers that sleep.

use std::net::TcpListener;
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use indexmap::IndexMap;

use crate::bench::experiment::{
    CasePlan, Effort, Experiment, Gro, Napi, Plan, Values, detail, fit, flow_limit_drops, headline,
};
use crate::bench::peer::load::{Kind, Load};
use crate::bench::report::document::Better;
use crate::bench::setup::mode::{Mode, Way};
use crate::bench::setup::pair::Pair;
use crate::bench::setup::place::{Place, Places};
use crate::bench::setup::streams::{Streams, Taken};
use crate::bench::setup::testbed::Testbed;
use crate::bench::setup::watch::{Seen, Watch};
use crate::lab::stream::{Consumer, Worker};
use crate::lab::{snmp, sockets};

/// Work of the polling consumer between two reads.
const WORK: Duration = Duration::from_micros(20);

/// Remarks for the reader of the lab's figures.
const NOTES: [&str; 3] = [
    "The sender is the kernel's TCP without segmentation offload, since a veth with an XDP program \
     takes frames of the MTU alone: it is a part of what limits the throughput and, on the CPU that \
     polls the queue, of the service demand. Of the modes that spread by hash, one flow uses one \
     CPU of the mask, in each measurement another perhaps.",
    "rxsteer-rfs+idle and rxsteer-rfs tell what an idle CPU near a busy consumer is worth, the one \
     that polls included; where none idles, they are the same.",
    "At 2 Gbit/s the throughput is the same in all modes that reach it, and the work done in between \
     tells them apart; the consumer's CPU is busy in any case, so the service demand shows the \
     others. At full speed, a mode with less throughput may leave more time to work.",
];

/// A case.
#[derive(Clone, Copy)]
struct Bulk {
    name: &'static str,
    connections: u32,
    consumer: Consumer,
    /// Limit of a paced sender, bytes per second.
    pace: Option<u32>,
}

/// In the order of a round.
const CASES: [Bulk; 5] = [
    Bulk {
        name: "a consumer that polls",
        connections: 1,
        consumer: Consumer::Polls(WORK),
        pace: None,
    },
    // About a third of the maximum, so that the CPU that polls the queue has time left. On a device
    // the peer paces; a slower device limits the rate itself. The name does not contain `polls`:
    // `--case polls` selects the case without pace.
    Bulk {
        name: "a polling consumer, at 2 Gbit/s",
        connections: 1,
        consumer: Consumer::Polls(WORK),
        pace: Some(250_000_000),
    },
    sleeping("a consumer that sleeps", 1),
    sleeping("4 consumers that sleep", 4),
    sleeping("16 consumers that sleep", 16),
];

const fn sleeping(name: &'static str, connections: u32) -> Bulk {
    Bulk {
        name,
        connections,
        consumer: Consumer::Blocks,
        pace: None,
    }
}

/// Limit on waiting for a connection.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Time until the TCP windows are open and the flow has found its CPU.
const WARM_UP: Duration = Duration::from_millis(200);

pub struct TcpStream {
    places: Places,
    ways: Vec<Way>,
    cases: Vec<(usize, Bulk)>,
    seconds: f64,
}

/// Result of one measurement.
struct Sample {
    taken: Taken,
    retransmitted: Option<f64>,
    seen: Seen,
}

impl TcpStream {
    /// Prepares the lab, or connects to the peer.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU; the peer is absent.
    pub fn new(effort: &Effort) -> Result<Self> {
        let places = Places::of(effort, &[Napi::Interrupt], &[Gro::On])?;
        use Mode::{
            KernelRfs, KernelRps, None, Rxsteer, RxsteerRfs, RxsteerRfsIdle, RxsteerSoftirq,
            RxsteerSoftirqRfs,
        };
        let modes = [
            None,
            KernelRps,
            KernelRfs,
            RxsteerRfs,
            RxsteerRfsIdle,
            Rxsteer,
            RxsteerSoftirqRfs,
            RxsteerSoftirq,
        ];
        Ok(Self {
            ways: places.masks().ways(&Mode::on(effort.device, &modes)),
            cases: places.each(CASES),
            places,
            seconds: effort.seconds,
        })
    }

    fn in_the_lab(&self, testbed: &Testbed, bulk: Bulk) -> Result<Sample> {
        let link = &testbed.link;
        let streams = Streams::start(
            testbed,
            bulk.connections,
            bulk.consumer,
            bulk.pace,
            &testbed.senders(),
        )?;
        sleep(WARM_UP);
        let sent = snmp::tcp(&link.tester.netns)?;
        let watch = testbed.watch()?;
        let before = streams.taken();
        sleep(Duration::from_secs_f64(self.seconds));
        let taken = streams.taken().since(before);
        let seen = watch.end()?;
        let sent = snmp::since(&sent, snmp::tcp(&link.tester.netns)?);
        streams.stop()?;
        Ok(Sample {
            taken,
            retransmitted: sent.get("RetransSegs").map(|&n| n as f64),
            seen,
        })
    }

    fn on_device(&self, pair: &Pair, bulk: Bulk) -> Result<Sample> {
        let (address, peer) = (pair.address()?, pair.peer()?);
        let netns = &pair.end.netns;
        let listener = netns.run(|| Ok(TcpListener::bind((address, 0))?))?;
        let session = peer.prepare(&Load {
            kind: Kind::Stream { pace: bulk.pace },
            connections: bulk.connections,
            port: listener.local_addr()?.port(),
            warm_up: WARM_UP.as_secs_f64(),
            seconds: self.seconds,
        })?;
        let streams = sockets::accepted(&listener, bulk.connections, TIMEOUT)?;
        let mut receiving = pair.masks().others.iter().cycle();
        let consumers = streams
            .into_iter()
            .map(|from| Worker::consume(&pair.end.netns, receiving.next(), from, bulk.consumer))
            .collect::<Result<Vec<_>>>()?;
        session.start()?;
        let watch = Watch::begin(&pair.end.netns, &pair.masks().all)?;
        let before = Taken::by(&consumers);
        sleep(Duration::from_secs_f64(self.seconds));
        let taken = Taken::by(&consumers).since(before);
        let seen = watch.end()?;
        session.end()?;
        // Before the session, which ends with a reset.
        consumers.into_iter().try_for_each(Worker::stop)?;
        Ok(Sample {
            taken,
            retransmitted: None,
            seen,
        })
    }
}

impl Experiment for TcpStream {
    fn plan(&self) -> Plan {
        use Better::{Higher, Lower, Neither};
        let cases = self.cases.iter().map(|(place, bulk)| CasePlan {
            case: self.places.case(*place, bulk.name),
            modes: self.ways.iter().map(Way::to_string).collect(),
        });
        let mut conditions = self.places.conditions();
        conditions.insert("work".to_owned(), format!("{WORK:?} between two looks"));
        Plan {
            scenario: "stream",
            question: "How fast do TCP connections go, to a consumer that polls and works in between, \
                       and to consumers that sleep?",
            metrics: IndexMap::from([
                headline("mbit_per_s", "Throughput", "Mbit/s", Higher),
                headline(
                    "demand_us_per_mb",
                    "Service demand",
                    "us of CPU per MB",
                    Lower,
                ),
                headline("work_per_s", "Work done in between", "1/s", Higher),
                detail("cpu_percent", "CPU, of all CPUs", "%", Neither),
                detail("retransmitted", "Segments sent again", "1/s", Neither),
                flow_limit_drops("packets"),
            ]),
            cases: cases.collect(),
            conditions,
            notes: self.places.notes(&NOTES),
            seconds_each: self.seconds + 0.35,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (place, bulk) = self.cases[case];
        let (place, way) = (self.places.get(place), self.ways[mode]);
        let active = place.start(way)?;
        let sample = match place {
            Place::Lab(testbed) => self.in_the_lab(testbed, bulk)?,
            Place::Device(pair) => self.on_device(pair, bulk)?,
        };
        let bytes = sample.taken.bytes as f64;
        fit!(bytes > 0.0, "nothing came");
        place.verify(&active, way, &sample.seen, bulk.connections)?;
        active.stop()?;
        let seconds = sample.seen.seconds;
        let mut values = vec![
            ("mbit_per_s", bytes * 8.0 / 1e6 / seconds),
            ("demand_us_per_mb", sample.seen.busy * 1e12 / bytes),
            ("cpu_percent", 100.0 * sample.seen.busy_share),
        ];
        if matches!(bulk.consumer, Consumer::Polls(_)) {
            values.push(("work_per_s", sample.taken.worked as f64 / seconds));
        }
        let again = sample.retransmitted.map(|n| ("retransmitted", n / seconds));
        values.extend(again);
        if way.mode.is_kernels() {
            values.push(("flow_limit_drops", sample.seen.flow_limit() as f64));
        }
        Ok(values)
    }
}
