// SPDX-License-Identifier: MIT OR Apache-2.0
//! `fairness`: delivery of modest flows beside one that floods.
//!
//! The generator sends a frame of a modest flow, then several of the flood, at its maximum rate.
//! Two applications share a CPU that does not poll the queue, one for the modest flows and one for
//! the flood.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use indexmap::IndexMap;

use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, detail, fit, headline,
};
use crate::bench::report::document::Better;
use crate::bench::setup::mode::{Cpus, Mode, Way};
use crate::bench::setup::testbed::Testbed;
use crate::bench::setup::throughput::FLOOR;
use crate::bench::setup::traffic::{Counts, Destination, SETTLING, Traffic, check, drain};
use crate::lab::frame::{Frames, UdpFlows};
use crate::lab::generator::GeneratorConfig;
use crate::lab::migrator::{Migrators, Reads};
use crate::lab::sockets;

/// Number of the modest flows, and of their sockets.
const NR_MODEST: u32 = 1024;
const NR_SOCKETS: u16 = 64;

/// Flood packets per modest packet. With an odd sum, modest packets fall on all positions of the
/// generator's batches of 64, so a full ring drops all flows in proportion.
const FLOOD: u32 = 32;

/// Receive buffer of each socket, bytes.
const RCVBUF: usize = 1 << 18;

pub struct Fairness {
    conditions: Vec<Condition>,
    testbeds: Vec<Testbed>,
    ways: Vec<Way>,
    seconds: f64,
}

impl Fairness {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Thread], &[Gro::On]);
        let testbeds = Testbed::each(&conditions)?;
        let mut ways = testbeds[0].masks().ways(&[Mode::None, Mode::KernelRps]);
        let others = |mode| Way {
            mode,
            cpus: Cpus::Others,
        };
        ways.extend([Mode::RxsteerRps, Mode::RxsteerRpsLimit].map(others));
        ways.extend([Mode::RxsteerRfs, Mode::RxsteerRfsLimit, Mode::Rxsteer].map(Way::by_default));
        Ok(Self {
            conditions,
            testbeds,
            ways,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for Fairness {
    fn plan(&self) -> Plan {
        use Better::{Higher, Neither};
        let name = format!("1 flow among {NR_MODEST}");
        let cases = self.conditions.iter().map(|condition| CasePlan {
            case: condition.case(&name, &self.conditions),
            modes: self.ways.iter().map(Way::to_string).collect(),
        });
        let mut conditions = self.testbeds[0].conditions(&self.conditions);
        conditions.insert(
            "modest flows".to_owned(),
            format!("one packet in {}, to {NR_SOCKETS} sockets", 1 + FLOOD),
        );
        Plan {
            scenario: "fairness",
            question: "What do a thousand modest flows still get when one more floods the queue?",
            metrics: IndexMap::from([
                headline("modest_percent", "Of the modest flows, delivered", "%", Higher),
                headline("flood_pps", "Of the flood, delivered", "packets/s", Neither),
                detail("modest_pps", "Offered by the modest flows", "packets/s", Neither),
            ]),
            cases: cases.collect(),
            conditions,
            notes: vec![
                "Two applications share the first CPU that does not poll the queue, with a thread each: \
                 one reads the modest flows' sockets, the other the flood's. Where the generator shares the \
                 CPU that polls the queue, what keeps that busy throttles the flood and the modest flows \
                 alike, and modest_pps tells. What finds the device's ring full does not count as \
                 offered. The kernel's own flow limit is off, as it \
                 is by default. So is rxsteer's but for the modes with +limit, where a flow is large above 12 %."
                    .to_owned(),
            ],
            seconds_each: SETTLING.as_secs_f64() + self.seconds + 0.25,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (testbed, way) = (&self.testbeds[case], self.ways[mode]);
        let active = testbed.start(way)?;
        let applications = Applications::start(testbed)?;
        let watch = testbed.watch()?;
        let sent = send(testbed, &applications, self.seconds);
        let seen = watch.end();
        // Stop also after an error: the next measurement binds the same addresses.
        applications.stop()?;
        let ((traffic, values), seen) = (sent?, seen?);
        check(testbed, &active, way, &traffic, &seen)?;
        active.stop()?;
        Ok(values)
    }
}

/// The modest flows, and as the last one the flood.
fn flows(testbed: &Testbed) -> UdpFlows {
    UdpFlows {
        nr_dports: NR_SOCKETS,
        flood: FLOOD,
        ..UdpFlows::to(&testbed.link.dut, NR_MODEST)
    }
}

/// Readers of the modest flows and of the flood.
struct Applications {
    modest: Migrators,
    flood: Migrators,
}

impl Applications {
    fn start(testbed: &Testbed) -> Result<Self> {
        let (netns, flows) = (&testbed.link.dut.netns, flows(testbed));
        let server = |index| {
            let dport = flows.dport + index;
            let flows = UdpFlows {
                dport,
                ..flows.clone()
            };
            sockets::server(netns, &flows, RCVBUF)
        };
        let modest = (0..NR_SOCKETS).map(server).collect::<Result<_>>()?;
        // Connected, so that it receives its flow's packets instead of the other socket on that
        // port.
        let port = flows.dport + NR_MODEST as u16 % NR_SOCKETS;
        let local = SocketAddr::new(flows.daddr, port);
        let source = flows.source(NR_MODEST);
        let flood = sockets::connected_to(netns, local, std::iter::once(source), RCVBUF)?;
        // A single CPU: the threads do not migrate.
        let cpus: Vec<u32> = testbed.masks().others.first().into_iter().collect();
        let start = |sockets| Migrators::start(netns, vec![sockets], Reads::Datagrams, &cpus);
        Ok(Self {
            modest: start(modest)?,
            flood: start(flood)?,
        })
    }

    fn stop(self) -> Result<()> {
        self.modest.stop()?;
        self.flood.stop().map(drop)
    }
}

impl Destination for Applications {
    fn received(&self) -> u64 {
        Destination::received(&self.modest) + Destination::received(&self.flood)
    }

    fn dropped(&self) -> Result<u64> {
        Ok(Destination::dropped(&self.modest)? + Destination::dropped(&self.flood)?)
    }
}

/// Sends for [`SETTLING`] and `seconds`; returns the counts of all packets and the figures.
fn send(testbed: &Testbed, to: &Applications, seconds: f64) -> Result<(Traffic, Values)> {
    let config = GeneratorConfig::flood(Frames::Udp(flows(testbed)));
    let of_modest = |accepted: u64| accepted.div_ceil(u64::from(1 + FLOOD));
    let generator = testbed.send(&config)?;
    let look = || {
        Ok(Counts {
            delivered: Destination::received(&to.modest),
            accepted: of_modest(generator.counts()?.accepted),
            ..Default::default()
        })
    };
    sleep(SETTLING);
    let then = Counts::when_few_are_under_way(look)?;
    let (flood, start) = (Destination::received(&to.flood), Instant::now());
    sleep(Duration::from_secs_f64(seconds));
    let flood = Destination::received(&to.flood) - flood;
    let offered = look()?.since(then).accepted;
    let seconds = start.elapsed().as_secs_f64();
    let sent = generator.stop()?;
    drain(to)?;
    let all = Counts {
        accepted: sent.sent - sent.lost,
        delivered: to.received(),
        refused: sent.lost,
    };
    let modest = Counts {
        accepted: of_modest(all.accepted),
        delivered: Destination::received(&to.modest),
        ..Default::default()
    };
    let modest = modest.since(then);
    let offered = offered as f64 / seconds;
    fit!(
        offered * f64::from(1 + FLOOD) >= FLOOR,
        "the generator was starved: of the modest flows it offered {offered:.0} packets/s"
    );
    let traffic = Traffic {
        all,
        dropped: to.dropped()?,
        ..Default::default()
    };
    let percent = 100.0 * modest.delivered as f64 / modest.accepted as f64;
    let values = vec![
        ("modest_percent", percent),
        ("flood_pps", flood as f64 / seconds),
        ("modest_pps", offered),
    ];
    Ok((traffic, values))
}
