// SPDX-License-Identifier: MIT OR Apache-2.0
//! `flood`: more UDP packets than a host can use, from thousands of flows, into one receive queue.
//!
//! The queue is polled on one CPU, where the wire sends too; the application, one socket and one
//! thread, runs on another. Counted are the packets that the device accepted and those that the
//! application got. Beside it, at a rate that every mode carries without loss: the CPU time that
//! the receiving CPU spends per packet, that is its NAPI thread's; the wire is another thread.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::mode::{Active, Mode};
use super::{Effort, Report, Rounds};
use crate::accounting::Queue;
use crate::cpumask::CpuMask;
use crate::lab::frame::{Frames, UdpFlows};
use crate::lab::jumper::{Jumpers, Reads};
use crate::lab::link::{End, Link, LinkConfig};
use crate::lab::netns::Netns;
use crate::lab::nic::Nic;
use crate::lab::sink::{Sink, SinkConfig};
use crate::lab::sockets;
use crate::lab::softnet::softnet;
use crate::lab::wire::{Wire, WireConfig};
use crate::topology::Topology;

/// The CPU that polls the queue.
pub const INTERRUPT_CPU: u32 = 0;

/// Flows of the flood.
pub const NR_FLOWS: u32 = 4096;

/// Flows of the flood to connected sockets: before Linux 6.13 the kernel finds one of many on a port
/// only by looking at each.
pub const NR_CONNECTED: u32 = 64;

/// Threads of an application that reads one socket with several.
pub const NR_THREADS: usize = 8;

/// Frames per second that every mode should carry; a quarter less until each of them does. High,
/// because a thread that sleeps between bursts costs a wake-up each, which then is what is measured.
const LOSSFREE_RATE: u64 = 200_000;

/// Loss up to this share counts as none (as in RFC 2544 tests with real networks): a wake-up that
/// comes late may cost a packet.
const LOSSFREE: f64 = 0.001;

/// Until the last packets have gone through, and the modes' threads are back to sleep.
const SETTLE: Duration = Duration::from_millis(50);

/// One queue on [`INTERRUPT_CPU`], and an application elsewhere.
pub struct Bed {
    pub(super) link: Link,
    pub(super) nic: Nic,
    others: CpuMask,
    all: CpuMask,
}

/// What one measurement found.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Seconds of traffic.
    pub seconds: f64,
    /// Frames that the device took.
    pub accepted: u64,
    /// Datagrams that the application got.
    pub delivered: u64,
    /// CPU time of the receiving CPU, ns, without the wire.
    pub rx_cpu_ns: u64,
    /// Packets that the stack processed, by CPU.
    pub processed: BTreeMap<u32, u64>,
}

impl Bed {
    /// Makes the lab.
    ///
    /// # Errors
    /// When the host does not allow it, or has a single CPU.
    pub fn new() -> Result<Self> {
        let all = Topology::host().online()?;
        let others = all.without(&CpuMask::from_iter([INTERRUPT_CPU]));
        ensure!(
            !others.is_empty(),
            "one CPU has nothing to steer to: this takes two"
        );
        let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
        let link = Link::new(&tester, &dut, &LinkConfig::default())?;
        let nic = Nic::new(&link.dut, &[INTERRUPT_CPU])?;
        Ok(Self {
            link,
            nic,
            others,
            all,
        })
    }

    /// The masks to compare, by the name of their case.
    pub fn masks(&self) -> [(&'static str, &CpuMask); 2] {
        [("others", &self.others), ("all", &self.all)]
    }

    /// Sends for `seconds`, as fast as it can or at `rate` frames per second, with `mode` over
    /// `cpus`, to these sockets.
    ///
    /// # Errors
    /// When something of the lab failed, the mode had no effect, or packets are unaccounted for.
    pub fn measure(
        &mut self,
        mode: Mode,
        cpus: &CpuMask,
        to: Sockets,
        rate: Option<u64>,
        seconds: f64,
    ) -> Result<Sample> {
        let active = Active::start(&self.link.dut, mode, cpus)?;
        self.nic.bind()?;
        let flows = UdpFlows::to(&self.link.dut, to.nr_flows());
        let application = Application::start(&self.link.dut, &flows, to, self.others.first())?;
        let config = WireConfig {
            frames: Frames::Udp(flows),
            count: None,
            rate,
            lossless: false,
            window: None,
        };

        let cpu_before = self.nic.cpu_ns(0)?;
        let softnet_before = processed()?;
        let start = Instant::now();
        let wire = Wire::start(&self.link, INTERRUPT_CPU, &config)?;
        sleep(Duration::from_secs_f64(seconds));
        // What comes after the wire stops was accepted while it ran: only the backlogs are left.
        let sent = wire.stop()?;
        let elapsed = start.elapsed().as_secs_f64();
        sleep(SETTLE);
        let rx_cpu_ns = self.nic.cpu_ns(0)? - cpu_before;
        let softnet_after = processed()?;
        let delivered = application.stop()?;

        let sample = Sample {
            seconds: elapsed,
            accepted: sent.sent - sent.lost,
            delivered,
            rx_cpu_ns,
            processed: softnet_after
                .iter()
                .map(|(cpu, n)| {
                    (
                        *cpu,
                        n.wrapping_sub(softnet_before.get(cpu).copied().unwrap_or(0)),
                    )
                })
                .collect(),
        };
        if let Some(status) = active.status()? {
            let queue: &Queue = &status.devices[0].queues[0];
            if let Some(why) = queue.imbalance() {
                anyhow::bail!("rxsteer's account does not close: {why}");
            }
            ensure!(
                queue.received == sample.accepted,
                "rxsteer received {} of {} frames",
                queue.received,
                sample.accepted
            );
        }
        active.stop()?;
        ensure!(
            sample.accepted > 0,
            "the device accepted nothing: the wire did not run"
        );
        Ok(sample)
    }
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

    /// Datagrams that it got.
    fn stop(self) -> Result<u64> {
        Ok(match self {
            Self::Server(sink) => sink.stop()?.received.iter().sum(),
            Self::Connected(threads) => threads.stop()?.received,
        })
    }
}

/// Packets that the stack has processed on each CPU; the kernel's counters wrap at 32 bits.
fn processed() -> Result<BTreeMap<u32, u64>> {
    Ok(softnet()?
        .into_iter()
        .map(|s| (s.cpu, s.processed))
        .collect())
}

/// Compares no steering, kernel RPS, a naive cpumap, rxsteer by RPS alone and with its default policy;
/// to connected sockets, which kernel RFS follows too, kernel RFS and rxsteer; and to a socket that
/// several threads read, what their following costs.
///
/// # Errors
/// When a run did not measure what it claims.
pub fn flood(effort: &Effort<'_>) -> Result<Report> {
    const MODES: [Mode; 5] = [
        Mode::None,
        Mode::KernelRps,
        Mode::Cpumap,
        Mode::RxsteerRps,
        Mode::Rxsteer,
    ];
    const OTHERS: [(&str, Sockets, [Mode; 3]); 2] = [
        (
            "connected",
            Sockets::Connected,
            [Mode::None, Mode::KernelRfs, Mode::Rxsteer],
        ),
        (
            "shared",
            Sockets::Shared,
            [Mode::None, Mode::RxsteerRps, Mode::Rxsteer],
        ),
    ];
    let mut bed = Bed::new()?;
    let masks = bed.masks().map(|(case, cpus)| (case, cpus.clone()));
    let all = &masks[1].1;
    let total = masks.len() * MODES.len() * 2 + OTHERS.len() * 3;
    let total = u64::from(effort.rounds) * total as u64;
    let mut rounds = Rounds::default();
    for _ in 0..effort.rounds {
        for (case, cpus) in &masks {
            for mode in MODES {
                (effort.progress)(&format!("{case}: {mode}, flooded"), total);
                let sample = bed
                    .measure(mode, cpus, Sockets::Server, None, effort.seconds)
                    .with_context(|| format!("{case}, {mode}"))?;
                add(&mut rounds, case, mode, &sample);
            }
            for (mode, ns) in lossfree(&mut bed, &MODES, case, cpus, effort, total)? {
                rounds.add(case, &mode.to_string(), "rx_cpu_ns_per_packet", ns);
            }
        }
        for (case, sockets, modes) in OTHERS {
            for mode in modes {
                (effort.progress)(&format!("{case}: {mode}, flooded"), total);
                let sample = bed
                    .measure(mode, all, sockets, None, effort.seconds)
                    .with_context(|| format!("{case}, {mode}"))?;
                add(&mut rounds, case, mode, &sample);
            }
        }
    }
    Ok(rounds.report("flood", effort.rounds))
}

fn add(rounds: &mut Rounds, case: &str, mode: Mode, sample: &Sample) {
    let per_second = |n: u64| n as f64 / sample.seconds;
    let mode = mode.to_string();
    rounds.add(case, &mode, "accepted_pps", per_second(sample.accepted));
    rounds.add(case, &mode, "delivered_pps", per_second(sample.delivered));
}

/// The receiving CPU's time per packet, ns, in each mode, at a rate that all of them carry.
fn lossfree(
    bed: &mut Bed,
    modes: &[Mode],
    case: &str,
    cpus: &CpuMask,
    effort: &Effort<'_>,
    total: u64,
) -> Result<Vec<(Mode, f64)>> {
    let mut rate = LOSSFREE_RATE;
    'rate: loop {
        ensure!(
            rate > 1000,
            "no mode carries {rate} packets per second without loss"
        );
        let mut found = Vec::new();
        for &mode in modes {
            (effort.progress)(&format!("{case}: {mode}, {rate} packets/s"), total);
            let sample = bed
                .measure(mode, cpus, Sockets::Server, Some(rate), effort.seconds)
                .with_context(|| format!("{case}, {mode}"))?;
            let lost = 1.0 - sample.delivered as f64 / sample.accepted as f64;
            if lost > LOSSFREE {
                rate -= rate / 4;
                continue 'rate;
            }
            found.push((mode, sample.rx_cpu_ns as f64 / sample.accepted as f64));
        }
        return Ok(found);
    }
}
