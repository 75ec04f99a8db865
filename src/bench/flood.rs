// SPDX-License-Identifier: MIT OR Apache-2.0
//! `flood`: more UDP packets than a host can use, into one receive queue.
//!
//! The queue is polled on one CPU, where the wire sends too; the application runs on another.
//! Counted are the packets that the device accepted and those that the application got.

use std::fmt;
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use indexmap::IndexMap;

use super::bed::{Bed, INTERRUPT_CPU};
use super::mode::{Active, Mode, Way};
use super::watch::{Seen, Watch};
use super::{
    Better, CasePlan, Condition, Effort, Experiment, Gro, Napi, Plan, Values, detail, fit, headline,
};
use crate::lab::frame::{Frames, UdpFlows};
use crate::lab::jumper::{Jumpers, Reads};
use crate::lab::link::End;
use crate::lab::sink::{Sink, SinkConfig};
use crate::lab::sockets;
use crate::lab::wire::{Wire, WireConfig};

/// Flows of the flood.
pub const NR_FLOWS: u32 = 4096;

/// Flows of the flood to connected sockets: before Linux 6.13 the kernel finds one of many on a port
/// only by looking at each.
pub const NR_CONNECTED: u32 = 64;

/// Threads of an application that reads one socket with several.
pub const NR_THREADS: usize = 8;

/// Of the accepted packets, those that may be missing in the account: what was under way when the
/// counters were read.
const UNACCOUNTED: f64 = 0.001;

/// Until the last packets have gone through, and the modes' threads are back to sleep.
const SETTLE: Duration = Duration::from_millis(50);

/// What one measurement found.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Seconds of traffic.
    pub seconds: f64,
    /// Frames that were sent.
    pub sent: u64,
    /// Frames that the device took.
    pub accepted: u64,
    /// Datagrams that the application got.
    pub delivered: u64,
    /// Datagrams that its sockets had no room for.
    pub socket_drops: u64,
    /// CPU time of the thread that polls the queue, ns, if one does.
    pub rx_cpu_ns: Option<u64>,
    /// What the kernel counted.
    pub seen: Seen,
}

/// Sends for `seconds`, as fast as it can or at `rate` frames per second, in one way to steer.
///
/// # Errors
/// When something of the lab failed; [`Unfit`](super::Unfit) when the way had no effect, or packets
/// are unaccounted for.
pub fn measure(
    bed: &Bed,
    way: Way,
    to: Sockets,
    rate: Option<u64>,
    seconds: f64,
) -> Result<Sample> {
    let active = bed.start(way)?;
    let sample = traffic(bed, to, rate, seconds)?;
    check(bed, &active, way, to, &sample)?;
    active.stop()?;
    Ok(sample)
}

/// Sends to these sockets, however it is steered.
pub(super) fn traffic(bed: &Bed, to: Sockets, rate: Option<u64>, seconds: f64) -> Result<Sample> {
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, to.nr_flows());
    let application = Application::start(dut, &flows, to, bed.masks().others.first())?;
    let config = WireConfig {
        frames: Frames::Udp(flows),
        count: None,
        rate,
        lossless: false,
        window: None,
    };
    let rx_cpu_ns = || bed.nic.as_ref().map(|nic| nic.cpu_ns(0)).transpose();

    let cpu_before = rx_cpu_ns()?;
    let watch = Watch::begin(&dut.netns)?;
    let start = Instant::now();
    let wire = Wire::start(&bed.link, INTERRUPT_CPU, &config)?;
    sleep(Duration::from_secs_f64(seconds));
    // What comes after the wire stops was accepted while it ran: only the backlogs are left.
    let sent = wire.stop()?;
    let elapsed = start.elapsed().as_secs_f64();
    sleep(SETTLE);
    let cpu_after = rx_cpu_ns()?;
    let seen = watch.end()?;
    let (delivered, socket_drops) = application.stop()?;
    fit!(
        sent.sent > sent.lost,
        "the device accepted nothing: the generator did not run"
    );
    Ok(Sample {
        seconds: elapsed,
        sent: sent.sent,
        accepted: sent.sent - sent.lost,
        delivered,
        socket_drops,
        rx_cpu_ns: cpu_after
            .zip(cpu_before)
            .map(|(after, before)| after - before),
        seen,
    })
}

/// Whether the way was in effect, and all packets are accounted for.
fn check(bed: &Bed, active: &Active<'_>, way: Way, to: Sockets, sample: &Sample) -> Result<()> {
    bed.verify(active, way, &sample.seen, to.nr_flows())?;
    let at_sockets = sample.delivered + sample.socket_drops;
    let dropped: u64 = sample.seen.softnet.values().map(|s| s.dropped).sum();
    let expected = match (way.mode, active.status()?) {
        (_, Some(status)) => {
            let queue = &status.devices[0].queues[0];
            fit!(
                queue.received == sample.accepted,
                "rxsteer received {} of {} frames",
                queue.received,
                sample.accepted
            );
            queue.inline + queue.sums.delivered
        }
        // Its full rings are counted nowhere.
        (Mode::Cpumap, _) => return Ok(()),
        _ => sample.accepted.saturating_sub(dropped),
    };
    let missing = at_sockets.abs_diff(expected) as f64 / sample.accepted as f64;
    fit!(
        missing < UNACCOUNTED,
        "packets are unaccounted for: {expected} should have come to the sockets, and {at_sockets} did"
    );
    Ok(())
}

/// What the application receives on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sockets {
    /// One unconnected socket for [`NR_FLOWS`] flows.
    Server,
    /// The same, read by [`NR_THREADS`] threads on no particular CPU.
    Shared,
    /// [`NR_CONNECTED`] sockets, each connected to a flow's source.
    Connected,
}

impl Sockets {
    /// Flows that are sent to them.
    pub fn nr_flows(self) -> u32 {
        match self {
            Self::Server | Self::Shared => NR_FLOWS,
            Self::Connected => NR_CONNECTED,
        }
    }
}

impl fmt::Display for Sockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server => write!(f, "one socket, {NR_FLOWS} flows"),
            Self::Shared => write!(f, "one socket, {NR_THREADS} threads, {NR_FLOWS} flows"),
            Self::Connected => write!(f, "{NR_CONNECTED} connected sockets"),
        }
    }
}

/// Its threads.
enum Application {
    Server(Sink),
    Connected(Jumpers),
}

impl Application {
    fn start(dut: &End, flows: &UdpFlows, to: Sockets, cpu: Option<u32>) -> Result<Self> {
        let mut sink = SinkConfig::new(SocketAddr::new(flows.daddr, flows.dport));
        Ok(match to {
            Sockets::Server | Sockets::Shared => {
                sink.threads = match to {
                    Sockets::Shared => vec![None; NR_THREADS],
                    _ => vec![cpu],
                };
                sink.reuseport = false;
                Self::Server(Sink::start(&dut.netns, &sink)?)
            }
            Sockets::Connected => {
                let sockets = sockets::connected(&dut.netns, flows, sink.rcvbuf / 16)?;
                // From one CPU to the same: it stays there.
                let cpus: Vec<u32> = cpu.into_iter().collect();
                let threads = Jumpers::start(&dut.netns, vec![sockets], Reads::Datagrams, &cpus)?;
                Self::Connected(threads)
            }
        })
    }

    /// Datagrams that it got, and those that its sockets had no room for.
    fn stop(self) -> Result<(u64, u64)> {
        Ok(match self {
            Self::Server(sink) => {
                let report = sink.stop()?;
                (report.received.iter().sum(), report.dropped)
            }
            Self::Connected(threads) => {
                let report = threads.stop()?;
                (report.received, report.dropped)
            }
        })
    }
}

/// The scenario: to one socket, kernel RPS, a naive cpumap and rxsteer, by RPS alone and with its
/// default policy; to connected sockets, which kernel RFS follows too, also that; and to a socket
/// that several threads read, what their following costs.
pub struct Flood {
    conditions: Vec<Condition>,
    beds: Vec<Bed>,
    cases: Vec<(usize, Sockets, Vec<Way>)>,
    seconds: f64,
}

impl Flood {
    /// Makes the lab.
    ///
    /// # Errors
    /// When the host does not allow it, or has a single CPU.
    pub fn new(effort: &Effort) -> Result<Self> {
        use Mode::{Cpumap, KernelRfs, KernelRps, None, Rxsteer, RxsteerRps};
        let conditions = effort.conditions(&[Napi::Thread], &[Gro::On]);
        let beds = Bed::under(&conditions)?;
        let cases = [
            (
                Sockets::Server,
                &[None, KernelRps, Cpumap, RxsteerRps, Rxsteer][..],
            ),
            (
                Sockets::Connected,
                &[None, KernelRps, KernelRfs, Cpumap, Rxsteer],
            ),
            (Sockets::Shared, &[None, KernelRps, RxsteerRps, Rxsteer]),
        ];
        let ways = |modes| beds[0].masks().ways(modes);
        let cases = (0..beds.len())
            .flat_map(|bed| cases.map(|(to, modes)| (bed, to, ways(modes))))
            .collect();
        Ok(Self {
            conditions,
            beds,
            cases,
            seconds: effort.seconds,
        })
    }
}

impl Experiment for Flood {
    fn plan(&self) -> Plan {
        use Better::{Higher, Lower, Neither};
        let cases = self.cases.iter().map(|(bed, to, ways)| CasePlan {
            case: self.conditions[*bed].case(&to.to_string(), &self.conditions),
            modes: ways.iter().map(Way::to_string).collect(),
        });
        Plan {
            scenario: "flood",
            question: "What does the application still get when far more UDP packets come than it can \
                       use?",
            metrics: IndexMap::from([
                headline("delivered_pps", "Delivered to the application", "packets/s", Higher),
                headline("accepted_pps", "Accepted from the wire", "packets/s", Neither),
                detail("flow_limit_drops", "Dropped by the kernel's flow limit", "packets/s", Lower),
            ]),
            cases: cases.collect(),
            conditions: self.beds[0].conditions(&self.conditions),
            notes: vec![
                "The generator shares the CPU that polls the queue, with the lowest priority: what \
                 keeps that CPU busy throttles it too. Accepted alone proves nothing, since late drops \
                 count as accepted."
                    .to_owned(),
            ],
            seconds_each: self.seconds + 0.5,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let (bed, to, ways) = &self.cases[case];
        let sample = measure(&self.beds[*bed], ways[mode], *to, None, self.seconds)?;
        let per_second = |n: u64| n as f64 / sample.seconds;
        let mut values = vec![
            ("delivered_pps", per_second(sample.delivered)),
            ("accepted_pps", per_second(sample.accepted)),
        ];
        if ways[mode].mode.is_kernels() {
            values.push(("flow_limit_drops", per_second(sample.seen.flow_limit())));
        }
        Ok(values)
    }
}
