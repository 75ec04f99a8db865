// SPDX-License-Identifier: MIT OR Apache-2.0
//! `reorder`: packets that overtake an earlier one of their flow, while everything moves.
//!
//! Masks change every 10 ms, each time while a CPU is kept from its work, so that packets wait there;
//! applications change their CPU as fast as they can; packets come at the highest rate that the
//! receivers keep up with. Each case adds something of its own. What must come out is zero. The
//! control, `unguarded`, is the same program with its rule of order switched off: it shows that these
//! packets would overtake each other.
//!
//! Order is looked at twice: where the device hands its packets to the stack, which is what the rule
//! of order is about, and where the application reads them.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::Effort;
use super::mode::Active;
use crate::accounting::Queue;
use crate::backlogs::LIMIT_MAX;
use crate::cli::Tunnel;
use crate::cpumask::CpuMask;
use crate::lab::frame::{Frames, TcpFlows, UdpFlows, Vxlan};
use crate::lab::hog::Hog;
use crate::lab::jumper::{Jumpers, JumpersReport, Reads};
use crate::lab::link::{Link, LinkConfig};
use crate::lab::netns::Netns;
use crate::lab::nic::Nic;
use crate::lab::setting::Setting;
use crate::lab::wire::{Window, Wire, WireConfig};
use crate::lab::witness::Witness;
use crate::lab::{sockets, softnet};
use crate::run::{self, Change, Mode, Options, RpsCpus};
use crate::status::table;
use crate::topology::Topology;

/// The CPU that polls the queue, unless that is moved.
const INTERRUPT_CPU: u32 = 0;

/// From one change of the masks to the next.
const STEP: Duration = Duration::from_millis(10);

/// For how long a CPU does nothing else, before a change and after it.
const HOG: Duration = Duration::from_millis(2);

/// Steps between two restarts, or two changes of a CPU: both take longer than a step.
const REST: u64 = 8;

/// Frames under way at most: fewer than a backlog holds, so that none need be dropped.
const WINDOW: u64 = 8192;

/// Of UDP: few enough that a dozen packets of each are under way.
const NR_FLOWS: u32 = 512;

/// Packets that the application has not read, at most, where it polls: it has to find its socket
/// empty now and then.
const BUSY_POLL_WINDOW: u64 = 256;

/// So few that of these, too, several are of one flow.
const NR_BUSY_POLL_FLOWS: u32 = 32;

/// How long it polls, at most.
const BUSY_POLL_US: u32 = 500;

/// Bytes of each socket's buffer; a frame takes some 5 kB of it.
const RCVBUF: usize = 64 << 20;

/// How long the last packets may take to arrive.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the traffic is, and what is done to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// A connected socket per flow.
    Udp,
    /// One unconnected socket for all flows, as DNS and QUIC servers have.
    UdpServer,
    /// TCP without PSH: GRO waits for more.
    Tcp,
    /// TCP with PSH at the end of each run, which ends GRO's waiting.
    TcpPush,
    /// UDP in a VXLAN tunnel, steered by the inner flow.
    Vxlan,
    /// Routed to another namespace, over a veth of one queue.
    SecondVeth,
    /// The application polls the queue itself.
    BusyPoll,
    /// The thread that polls the queue goes to another CPU at each step.
    Irq,
    /// The queue is polled in softirq, on another CPU at each step.
    Softirq,
    /// rxsteer is stopped and started again.
    Restart,
    /// A CPU goes offline and comes back.
    Hotplug,
}

impl Case {
    /// All of them, in the order in which they are reported.
    pub const ALL: [Self; 11] = [
        Self::Udp,
        Self::UdpServer,
        Self::Tcp,
        Self::TcpPush,
        Self::Vxlan,
        Self::SecondVeth,
        Self::BusyPoll,
        Self::Irq,
        Self::Softirq,
        Self::Restart,
        Self::Hotplug,
    ];

    fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp | Self::TcpPush)
    }

    /// Something is done that can be counted.
    fn is_eventful(self) -> bool {
        matches!(
            self,
            Self::BusyPoll | Self::Irq | Self::Softirq | Self::Restart | Self::Hotplug
        )
    }

    /// Other devices, with queues of their own, are between the steered one and the application.
    fn has_devices_above(self) -> bool {
        matches!(self, Self::Vxlan | Self::SecondVeth)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Udp => "udp",
            Self::UdpServer => "udp-server",
            Self::Tcp => "tcp",
            Self::TcpPush => "tcp-push",
            Self::Vxlan => "vxlan",
            Self::SecondVeth => "second-veth",
            Self::BusyPoll => "busy-poll",
            Self::Irq => "irq",
            Self::Softirq => "softirq",
            Self::Restart => "restart",
            Self::Hotplug => "hotplug",
        })
    }
}

/// What one measurement, or several together, found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sample {
    /// Seconds of traffic.
    pub seconds: f64,
    /// Packets that the device handed to the stack, or for TCP segments that the application read:
    /// all whose order was looked at.
    pub packets: u64,
    /// Packets that the application read.
    pub read: u64,
    /// Packets that the device handed to the stack after a later one of their flow.
    pub overtaken_at_delivery: u64,
    /// Packets that the application, or TCP, got after a later one of their flow. Where another
    /// device is in between, it may have done that.
    pub overtaken_at_socket: u64,
    /// Times that a flow changed its location.
    pub moves: u64,
    /// Packets whose flow wanted to move and had to wait.
    pub held: u64,
    /// Times that an application's thread changed its CPU.
    pub jumps: u64,
    /// Times that the case did what it is named after: the queue's CPU changed, rxsteer was
    /// started again, a CPU changed its state, or the packets that the application polled.
    pub events: u64,
    /// Packets that were lost before the device could hand them on: dropped or shed by rxsteer.
    pub dropped: u64,
}

/// A measurement under way.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Since it began.
    pub elapsed: Duration,
    /// Packets delivered so far.
    pub packets: u64,
    /// Packets delivered out of order so far.
    pub overtaken: u64,
    /// Whether the applications have moved, and what the case is about has happened.
    pub eventful: bool,
}

impl Sample {
    fn add(&mut self, other: &Self) {
        self.seconds += other.seconds;
        self.packets += other.packets;
        self.read += other.read;
        self.overtaken_at_delivery += other.overtaken_at_delivery;
        self.overtaken_at_socket += other.overtaken_at_socket;
        self.moves += other.moves;
        self.held += other.held;
        self.jumps += other.jumps;
        self.events += other.events;
        self.dropped += other.dropped;
    }
}

/// A link, its sockets, and what is sent to them.
struct Bed {
    link: Link,
    _second: Option<Link>,
    /// Without it, the queue is polled where the wire sends.
    nic: Option<Nic>,
    frames: Frames,
    /// Where the application is, and what it reads, a list a thread.
    application: Netns,
    sockets: Vec<Vec<OwnedFd>>,
    online: CpuMask,
}

impl Bed {
    fn new(case: Case) -> Result<Self> {
        let online = Topology::host().online()?;
        ensure!(online.len() > 1, "a flow can't move on one CPU");
        let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
        let link = Link::new(&tester, &dut, &LinkConfig::default())?;
        let threaded = case != Case::Softirq;
        let nic = threaded.then(|| Nic::new(&link.dut, &[INTERRUPT_CPU]));
        let mut application = dut.clone();
        let mut second = None;
        let mut flows = UdpFlows {
            run: 4,
            ..UdpFlows::to(&link.dut, NR_FLOWS)
        };
        let frames = match case {
            Case::Tcp | Case::TcpPush => {
                flows = UdpFlows {
                    nr_flows: 64,
                    run: 16,
                    payload_len: 500,
                    ..flows
                };
                Frames::Tcp(TcpFlows {
                    flows: flows.clone(),
                    first_seq: 1,
                    ack: 1,
                    push: case == Case::TcpPush,
                })
            }
            Case::Vxlan => {
                let vni = 42;
                let inner = link.dut.vxlan(1, vni)?;
                flows = UdpFlows {
                    run: flows.run,
                    ..UdpFlows::to(&inner, flows.nr_flows)
                };
                Frames::Vxlan(Vxlan::to(&link.dut, vni), flows.clone())
            }
            Case::SecondVeth => {
                application = Netns::new("application")?;
                let config = LinkConfig {
                    id: 1,
                    ..Default::default()
                };
                let onward = Link::new(&dut, &application, &config)?;
                dut.run(|| {
                    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")
                        .context("a namespace that does not forward")
                })?;
                flows.daddr = IpAddr::V4(onward.dut.ipv4);
                second = Some(onward);
                Frames::Udp(flows.clone())
            }
            Case::BusyPoll => {
                flows.nr_flows = NR_BUSY_POLL_FLOWS;
                Frames::Udp(flows.clone())
            }
            _ => Frames::Udp(flows.clone()),
        };
        let sockets = match &frames {
            Frames::Tcp(tcp) => halves(sockets::established(&application, tcp, RCVBUF)?),
            _ if case == Case::Udp => halves(sockets::connected(&application, &flows, RCVBUF)?),
            _ => {
                let server = sockets::server(&application, &flows, RCVBUF)?;
                if case == Case::BusyPoll {
                    sockets::busy_poll(&server, BUSY_POLL_US)?;
                }
                vec![vec![server]]
            }
        };
        Ok(Self {
            link,
            _second: second,
            nic: nic.transpose()?,
            frames,
            application,
            sockets,
            online,
        })
    }
}

/// For two threads.
fn halves(mut sockets: Vec<OwnedFd>) -> Vec<Vec<OwnedFd>> {
    let second = sockets.split_off(sockets.len() / 2);
    vec![sockets, second]
}

/// What keeps everything moving.
struct Storm<'a> {
    case: Case,
    link: &'a Link,
    nic: Option<Nic>,
    online: &'a CpuMask,
    options: &'a Options,
    /// Whether the last CPU is online, if that is to change.
    hotplug: Option<Setting>,
    is_offline: bool,
    step: u64,
    events: u64,
    /// Of those that were stopped before their end.
    moves_before: u64,
    held_before: u64,
}

impl<'a> Storm<'a> {
    fn new(
        case: Case,
        link: &'a Link,
        nic: Option<Nic>,
        online: &'a CpuMask,
        options: &'a Options,
    ) -> Result<Self> {
        let last = online.iter().last().context("no CPU is online")?;
        let hotplug = (case == Case::Hotplug)
            .then(|| Setting::keep(&format!("/sys/devices/system/cpu/cpu{last}/online")));
        Ok(Self {
            case,
            link,
            nic,
            online,
            options,
            hotplug: hotplug.transpose()?,
            is_offline: false,
            step: 0,
            events: 0,
            moves_before: 0,
            held_before: 0,
        })
    }

    /// The next step; rxsteer may be another afterwards.
    fn step(&mut self, mut active: Active<'a>, wire: &Wire) -> Result<Active<'a>> {
        let dut = &self.link.dut;
        let online = self.online_now();
        let masks = masks(&online);
        let mask = &masks[self.step as usize % masks.len()];
        // Each CPU with each mask: what waits matters where it is left.
        let hog = self.step as usize + self.step as usize / masks.len();
        let hog = online.iter().nth(hog % online.len());
        self.step += 1;
        // The only CPU is everybody's.
        let hog = hog.filter(|_| online.len() > 1).map(Hog::new).transpose()?;
        sleep(HOG);
        dut.netns
            .run(|| run::set(Change::rps_cpus(&dut.name, None, &mask.to_mask_string())))?;
        sleep(HOG);
        drop(hog);
        if matches!(self.case, Case::Irq | Case::Softirq) {
            let next = self.step as usize % self.online.len();
            let next = self.online.iter().nth(next).context("no CPU is online")?;
            match &mut self.nic {
                Some(nic) => nic.move_to(0, next)?,
                None => wire.move_to(next)?,
            }
            self.events += 1;
        }
        if !self.step.is_multiple_of(REST) {
            return Ok(active);
        }
        if let Some(hotplug) = &self.hotplug {
            hotplug.set(if self.is_offline { "1" } else { "0" })?;
            self.is_offline = !self.is_offline;
            self.events += 1;
        }
        if self.case == Case::Restart {
            let queue = queue(&active)?;
            self.moves_before += queue.moves;
            self.held_before += queue.held;
            active.stop()?;
            active = Active::steer(&self.link.dut, self.options.clone())?;
            self.events += 1;
        }
        Ok(active)
    }

    fn online_now(&self) -> CpuMask {
        let last = self.online.iter().last();
        let offline = last.filter(|_| self.is_offline);
        self.online.without(&CpuMask::from_iter(offline))
    }
}

/// All CPUs, all but the interrupt's, and each alone.
fn masks(online: &CpuMask) -> Vec<CpuMask> {
    let others = online.without(&CpuMask::from_iter([INTERRUPT_CPU]));
    let mut masks = vec![online.clone(), others];
    masks.extend(online.iter().map(|cpu| CpuMask::from_iter([cpu])));
    masks.retain(|mask| !mask.is_empty());
    masks
}

/// rxsteer's account of the only queue.
fn queue(active: &Active<'_>) -> Result<Queue> {
    let mut status = active.status()?.context("rxsteer keeps account")?;
    let queues = &mut status.devices[0].queues;
    Ok(std::mem::take(&mut queues[0]))
}

/// Counters that a TCP run must leave alone.
const TCP_DROPS: [&str; 9] = [
    "InErrs",
    "InCsumErrors",
    "RcvPruned",
    "OfoPruned",
    "TCPBacklogDrop",
    "TCPRcvQDrop",
    "TCPOFODrop",
    "TCPZeroWindowDrop",
    "TCPAbortOnMemory",
];

/// Sends, and keeps everything moving, until it is enough.
///
/// # Errors
/// When the run did not measure what it claims: nothing moved, packets are unaccounted for, a TCP
/// packet was dropped, the host does not allow it.
pub fn measure(case: Case, unguarded: bool, enough: &dyn Fn(&Progress) -> bool) -> Result<Sample> {
    let Bed {
        link,
        nic,
        frames,
        application,
        sockets,
        online,
        _second,
    } = Bed::new(case)?;
    let options = Options {
        mode: Mode::Native,
        rps_cpus: RpsCpus::Mask(online.clone()),
        backlog: Some(LIMIT_MAX),
        tunnels: if case == Case::Vxlan {
            Tunnel::Vxlan.bits()
        } else {
            0
        },
        unguarded,
        ..Options::new([link.dut.name.as_str()])
    };
    let reads = match &frames {
        Frames::Tcp(tcp) => Reads::Segments(tcp.flows.payload_len as u64),
        _ => Reads::Datagrams,
    };
    let witness = Arc::new(Witness::new(&link.dut, &frames)?);
    let mut active = Active::steer(&link.dut, options.clone())?;
    let tcp_before = softnet::tcp(&application)?;
    let cpus: Vec<u32> = online.iter().collect();
    let jumpers = Jumpers::start(&application, sockets, reads, &cpus)?;
    let read = jumpers.received();
    let read: Arc<dyn Fn() -> u64 + Send + Sync> = Arc::new(move || read.sum());
    let seen = witness.clone();
    let seen: Arc<dyn Fn() -> u64 + Send + Sync> = Arc::new(move || seen.seen());
    // GRO makes one packet of many segments.
    let packets = if case.is_tcp() { &read } else { &seen };
    // Sockets may drop datagrams, and what waits there is no longer on its way. TCP must lose
    // nothing.
    let (frames_under_way, received) = match case {
        Case::BusyPoll => (BUSY_POLL_WINDOW, &read),
        _ => (WINDOW, packets),
    };
    let config = WireConfig {
        frames,
        count: None,
        rate: None,
        lossless: true,
        window: Some(Window {
            frames: frames_under_way,
            received: received.clone(),
            may_drop: !case.is_tcp(),
        }),
    };
    let wire = Wire::start(&link, INTERRUPT_CPU, &config)?;

    let mut storm = Storm::new(case, &link, nic, &online, &options)?;
    let start = Instant::now();
    loop {
        let next = Instant::now() + STEP;
        active = storm.step(active, &wire)?;
        sleep(next.saturating_duration_since(Instant::now()));
        let events = match case {
            Case::BusyPoll => {
                let tcp = tcp_since(&application, &tcp_before)?;
                tcp.get("BusyPollRxPackets").copied().unwrap_or(0)
            }
            _ => storm.events,
        };
        let progress = Progress {
            elapsed: start.elapsed(),
            packets: packets(),
            overtaken: witness.reordered(),
            eventful: jumpers.jumps() > 0 && (events > 0 || !case.is_eventful()),
        };
        if enough(&progress) {
            break;
        }
    }
    // All CPUs are online again.
    drop(storm.hotplug.take());
    let (events, moves, held) = (storm.events, storm.moves_before, storm.held_before);
    let sent = wire.stop()?;
    let seconds = start.elapsed().as_secs_f64();
    let accepted = sent.sent - sent.lost;
    let queue = at_rest(&active, case, accepted)?;
    let passed = queue.inline + queue.sums.delivered;
    let read = read_all(jumpers, |read| {
        if case.is_tcp() {
            Some(read.received == sent.sent)
        } else if case.has_devices_above() {
            None
        } else {
            let seen = packets();
            let delivered = case == Case::Restart || seen == passed;
            Some(delivered && read.received + read.dropped == seen)
        }
    })?;
    active.stop()?;
    let tcp = tcp_since(&application, &tcp_before)?;
    let count = |name: &str| {
        let count = tcp.get(name).copied();
        count.with_context(|| format!("this kernel does not count {name}"))
    };

    let sample = Sample {
        seconds,
        packets: packets(),
        read: read.received,
        overtaken_at_delivery: witness.reordered(),
        overtaken_at_socket: if case.is_tcp() {
            count("TCPOFOQueue")?
        } else {
            read.reordered
        },
        moves: moves + queue.moves,
        held: held + queue.held,
        jumps: read.jumps,
        events: if case == Case::BusyPoll {
            count("BusyPollRxPackets")?
        } else {
            events
        },
        dropped: accepted.saturating_sub(packets()),
    };
    ensure!(sample.moves > 0, "no flow has moved: {sample:?}");
    ensure!(sample.jumps > 0, "no application has moved: {sample:?}");
    ensure!(
        sample.packets > sample.dropped && sample.read > 0,
        "most packets were dropped: {sample:?}"
    );
    ensure!(
        !case.is_eventful() || sample.events > 0,
        "what the case is about has not happened: {sample:?}"
    );
    if case.is_tcp() {
        for name in TCP_DROPS {
            let count = tcp.get(name).copied().unwrap_or(0);
            ensure!(count == 0, "TCP has dropped packets: {name} {count}");
        }
        ensure!(
            sample.read == sent.sent,
            "{} of {} segments were read: {queue:?}",
            sample.read,
            sent.sent
        );
    } else if case != Case::Restart {
        ensure!(
            sample.packets == passed,
            "of {passed} delivered packets {} were seen",
            sample.packets
        );
    }
    if !case.is_tcp() && !case.has_devices_above() {
        ensure!(
            read.received + read.dropped == sample.packets,
            "of {} delivered packets {} were read and {} dropped at the sockets",
            sample.packets,
            read.received,
            read.dropped
        );
    }
    Ok(sample)
}

/// Stops the application when it has read all; where that can't be known (`None`), when nothing more
/// comes.
fn read_all(
    jumpers: Jumpers,
    all: impl Fn(&JumpersReport) -> Option<bool>,
) -> Result<JumpersReport> {
    let deadline = Instant::now() + PATIENCE;
    let mut last = None;
    loop {
        let now = jumpers.report()?;
        let done = all(&now).unwrap_or(last == Some(now.received));
        if done || Instant::now() > deadline {
            return jumpers.stop();
        }
        last = Some(now.received);
        sleep(Duration::from_millis(100));
    }
}

/// What TCP has counted since.
fn tcp_since(netns: &Netns, before: &BTreeMap<String, u64>) -> Result<BTreeMap<String, u64>> {
    let mut now = softnet::tcp(netns)?;
    for (name, value) in &mut now {
        *value -= before.get(name).copied().unwrap_or(0).min(*value);
    }
    Ok(now)
}

/// The queue once nothing is under way. Both sums close then.
fn at_rest(active: &Active<'_>, case: Case, accepted: u64) -> Result<Queue> {
    let deadline = Instant::now() + PATIENCE;
    let mut last = 0;
    loop {
        let queue = queue(active)?;
        // One that has been started again has seen a part of it.
        let all = queue.received == accepted || case == Case::Restart && queue.received == last;
        if all && queue.sums.queued == 0 {
            if let Some(why) = queue.imbalance() {
                bail!("rxsteer's account does not close: {why}");
            }
            return Ok(queue);
        }
        last = queue.received;
        ensure!(
            Instant::now() < deadline,
            "rxsteer received {} of {accepted} frames, {} of them queued",
            queue.received,
            queue.sums.queued
        );
        sleep(Duration::from_millis(20));
    }
}

/// A case in one mode, all rounds together.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Its name.
    pub case: String,
    /// `rxsteer`, or `unguarded`: without its rule of order.
    pub mode: String,
    /// What was found.
    #[serde(flatten)]
    pub sample: Sample,
}

/// The result of the scenario.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `reorder`.
    pub scenario: String,
    /// How often every mode ran; the rows' figures are sums.
    pub rounds: u32,
    /// Two per case.
    pub rows: Vec<Row>,
}

/// Runs every case with and without the rule.
///
/// # Errors
/// When a run did not measure what it claims.
pub fn reorder(effort: &Effort<'_>) -> Result<Report> {
    const MODES: [(&str, bool); 2] = [("rxsteer", false), ("unguarded", true)];
    let length = Duration::from_secs_f64(effort.seconds);
    let mut rows: Vec<Row> = Case::ALL
        .iter()
        .flat_map(|case| MODES.map(|(mode, _)| (case.to_string(), mode.to_owned())))
        .map(|(case, mode)| Row {
            case,
            mode,
            sample: Sample::default(),
        })
        .collect();
    let total = u64::from(effort.rounds) * rows.len() as u64;
    for _ in 0..effort.rounds {
        let mut rows = rows.iter_mut();
        for case in Case::ALL {
            for (mode, unguarded) in MODES {
                (effort.progress)(&format!("{case}: {mode}"), total);
                let sample = measure(case, unguarded, &|progress| progress.elapsed >= length)
                    .with_context(|| format!("{case}, {mode}"))?;
                let row = rows.next().context("as many rows as cases and modes")?;
                row.sample.add(&sample);
            }
        }
    }
    for row in &rows {
        ensure!(
            row.mode == "rxsteer" || row.sample.overtaken_at_delivery > 0,
            "{}: nothing was overtaken without the rule either, so that this shows nothing: run it \
             longer, on a machine with less to do",
            row.case
        );
    }
    Ok(Report {
        scenario: "reorder".to_owned(),
        rounds: effort.rounds,
        rows,
    })
}

impl Report {
    /// The report for people; ends with a newline.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(out, "{}, sums of {} rounds\n", self.scenario, self.rounds);
        let mut table = table(&[
            "case",
            "mode",
            "packets",
            "read",
            "overtaken at delivery",
            "at the socket",
            "moves",
            "moves/s",
            "held",
            "jumps",
            "events",
            "dropped",
        ]);
        for row in &self.rows {
            let s = &row.sample;
            let mut cells = vec![row.case.clone(), row.mode.clone()];
            cells.extend(
                [
                    s.packets,
                    s.read,
                    s.overtaken_at_delivery,
                    s.overtaken_at_socket,
                    s.moves,
                    (s.moves as f64 / s.seconds) as u64,
                    s.held,
                    s.jumps,
                    s.events,
                    s.dropped,
                ]
                .map(|n| n.to_string()),
            );
            table.add_row(cells);
        }
        let _ = writeln!(out, "{}", table.trim_fmt());
        out
    }
}
