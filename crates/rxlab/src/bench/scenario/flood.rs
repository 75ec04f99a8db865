// SPDX-License-Identifier: MIT OR Apache-2.0
//! `flood`: more UDP packets into one receive queue than the host can process.
//!
//! The queue is polled on one CPU; the application runs on another, or on several if there are
//! more. The figures are the packets accepted by the device and those delivered to the application.

use std::fmt;
use std::net::SocketAddr;

use anyhow::Result;
use indexmap::IndexMap;

use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, flow_limit_drops, headline,
};
use crate::bench::report::document::Better;
use crate::bench::setup::mode::{Active, Mode, Way};
use crate::bench::setup::testbed::{Masks, Testbed};
use crate::bench::setup::traffic::{Destination, NR_CONNECTED, SETTLING, Traffic, check};
use crate::bench::setup::watch::Seen;
use crate::lab::frame::{Frames, UdpFlows};
use crate::lab::migrator::{Migrators, Reads};
use crate::lab::receiver::{Receiver, ReceiverConfig};
use crate::lab::sockets;

/// Number of flows.
pub const NR_FLOWS: u32 = 4096;

/// Threads of an application that shares one socket.
pub const NR_THREADS: usize = 8;

/// Receive buffer, bytes, where there are many sockets.
pub(super) const RCVBUF: usize = 1 << 18;

/// Result of one measurement.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    pub traffic: Traffic,
    pub seen: Seen,
}

impl Sample {
    /// Sends at the generator's maximum for `seconds`, under a way to steer, which must be switched
    /// on before any packet is sent.
    ///
    /// # Errors
    /// When the lab failed; [`Unfit`](crate::bench::experiment::Unfit) when the way had no effect,
    /// or packets are unaccounted for.
    pub(super) fn take(
        testbed: &Testbed,
        active: &Active<'_>,
        way: Way,
        destination: &dyn Destination,
        frames: &Frames,
        seconds: f64,
    ) -> Result<Self> {
        let watch = testbed.watch()?;
        let traffic = Traffic::send(testbed, destination, frames, None, seconds)?;
        let seen = watch.end()?;
        check(testbed, active, way, &traffic, &seen)?;
        traffic.exceeds_the_host()?;
        Ok(Self { traffic, seen })
    }
}

/// Floods an application.
///
/// # Errors
/// As [`Sample::take`].
pub fn measure(testbed: &Testbed, way: Way, to: Sockets, seconds: f64) -> Result<Sample> {
    let active = testbed.start(way)?;
    let frames = testbed.frames(&to.flows(testbed));
    let application = Application::start(testbed, to)?;
    let sample = Sample::take(testbed, &active, way, &application, &frames, seconds);
    // Stop also after an error: the next measurement binds the same address.
    application.stop()?;
    let sample = sample?;
    active.stop()?;
    Ok(sample)
}

/// Sockets of the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sockets {
    /// One unconnected socket for [`NR_FLOWS`] flows.
    Server,
    /// One unconnected socket read by [`NR_THREADS`] threads, which are not bound to CPUs.
    Shared,
    /// [`NR_CONNECTED`] sockets, each connected to the source of its flow.
    Connected,
    /// One socket and thread (SO_REUSEPORT) on each CPU that does not poll the queue, for
    /// [`NR_FLOWS`] flows.
    Reuseport,
}

impl Sockets {
    /// Number of flows to these sockets.
    pub fn nr_flows(self) -> u32 {
        match self {
            Self::Server | Self::Shared | Self::Reuseport => NR_FLOWS,
            Self::Connected => NR_CONNECTED,
        }
    }

    /// The flows to these sockets.
    pub(super) fn flows(self, testbed: &Testbed) -> UdpFlows {
        UdpFlows::to(testbed.device(), self.nr_flows())
    }
}

impl fmt::Display for Sockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server => write!(f, "one socket, {NR_FLOWS} flows"),
            Self::Shared => write!(f, "one socket, {NR_THREADS} threads, {NR_FLOWS} flows"),
            Self::Connected => write!(f, "{NR_CONNECTED} connected sockets"),
            Self::Reuseport => write!(f, "a socket for each CPU, {NR_FLOWS} flows"),
        }
    }
}

/// Reading threads.
pub(super) enum Application {
    Server(Receiver),
    Connected(Migrators),
}

impl Application {
    /// Starts the threads on CPUs that do not poll the queue: one, or all of these CPUs for several
    /// sockets. The threads of a shared socket are not bound.
    pub(super) fn start(testbed: &Testbed, to: Sockets) -> Result<Self> {
        let (dut, flows) = (testbed.device(), to.flows(testbed));
        let others = &testbed.masks().others;
        let mut receiver = ReceiverConfig::new(SocketAddr::new(flows.daddr, flows.dport));
        Ok(match to {
            Sockets::Server | Sockets::Shared => {
                receiver.threads = match to {
                    Sockets::Shared => vec![None; NR_THREADS],
                    _ => vec![others.first()],
                };
                receiver.reuseport = false;
                Self::Server(Receiver::start(&dut.netns, &receiver)?)
            }
            Sockets::Reuseport => {
                receiver.threads = others.iter().map(Some).collect();
                Self::Server(Receiver::start(&dut.netns, &receiver)?)
            }
            Sockets::Connected => {
                let sockets = sockets::connected(&dut.netns, &flows, RCVBUF)?;
                let threads = Migrators::spread(&dut.netns, sockets, Reads::Datagrams, others)?;
                Self::Connected(threads)
            }
        })
    }

    /// Stops the threads; returns their errors.
    pub(super) fn stop(self) -> Result<()> {
        match self {
            Self::Server(receiver) => receiver.stop().map(drop),
            Self::Connected(threads) => threads.stop().map(drop),
        }
    }
}

impl Destination for Application {
    fn received(&self) -> u64 {
        match self {
            Self::Server(receiver) => Destination::received(receiver),
            Self::Connected(threads) => Destination::received(threads),
        }
    }

    fn dropped(&self) -> Result<u64> {
        match self {
            Self::Server(receiver) => Destination::dropped(receiver),
            Self::Connected(threads) => Destination::dropped(threads),
        }
    }
}

/// Cases: one socket; connected sockets, with kernel RFS and rxsteer's RFS; a socket shared by
/// threads, for the cost of following them; one socket per CPU if there are several.
pub struct Flood {
    labs: Labs,
    seconds: f64,
}

impl Flood {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        use Mode::{
            Cpumap, KernelRfs, KernelRps, None, Rxsteer, RxsteerRfs, RxsteerRps, RxsteerSoftirq,
            RxsteerSoftirqRfs, RxsteerSoftirqRps,
        };
        let cases = [
            (
                Sockets::Server,
                &[None, KernelRps, Cpumap, RxsteerRps, Rxsteer][..],
            ),
            (
                Sockets::Connected,
                &[
                    None,
                    KernelRps,
                    KernelRfs,
                    Cpumap,
                    RxsteerRfs,
                    Rxsteer,
                    RxsteerSoftirqRps,
                    RxsteerSoftirqRfs,
                    RxsteerSoftirq,
                ],
            ),
            (Sockets::Shared, &[None, RxsteerRps, Rxsteer]),
            (
                Sockets::Reuseport,
                &[None, KernelRps, Cpumap, RxsteerRfs, Rxsteer],
            ),
        ];
        // Without CPUs for generators, the last case has one thread and equals the first.
        let cases = match Masks::host()?.apart() {
            true => &cases[..],
            false => &cases[..cases.len() - 1],
        };
        Ok(Self {
            labs: Labs::new(effort, cases)?,
            seconds: effort.seconds,
        })
    }
}

/// A lab per condition, with the same cases in each.
pub(super) struct Labs {
    conditions: Vec<Condition>,
    testbeds: Vec<Testbed>,
    cases: Vec<(usize, Sockets, Vec<Way>)>,
}

impl Labs {
    /// `cases`: sockets, and modes over all masks.
    pub(super) fn new(effort: &Effort, cases: &[(Sockets, &[Mode])]) -> Result<Self> {
        let conditions = effort.conditions(&[Napi::Thread], &[Gro::On]);
        let testbeds = Testbed::each(&conditions)?;
        let ways = |modes| testbeds[0].masks().ways(&Mode::on(effort.device, modes));
        let in_testbed = |testbed| cases.iter().map(move |&(to, modes)| (testbed, to, modes));
        let cases = (0..testbeds.len())
            .flat_map(in_testbed)
            .map(|(testbed, to, modes)| (testbed, to, ways(modes)))
            .collect();
        Ok(Self {
            conditions,
            testbeds,
            cases,
        })
    }

    pub(super) fn cases(&self) -> Vec<CasePlan> {
        let plan = |(testbed, to, ways): &(usize, Sockets, Vec<Way>)| CasePlan {
            case: self.conditions[*testbed].case(&to.to_string(), &self.conditions),
            modes: ways.iter().map(Way::to_string).collect(),
        };
        self.cases.iter().map(plan).collect()
    }

    pub(super) fn conditions(&self) -> IndexMap<String, String> {
        self.testbeds[0].conditions(&self.conditions)
    }

    /// Testbed, sockets and way of the plan's indices.
    pub(super) fn get(&self, case: usize, mode: usize) -> (&Testbed, Sockets, Way) {
        let (testbed, to, ways) = &self.cases[case];
        (&self.testbeds[*testbed], *to, ways[mode])
    }
}

impl Experiment for Flood {
    fn plan(&self) -> Plan {
        use Better::{Higher, Neither};
        Plan {
            scenario: "flood",
            question: "What does the application still get when far more UDP packets come than it can \
                       use?",
            metrics: IndexMap::from([
                headline("delivered_pps", "Delivered to the application", "packets/s", Higher),
                headline("accepted_pps", "Accepted from the wire", "packets/s", Neither),
                flow_limit_drops("packets/s"),
            ]),
            cases: self.labs.cases(),
            conditions: self.labs.conditions(),
            notes: vec![
                "A generator that shares the CPU that polls the queue has the lowest priority in its \
                 scheduling group: what keeps that CPU busy throttles it too. Generators with CPUs of \
                 their own send as fast as they can, and give no figure where nearly all of it is \
                 delivered. Accepted alone proves nothing, since late drops count as accepted."
                    .to_owned(),
            ],
            seconds_each: SETTLING.as_secs_f64() + self.seconds + 0.15,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (testbed, to, way) = self.labs.get(case, mode);
        let Sample { traffic, seen } = measure(testbed, way, to, self.seconds)?;
        let mut values = vec![
            ("delivered_pps", traffic.delivered_pps()),
            ("accepted_pps", traffic.accepted_pps()),
        ];
        if way.mode.is_kernels() {
            let drops = seen.flow_limit() as f64 / seen.seconds;
            values.push(("flow_limit_drops", drops));
        }
        Ok(values)
    }
}
