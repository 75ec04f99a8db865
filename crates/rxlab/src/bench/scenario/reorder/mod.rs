// SPDX-License-Identifier: MIT OR Apache-2.0
//! `reorder`: packets that overtake an earlier one of their flow, while everything changes.
//!
//! Masks change every 10 ms, each time while a CPU is kept busy so that packets queue there.
//! Applications change their CPU as often as possible. Packets come at the highest rate that the
//! receivers sustain. Each case adds a change of its own. The result must be zero. The control,
//! `unguarded`, is rxsteer without its rule of order, and shows that these packets would overtake
//! each other.
//!
//! The order is checked where the device hands packets to the stack, for which the rule holds, and
//! where the application reads them.

mod case;
mod storm;
mod testbed;

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indexmap::IndexMap;
use rxsteer::api::status::Queue;
use rxsteer::daemon::options::Tunnel;
use rxsteer::daemon::options::{Mode, Options, RpsCpus};
use rxsteer::datapath::RPS_FLOW_CNT;
use rxsteer::datapath::backlogs::LIMIT_MAX;
use rxsteer::datapath::policy::Policy;
use rxsteer::host::setting::Setting;
use storm::{Storm, queue};
use testbed::{INTERRUPT_CPU, Testbed, WARM_UP};

pub use case::Case;

use crate::bench::experiment::{CasePlan, Effort, Experiment, Plan, Values, detail, fit, headline};
use crate::bench::report::document::Better;
use crate::bench::report::document::SUBJECT;
use crate::bench::setup::mode::Active;
use crate::lab::frame::{Frames, UdpFlows};
use crate::lab::generator::{Generator, GeneratorConfig, Window};
use crate::lab::link::Link;
use crate::lab::migrator::{Migrators, MigratorsReport, Reads};
use crate::lab::senders::Senders;
use crate::lab::witness::Witness;
use crate::lab::{snmp, sockets};

/// Time between changes of the masks.
const STEP: Duration = Duration::from_millis(10);

/// Limit on frames under way: less than a backlog holds, so that none is dropped.
const WINDOW: u64 = 8192;

/// In softirq mode, packets that a CPU's softnet backlog takes (net.core.netdev_max_backlog): it has each
/// of those under way twice.
const SOFTNET_BACKLOG: u64 = 2 * WINDOW;

/// Limit on packets not yet read, if the application busy-polls: its socket must become empty from
/// time to time.
const BUSY_POLL_WINDOW: u64 = 256;

/// Packets that are forwarded, per second: what waits behind the device is then for the slow queue
/// to decide, and not for the machine.
const FORWARDED_PER_S: u64 = 20_000;

/// Packets per second in softirq mode, so that [`WINDOW`] is not full before a change of the mask is made, however
/// busy the machine is: half of them wait for the CPU that is kept from softirqs.
const SKBS_PER_S: u64 = 200_000;

/// Limit on packets not yet read behind a device without NAPI, whose queue holds 1000.
const CONTAINER_WINDOW: u64 = 512;

/// Limit on packets not yet delivered, if a tun device's transmit queue is on their way: it holds
/// 500, and drops more.
const TUN_WINDOW: u64 = 448;

/// Slots of a dev_flow_table, if many flows have to share each.
const FEW_SLOTS: u32 = 16;

/// Packets per second of each of two generators, which don't wait for one another's packets.
const SHARED_PER_S: u64 = 100_000;

/// Busy polling per read, us.
const BUSY_POLL_US: u32 = 500;

/// Limit on waiting for the last packets.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Counts of one measurement, or the sum of several.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Duration of the traffic.
    pub seconds: f64,
    /// Packets in checked order: handed to the stack by the device, or for TCP segments read by the
    /// application.
    pub packets: u64,
    /// Packets read by the application.
    pub read: u64,
    /// Packets that the device handed to the stack after a later one of their flow.
    pub overtaken_at_delivery: u64,
    /// Packets that reached the application, or TCP, after a later one of their flow. Devices above
    /// the steered one may have reordered them.
    pub overtaken_at_socket: u64,
    /// Packets that a second device, to which they were forwarded, received after a later one of
    /// their flow.
    pub overtaken_behind: u64,
    /// Changes of a flow's location.
    pub moves: u64,
    /// Packets of flows that had to wait before they could move.
    pub held: u64,
    /// Changes of the CPU of an application's thread.
    pub jumps: u64,
    /// Events of the case: changes of the queue's CPU, restarts of rxsteer, changes of a CPU's
    /// state, changes of the policy, or packets found by busy polling.
    pub events: u64,
    /// Packets lost before delivery: dropped or shed by rxsteer.
    pub dropped: u64,
}

/// State of a running measurement.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Time since its start.
    pub elapsed: Duration,
    /// Packets delivered so far.
    pub packets: u64,
    /// Packets delivered out of order so far.
    pub overtaken: u64,
    /// Packets that a second device received out of order so far.
    pub overtaken_behind: u64,
    /// Whether the applications have migrated, and the case had an event.
    pub eventful: bool,
}

/// TCP counters that must not grow.
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

/// Sends under continuous changes until `enough` returns true.
///
/// # Errors
/// When the host does not allow it, or the run did not measure what it claims: nothing moved,
/// packets are unaccounted for, a TCP packet was dropped.
pub fn measure(
    case: Case,
    mode: Mode,
    unguarded: bool,
    enough: &dyn Fn(&Progress) -> bool,
) -> Result<Sample> {
    let Testbed {
        link,
        nic,
        tunnel,
        other,
        frames,
        application,
        sockets,
        polling,
        online,
        second,
        kernel: _kernel,
    } = Testbed::new(case)?;
    let steered = other.as_ref().unwrap_or(&link.dut);
    let options = Options {
        // A policy under which all flows may move; the other policies have a case of their own.
        policy: match case {
            Case::TxQueuesByRps => Policy::RPS,
            _ => Policy::RFS,
        },
        flow_limit: 0,
        mode,
        rps_cpus: RpsCpus::Mask(online.clone()),
        backlog: Some(LIMIT_MAX),
        tunnels: (case == Case::Vxlan)
            .then_some(Tunnel::Vxlan)
            .into_iter()
            .collect(),
        rps_flow_cnt: match case {
            Case::SharedSlots => FEW_SLOTS,
            _ => RPS_FLOW_CNT,
        },
        unguarded,
        ..Options::new([steered.name.as_str()])
    };
    let reads = match &frames {
        Frames::Tcp(tcp) => Reads::Segments(tcp.flows.payload_len as u64),
        _ => Reads::Datagrams,
    };
    let witness = Arc::new(match case {
        Case::TxQueues | Case::TxQueuesByRps => Witness::that_records(steered, &frames)?,
        Case::TxQueuesByHash => Witness::that_forgets(steered, &frames)?,
        _ => Witness::new(steered, &frames)?,
    });
    let behind = second
        .as_ref()
        .map(|second| Witness::new(&second.dut, &frames));
    let behind = behind.transpose()?;
    let overtaken_behind = || behind.as_ref().map_or(0, |behind| behind.reordered());
    let _kept = match mode {
        Mode::Softirq => {
            let most = Setting::keep("/proc/sys/net/core/netdev_max_backlog")?;
            most.set(&SOFTNET_BACKLOG.to_string())?;
            Some(most)
        }
        _ => None,
    };
    let mut active = Active::steer(steered, options.clone())?;
    let tcp_before = snmp::tcp(&application)?;
    let cpus: Vec<u32> = online.iter().collect();
    let migrators = Migrators::start(&application, sockets, reads, &cpus)?;
    let each_read = migrators.received();
    let read = each_read.clone();
    let read: Arc<dyn Fn() -> u64 + Send + Sync> = Arc::new(move || read.sum());
    let seen = witness.clone();
    let seen: Arc<dyn Fn() -> u64 + Send + Sync> = Arc::new(move || seen.seen());
    // For TCP the witness can't count segments, since GRO merges them.
    let packets = if case.is_tcp() { &read } else { &seen };
    // Datagrams may be dropped at sockets, so those queued there do not count as under way. TCP
    // must lose nothing. A tun device's transmit queue would overflow if packets were given up.
    let (frames_under_way, received) = match case {
        Case::BusyPoll => (BUSY_POLL_WINDOW, &read),
        Case::Container => (CONTAINER_WINDOW, &read),
        Case::Tun => (TUN_WINDOW, packets),
        _ => (WINDOW, packets),
    };
    let config = GeneratorConfig {
        window: Some(Window {
            frames: frames_under_way,
            received: received.clone(),
            may_drop: !case.is_tcp() && case != Case::Tun,
        }),
        rate: match mode {
            _ if case.has_tx_queues() => Some(FORWARDED_PER_S),
            Mode::Softirq => Some(SKBS_PER_S),
            _ => None,
        },
        ..GeneratorConfig::lossless(frames, None)
    };
    let (mut generators, mut senders) = (Vec::new(), None);
    match (case, &config.frames) {
        (Case::SharedSlots, Frames::Udp(flows)) => {
            generators = two_generators(&link, flows, &cpus)?;
        }
        (Case::Lo, Frames::Udp(flows)) => {
            let each = WINDOW / u64::from(flows.nr_flows);
            senders = Some(Senders::start(
                &application,
                flows,
                &each_read,
                each,
                &cpus,
            )?);
        }
        _ => generators.push(Generator::start(&link, INTERRUPT_CPU, &config)?),
    }

    let mut storm = Storm::new(case, steered, nic, tunnel.as_ref(), &online, &options)?;
    let start = Instant::now();
    // Moves and packets overtaken behind the second device, before the case begins.
    let mut before = (!case.is_steady()).then_some((0, 0));
    let mut polls = [BUSY_POLL_US, 0].into_iter().cycle();
    loop {
        let next = Instant::now() + STEP;
        if let (Some(polling), Some(us)) = (&polling, polls.next()) {
            sockets::busy_poll(polling, us)?;
        }
        active = storm.step(active, generators.first())?;
        if let Some(senders) = &senders {
            storm.events = senders.moves();
        }
        sleep(next.saturating_duration_since(Instant::now()));
        let events = match case {
            Case::BusyPoll => {
                let tcp = snmp::since(&tcp_before, snmp::tcp(&application)?);
                tcp.get("BusyPollRxPackets").copied().unwrap_or(0)
            }
            _ => storm.events,
        };
        let progress = Progress {
            elapsed: start.elapsed(),
            packets: packets(),
            overtaken: witness.reordered(),
            overtaken_behind: overtaken_behind(),
            eventful: migrators.migrations() > 0 && (events > 0 || !case.is_eventful()),
        };
        if before.is_none() && packets() >= WARM_UP {
            before = Some((queue(&active)?.moves, overtaken_behind()));
        }
        if (before.is_some() || progress.elapsed > TIMEOUT) && enough(&progress) {
            break;
        }
    }
    // Restores all CPUs to online.
    drop(storm.hotplug.take());
    let (events, moves, held) = (storm.events, storm.moves_before, storm.held_before);
    let (moves_before, overtaken_before) = before.unwrap_or_default();
    let reports = generators.into_iter().map(Generator::stop);
    let reports = reports.collect::<Result<Vec<_>>>()?;
    let seconds = start.elapsed().as_secs_f64();
    let from_sockets = senders.map_or(Ok(0), Senders::stop)?;
    let sent = from_sockets + reports.iter().map(|report| report.sent).sum::<u64>();
    let accepted = sent - reports.iter().map(|report| report.lost).sum::<u64>();
    // A restarted rxsteer has counted only the latter part, and after GRO packets are fewer.
    let all_counted = case != Case::Restart && !(mode == Mode::Softirq && case.is_tcp());
    let queue = at_rest(&active, accepted, all_counted)?;
    let passed = queue.inline + queue.sums.delivered;
    let read = read_all(migrators, |read| {
        if case.is_tcp() {
            Some(read.received == sent)
        } else if case.has_devices_above() {
            None
        } else {
            let seen = packets();
            let delivered = case == Case::Restart || seen == passed;
            Some(delivered && read.received + read.dropped == seen)
        }
    })?;
    active.stop()?;
    let tcp = snmp::since(&tcp_before, snmp::tcp(&application)?);
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
        overtaken_behind: overtaken_behind() - overtaken_before,
        moves: moves + queue.moves - moves_before,
        held: held + queue.held,
        jumps: read.migrations,
        events: if case == Case::BusyPoll {
            count("BusyPollRxPackets")?
        } else {
            events
        },
        dropped: accepted.saturating_sub(packets()),
    };
    fit!(
        sample.moves > 0 || case.is_steady(),
        "no flow has moved: {sample:?}"
    );
    fit!(sample.jumps > 0, "no application has moved: {sample:?}");
    fit!(
        sample.packets > sample.dropped && sample.read > 0,
        "most packets were dropped: {sample:?}"
    );
    fit!(
        !case.is_eventful() || sample.events > 0,
        "what the case is about has not happened: {sample:?}"
    );
    if case.is_tcp() {
        for name in TCP_DROPS {
            let count = tcp.get(name).copied().unwrap_or(0);
            fit!(count == 0, "TCP has dropped packets: {name} {count}");
        }
        fit!(
            sample.read == sent,
            "{} of {} segments were read: {queue:?}",
            sample.read,
            sent
        );
    } else if case != Case::Restart {
        fit!(
            sample.packets == passed,
            "of {passed} delivered packets {} were seen",
            sample.packets
        );
    }
    if !case.is_tcp() && !case.has_devices_above() {
        fit!(
            read.received + read.dropped == sample.packets,
            "of {} delivered packets {} were read and {} dropped at the sockets",
            sample.packets,
            read.received,
            read.dropped
        );
    }
    Ok(sample)
}

/// A generator for each of two queues, with flows of its own.
fn two_generators(link: &Link, flows: &UdpFlows, cpus: &[u32]) -> Result<Vec<Generator>> {
    let second = UdpFlows {
        first_flow: flows.nr_flows,
        sport: flows.sport + (flows.nr_flows / flows.nr_saddrs) as u16,
        ..flows.clone()
    };
    let start = |(flows, cpu): (UdpFlows, &u32)| {
        let config = GeneratorConfig::lossless(Frames::Udp(flows), None).at(SHARED_PER_S);
        Generator::start(link, *cpu, &config)
    };
    [flows.clone(), second]
        .into_iter()
        .zip(cpus)
        .map(start)
        .collect()
}

/// Stops the application when it has read everything; if that is unknown (`None`), when nothing
/// more comes.
fn read_all(
    migrators: Migrators,
    all: impl Fn(&MigratorsReport) -> Option<bool>,
) -> Result<MigratorsReport> {
    let deadline = Instant::now() + TIMEOUT;
    let mut last = None;
    loop {
        let now = migrators.report()?;
        let done = all(&now).unwrap_or(last == Some(now.received));
        if done || Instant::now() > deadline {
            return migrators.stop();
        }
        last = Some(now.received);
        sleep(Duration::from_millis(100));
    }
}

/// Counters of the queue once nothing is under way. Both of its sums must close. `all_counted`:
/// rxsteer has received as many packets as were accepted.
fn at_rest(active: &Active<'_>, accepted: u64, all_counted: bool) -> Result<Queue> {
    let deadline = Instant::now() + TIMEOUT;
    let mut last = 0;
    loop {
        let queue = queue(active)?;
        let all = queue.received == accepted || !all_counted && queue.received == last;
        if all && queue.sums.queued == 0 {
            let why = queue.imbalance().unwrap_or_default();
            fit!(why.is_empty(), "rxsteer's account does not close: {why}");
            return Ok(queue);
        }
        last = queue.received;
        fit!(
            Instant::now() < deadline,
            "rxsteer received {} of {accepted} frames, {} of them queued",
            queue.received,
            queue.sums.queued
        );
        sleep(Duration::from_millis(20));
    }
}

pub struct Reorder {
    seconds: f64,
}

impl Reorder {
    pub fn new(effort: &Effort) -> Self {
        let seconds = effort.seconds;
        Self { seconds }
    }
}

/// With the rule of order, and without.
const MODES: [(&str, Mode, bool); 4] = [
    (SUBJECT, Mode::Native, false),
    ("unguarded", Mode::Native, true),
    ("rxsteer-softirq", Mode::Softirq, false),
    ("unguarded-softirq", Mode::Softirq, true),
];

/// Those of a case.
fn modes(case: Case) -> Vec<(&'static str, Mode, bool)> {
    let has = |&(_, mode, _): &_| !case.needs_softirq_mode() || mode == Mode::Softirq;
    MODES.into_iter().filter(has).collect()
}

impl Experiment for Reorder {
    fn plan(&self) -> Plan {
        use Better::{Lower, Neither};
        Plan {
            scenario: "reorder",
            question: "Does a packet overtake an earlier one of its flow, while masks, applications, \
                       interrupts and CPUs change?",
            metrics: IndexMap::from([
                headline("overtaken", "Overtaken when handed to the stack", "packets", Lower),
                headline("moves_per_s", "Moves of flows", "1/s", Neither),
                detail("overtaken_at_socket", "Overtaken when read", "packets", Lower),
                detail("overtaken_behind", "Overtaken behind a second device", "packets", Lower),
                detail("packets", "Delivered", "packets", Neither),
                detail("held", "Whose flow had to wait", "packets", Neither),
                detail("dropped", "Dropped before delivery", "packets", Lower),
                detail("jumps", "Moves of applications", "1", Neither),
                detail("events", "Events of the case", "1", Neither),
            ]),
            cases: Case::ALL
                .map(|case| CasePlan {
                    case: case.to_string(),
                    modes: modes(case).iter().map(|(name, ..)| (*name).to_owned()).collect(),
                })
                .to_vec(),
            conditions: IndexMap::new(),
            notes: vec![
                "unguarded is rxsteer without its rule of order: it shows that these packets would \
                 overtake each other. Above rxsteer, the vxlan and container cases have a queue \
                 for each CPU, and tx-queues has four transmit queues, which may reorder before the \
                 socket."
                    .to_owned(),
            ],
            seconds_each: self.seconds + 0.3,
        }
    }

    fn measure(&mut self, case: usize, mode: usize) -> Result<Values> {
        let length = Duration::from_secs_f64(self.seconds);
        let case = Case::ALL[case];
        let (_, mode, unguarded) = modes(case)[mode];
        let s = measure(case, mode, unguarded, &|now| now.elapsed >= length)?;
        fit!(
            !unguarded || case.is_beyond() || s.overtaken_at_delivery > 0,
            "nothing was overtaken without the rule either, so that this round shows nothing: run it \
             longer, on a machine with less to do"
        );
        Ok(vec![
            ("overtaken", s.overtaken_at_delivery as f64),
            ("moves_per_s", s.moves as f64 / s.seconds),
            ("overtaken_at_socket", s.overtaken_at_socket as f64),
            ("overtaken_behind", s.overtaken_behind as f64),
            ("packets", s.packets as f64),
            ("held", s.held as f64),
            ("dropped", s.dropped as f64),
            ("jumps", s.jumps as f64),
            ("events", s.events as f64),
        ])
    }
}
