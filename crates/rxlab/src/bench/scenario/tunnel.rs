// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tunnel`: one flow that comes through a tunnel, to an application of the host or of a container.
//!
//! Its packets pass the host's receive path two or three times: on the NIC, on the tunnel's device, on the
//! container's. Steering can have each of them on another CPU.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use indexmap::IndexMap;

use crate::bench::experiment::{
    CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Unfit, Values, detail, fit, headline,
};
use crate::bench::report::document::Better;
use crate::bench::setup::mode::{Active, Cpus, Mode, Way};
use crate::bench::setup::testbed::Testbed;
use crate::bench::setup::traffic::SETTLING;
use crate::lab::link::{End, Link, LinkConfig};
use crate::lab::netns::Netns;
use crate::lab::receiver::{Receiver, ReceiverConfig};
use crate::lab::stacked::{Kind, Stacked};
use crate::lab::stream::{Consumer, Worker, between};
use crate::lab::xdp::Xdp;

const KINDS: [Kind; 3] = [Kind::Vxlan, Kind::Gre, Kind::WireGuard];

/// Size of a datagram: it fits into each tunnel.
const DATAGRAM: usize = 1300;

/// What is sent, and where to.
#[derive(Clone, Copy)]
struct Case {
    tcp: bool,
    container: bool,
}

const CASES: [Case; 4] = [
    Case {
        tcp: true,
        container: false,
    },
    Case {
        tcp: false,
        container: false,
    },
    Case {
        tcp: true,
        container: true,
    },
    Case {
        tcp: false,
        container: true,
    },
];

const MODES: [Mode; 7] = [
    Mode::None,
    Mode::KernelRps,
    Mode::KernelRfs,
    Mode::RxsteerRfs,
    Mode::Rxsteer,
    Mode::RxsteerSoftirqRps,
    Mode::RxsteerSoftirq,
];

/// A lab with a tunnel.
struct Tunnel {
    testbed: Testbed,
    /// Its end on the host, and the container's device.
    inner: End,
    container: End,
    _polled: Xdp,
}

impl Tunnel {
    fn new(condition: Condition, kind: Kind) -> Result<Self> {
        let testbed = Testbed::with_programs(condition)?;
        let link = &testbed.link;
        let polled = Xdp::pass(&link.tester)?;
        let tunnel = Stacked::new(link, kind).map_err(|e| Unfit(format!("{e:#}")))?;
        let dut = &link.dut.netns;
        let inner = dut.run(|| End::of_host(&tunnel.name))?;
        let config = LinkConfig {
            id: link.dut.id + 1,
            // As container engines leave it.
            gro: false,
            ..Default::default()
        };
        let behind = Link::new(dut, &Netns::new("container")?, &config)?;
        behind.dut.route_by(behind.tester.ipv4)?;
        dut.forward()?;
        link.tester.route_by(tunnel.ipv4)?;
        let mut container = behind.dut;
        container.pass = false;
        Ok(Self {
            testbed,
            inner,
            container,
            _polled: polled,
        })
    }

    /// Measures a case; rates in a second: bytes or datagrams.
    fn measure(&self, case: Case, way: Way, seconds: f64) -> Result<Values> {
        let testbed = &self.testbed;
        let masks = testbed.masks();
        let end = if case.container {
            &self.container
        } else {
            &self.inner
        };
        // rxsteer steers one namespace: the container has its own.
        let separate = case.container && !way.mode.is_kernels();
        let inside = separate.then(|| Active::start(end, softirq(way.mode), masks.of(way)));
        let inside = inside.transpose()?;
        let mut outside = vec![&self.inner];
        if case.container && !separate {
            outside.push(end);
        }
        let active = testbed.start_with(&outside, way)?;
        let cpus = testbed.senders();
        let _far_end = testbed.far_end(&cpus)?.before_others()?;
        let load = Load::start(testbed, end, case.tcp, cpus[0])?;
        sleep(SETTLING);
        let (watch, before) = (testbed.watch()?, load.received());
        sleep(Duration::from_secs_f64(seconds));
        let received = load.received() - before;
        let seen = watch.end()?;
        load.stop()?;
        fit!(
            received > 0,
            "nothing arrived: is the reader's CPU taken by others?"
        );
        let rate = received as f64 / seen.seconds;
        let mut values = match case.tcp {
            true => vec![("mbit_per_s", rate * 8.0 / 1e6)],
            false => vec![("mbit_per_s", rate * DATAGRAM as f64 * 8.0 / 1e6)],
        };
        let busiest = seen.shares.values().copied().fold(0.0, f64::max);
        let processed: Vec<u64> = seen.softnet.values().map(|s| s.processed).collect();
        let some = processed.iter().sum::<u64>() / 100;
        let stages = processed.into_iter().filter(|&n| n > some).count();
        values.extend([
            ("cpu_percent", 100.0 * seen.busy_share),
            ("busiest_percent", 100.0 * busiest),
            ("sender_percent", 100.0 * seen.busiest_generator),
            ("stages", stages as f64),
        ]);
        testbed.verify(&active, way, &seen, 1)?;
        inside.map(Active::stop).transpose()?;
        active.stop()?;
        Ok(values)
    }
}

/// A container's device takes no XDP program that redirects.
fn softirq(mode: Mode) -> Mode {
    match mode {
        Mode::RxsteerRfs => Mode::RxsteerSoftirqRfs,
        Mode::Rxsteer => Mode::RxsteerSoftirq,
        mode => mode,
    }
}

/// One flow, and whoever reads it.
enum Load {
    Stream { sender: Worker, consumer: Worker },
    Datagrams { sender: Worker, receiver: Receiver },
}

impl Load {
    fn start(testbed: &Testbed, end: &End, tcp: bool, cpu: u32) -> Result<Self> {
        let from = &testbed.link.tester.netns;
        let reads_on = testbed.masks().others.iter().last();
        let address: Ipv4Addr = end.ipv4;
        if tcp {
            let (sender, reader) = between(from, &end.netns, address)?;
            return Ok(Self::Stream {
                consumer: Worker::consume(&end.netns, reads_on, reader, Consumer::Blocks)?,
                sender: Worker::produce(from, cpu, sender)?,
            });
        }
        const PORT: u16 = 9000;
        let to = SocketAddr::new(address.into(), PORT);
        let receiver = ReceiverConfig {
            threads: vec![reads_on],
            ..ReceiverConfig::new(to)
        };
        let receiver = Receiver::start(&end.netns, &receiver)?;
        let socket = from.run(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(to)?;
            Ok(socket)
        })?;
        Ok(Self::Datagrams {
            sender: Worker::datagrams(from, cpu, socket, DATAGRAM)?,
            receiver,
        })
    }

    /// Bytes of a stream, or datagrams.
    fn received(&self) -> u64 {
        match self {
            Self::Stream { consumer, .. } => consumer.read(),
            Self::Datagrams { receiver, .. } => receiver.received(),
        }
    }

    fn stop(self) -> Result<()> {
        match self {
            Self::Stream { sender, consumer } => {
                sender.stop()?;
                consumer.stop()
            }
            Self::Datagrams { sender, receiver } => {
                sender.stop()?;
                receiver.stop()?;
                Ok(())
            }
        }
    }
}

/// See the module's documentation.
pub struct Scenario {
    condition: Condition,
    tunnels: Vec<(Kind, Tunnel)>,
    notes: Vec<String>,
    ways: Vec<Way>,
    seconds: f64,
}

impl Scenario {
    /// Prepares the lab.
    ///
    /// # Errors
    /// The host does not allow it, has a single CPU, or no tunnels.
    pub fn new(effort: &Effort) -> Result<Self> {
        let condition = effort.conditions(&[Napi::Interrupt], &[Gro::On])[0];
        let (mut tunnels, mut notes) = (Vec::new(), vec![NOTE.to_owned()]);
        for kind in KINDS {
            match Tunnel::new(condition, kind) {
                Ok(tunnel) => tunnels.push((kind, tunnel)),
                Err(e) if e.is::<Unfit>() => notes.push(format!("No {kind:?}: {e:#}")),
                Err(e) => return Err(e),
            }
        }
        let (_, tunnel) = tunnels.first().ok_or_else(|| Unfit(notes.join("; ")))?;
        let ways = tunnel.testbed.masks().ways(&MODES);
        // Stages are on different CPUs in a mask of others; with the polling CPU, by chance.
        let useful = |way: &Way| way.cpus != Cpus::All || !way.mode.is_kernels();
        Ok(Self {
            ways: ways.into_iter().filter(useful).collect(),
            condition,
            tunnels,
            notes,
            seconds: effort.seconds,
        })
    }
}

/// Remark for the reader of the figures.
const NOTE: &str = "One sender, on a CPU of its own if there are four or more, where the tunnel's other end also \
     is: it may be the limit, see its share. Kernel RPS and rxsteer steer the NIC, the tunnel's device and, in \
     its own namespace, the container's. Of the modes that spread by hash, each device puts the flow on one CPU \
     of the mask, by chance on the same. The CPUs that process packets are counted.";

impl Experiment for Scenario {
    fn plan(&self) -> Plan {
        use Better::{Higher, Neither};
        let cases = self.tunnels.iter().flat_map(|(kind, _)| {
            CASES.map(|case| {
                let what = if case.tcp { "TCP" } else { "UDP" };
                let to = if case.container {
                    "a container"
                } else {
                    "the host"
                };
                CasePlan {
                    case: format!("{kind:?}, {what} to {to}"),
                    modes: self.ways.iter().map(Way::to_string).collect(),
                }
            })
        });
        Plan {
            scenario: "tunnel",
            question: "How much of one flow arrives through a tunnel?",
            metrics: IndexMap::from([
                headline("mbit_per_s", "Throughput", "Mbit/s", Higher),
                detail("cpu_percent", "CPU, of all CPUs", "%", Neither),
                detail("busiest_percent", "Busiest CPU of the host", "%", Neither),
                detail("sender_percent", "Busiest CPU of the sender", "%", Neither),
                detail("stages", "CPUs that process packets", "1", Neither),
            ]),
            cases: cases.collect(),
            conditions: self.tunnels[0].1.testbed.conditions(&[self.condition]),
            notes: self.notes.clone(),
            seconds_each: SETTLING.as_secs_f64() + self.seconds + 0.8,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (_, tunnel) = &self.tunnels[case / CASES.len()];
        tunnel.measure(CASES[case % CASES.len()], self.ways[mode], self.seconds)
    }
}
