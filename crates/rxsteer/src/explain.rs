// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer explain`: why a flow is on the CPU where it is, in words.

use std::fmt::{self, Write};
use std::str::FromStr;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::accounting;
use crate::flow::{Flow, FlowError, FlowHash};
use crate::flows::{self, Entry, Hints, Location, Query, Queue, Reader, Reason};
use crate::load::{self, Load, Pressure, TURN_MS};
use crate::native;
use crate::policy::{Base, Policy};
use crate::rps_map;
use crate::rx::types::{backlog, flow_tunnel, rps_dev_flow, rx_policy, rx_queue};

/// A flow by one of its two names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Name {
    /// What its packets say.
    Flow(Flow),
    /// Their hash.
    Hash(FlowHash),
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flow(flow) => flow.fmt(f),
            Self::Hash(hash) => hash.fmt(f),
        }
    }
}

impl FromStr for Name {
    type Err = FlowError;

    fn from_str(text: &str) -> Result<Self, FlowError> {
        Ok(match text.starts_with("0x") {
            true => Self::Hash(text.parse()?),
            false => Self::Flow(text.parse()?),
        })
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.to_string()
    }
}

impl TryFrom<String> for Name {
    type Error = FlowError;

    fn try_from(text: String) -> Result<Self, FlowError> {
        text.parse()
    }
}

/// What `rxsteer explain` can be asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// One flow.
    Name(Name),
    /// The sockets of a process.
    Pid(u32),
    /// What comes to a local port.
    Port(u16),
    /// A local port if there is one, a process otherwise.
    Number(u32),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Pid(pid) => write!(f, "pid:{pid}"),
            Self::Port(port) => write!(f, "port:{port}"),
            Self::Number(number) => number.fmt(f),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |of: &str, text: &str, max: u32| match text.parse() {
            Ok(n) if n <= max => Ok(n),
            _ => Err(format!("{text:?} is not a {of}, 0 to {max}")),
        };
        if let Some(pid) = text.strip_prefix("pid:") {
            return number("process id", pid, i32::MAX as u32).map(Self::Pid);
        }
        if let Some(port) = text.strip_prefix("port:") {
            return number("port", port, u16::MAX.into()).map(|port| Self::Port(port as u16));
        }
        if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
            return number("port or process id", text, i32::MAX as u32).map(Self::Number);
        }
        text.parse().map(Self::Name).map_err(|e: FlowError| {
            format!("{e}; pid:NUMBER asks about a process, port:NUMBER about a local port")
        })
    }
}

/// What a running rxsteer is asked to explain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// These flows,
    pub names: Vec<Name>,
    /// and those in its tables that come to these local ports.
    pub local_ports: Vec<u16>,
    /// Ports of UDP sockets that are not connected, as far as the asker knows.
    pub unconnected: Vec<u16>,
    /// At most so many: those with the most packets.
    pub limit: usize,
}

/// Why the CPU of a flow's application is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unknown {
    /// Policy off.
    PolicyOff,
    /// Policy rps, whatever is added to it.
    PolicyRps,
    /// One of the tables has no size.
    NoTable,
    /// The kernel does not let sockets be watched.
    Unsupported,
    /// Flows are named by the device's hash.
    DeviceHash,
    /// Packets without ports: no socket can be found.
    NoPorts,
    /// A tunnel that is not looked into.
    Tunnel,
    /// Another flow has the entry of the `sock_flow_table`.
    EntryTaken,
    /// Its socket is not connected, and its application does not ask who sent.
    Unconnected,
    /// No application has been seen to take or send its data.
    NotSeen,
}

/// What the `sock_flow_table` says of a flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Application {
    /// Where it was last seen.
    pub cpu: Option<u32>,
    /// That CPU is offline.
    pub offline: bool,
    /// It polls the queue itself, on whatever CPU it runs.
    pub polls: bool,
    /// Why it isn't known where.
    pub unknown: Option<Unknown>,
    /// The number of the table's entry for the flow,
    pub entry: u32,
    /// of so many,
    pub entries: u32,
    /// and what is in it: the upper bits of a hash, and a CPU's number plus one.
    pub value: FlowHash,
}

/// What a flow that is not where it wants to be waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "for", rename_all = "kebab-case")]
pub enum Wait {
    /// Nothing but its next packet.
    Packet,
    /// Packets ahead of it in a CPU's backlog.
    Backlog {
        /// Whose backlog.
        cpu: u32,
        /// Frames that its thread has not taken yet, up to the flow's last one.
        frames: u64,
        /// The thread.
        thread: Option<String>,
    },
    /// A CPU's thread has taken its packets, but is not known to have delivered them.
    Delivery {
        /// Whose backlog.
        cpu: u32,
        /// The thread.
        thread: Option<String>,
    },
    /// The end of a poll, and an empty GRO.
    Poll,
    /// The backlog that it wants into has to be made.
    NewBacklog {
        /// For this CPU.
        cpu: u32,
        /// It has been asked for.
        asked: bool,
    },
}

/// What is known of a flow where the load decides. A turn is that of [`load::TURN_MS`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// The queue's load; null before the first packets.
    pub load: Option<Load>,
    /// The flow's packets in a turn when that was last asked: not while the CPU that polls has room.
    pub turn_packets: u32,
    /// Turns since it changed its mind, or since it has the slot.
    pub changed_turns_ago: u32,
    /// Turns that have to lie between two changes.
    pub turns_between_changes: u32,
}

impl Decision {
    fn of(q: &rx_queue, flow: &rps_dev_flow) -> Option<Self> {
        load::decides(q).then(|| Self {
            load: Load::of(q),
            turn_packets: flow.load,
            changed_turns_ago: q.load.turn.wrapping_sub(flow.changed),
            turns_between_changes: 1 << flow.backoff.min(31),
        })
    }
}

/// What a queue has dropped in XDP, of all its flows; packets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drops {
    /// The CPU's backlog was full.
    pub full: u64,
    /// The flow had to leave and could not yet.
    pub shed: u64,
    /// Of a large flow, and the backlog half full.
    pub limited: u64,
    /// Of a large flow, and the CPU that polls could not keep up.
    pub inline_limited: u64,
}

impl From<&accounting::Queue> for Drops {
    fn from(q: &accounting::Queue) -> Self {
        Self {
            full: q.sums.dropped,
            shed: q.sums.shed,
            limited: q.sums.limited,
            inline_limited: q.inline_limited,
        }
    }
}

/// A flow on a queue where it has been seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// As in `rxsteer flows`.
    #[serde(flatten)]
    pub entry: Entry,
    /// Its slot of the queue's `rps_map`,
    pub rps_slot: u32,
    /// of so many,
    pub rps_slots: u32,
    /// and what is in it.
    pub rps: Location,
    /// That CPU is offline.
    pub rps_offline: bool,
    /// Its slot of the queue's `dev_flow_table`,
    pub slot: u32,
    /// of so many.
    pub slots: u32,
    /// What it waits for, if it is not where it wants to be.
    pub waits: Option<Wait>,
    /// What was decided by; null where the tables alone decide.
    pub decision: Option<Decision>,
    /// Why packets were dropped is counted for the queue; null if the flow lost none.
    pub queue_dropped: Option<Drops>,
}

/// A queue where another flow has the slot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Other {
    /// The device,
    pub device: String,
    /// and its receive queue.
    pub queue: u32,
    /// The slot of the queue's `dev_flow_table`.
    pub slot: u32,
    /// Who has it.
    pub owner: Name,
}

/// All that is known of a flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Its name; null if only the hash is known.
    pub flow: Option<Flow>,
    /// Its hash.
    pub hash: FlowHash,
    /// Where its application is.
    pub application: Application,
    /// The queues where it has been seen.
    pub seen: Vec<Seen>,
    /// Queues where it may have been seen before another flow took the slot.
    pub others: Vec<Other>,
}

/// What a running rxsteer answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanations {
    /// No more than were asked for, those with the most packets first.
    pub flows: Vec<Explanation>,
    /// How many there are.
    pub total: usize,
    /// The devices that are steered.
    pub devices: Vec<String>,
    /// How packets find their CPU.
    pub policy: Policy,
    /// Flows go by the hash that the device computed: a name finds only those without one.
    pub device_hash: bool,
    /// What can't be followed on this host, in words.
    pub not_followed: Vec<String>,
    /// Slots of the tables that could not be read in time: flows of a port may be missing.
    pub slots_missed: u64,
}

/// Facts about a flow that is at one place and wants to be at another.
#[derive(Clone, Debug, Default)]
struct Standing {
    last_qtail: u64,
    /// INLINE: polls that have been delivered.
    polls_delivered: u64,
    /// At a CPU: frames known to be delivered,
    head: u64,
    /// frames taken or lost,
    gone: u64,
    /// whether all that ever entered is known to be delivered,
    drained: bool,
    /// and who delivers.
    thread: Option<String>,
    /// The wanted CPU's backlog exists,
    wanted_exists: bool,
    /// or has been asked for.
    wanted_asked: bool,
}

/// What keeps a flow from going where it wants to be (`rx_steer()` in bpf/steer.h), as far as it can
/// be told between two packets.
fn wait(at: Location, wanted: Location, s: Standing) -> Option<Wait> {
    if at == wanted {
        return None;
    }
    let new_backlog = match wanted {
        Location::Cpu(cpu) if !s.wanted_exists => Some(Wait::NewBacklog {
            cpu,
            asked: s.wanted_asked,
        }),
        _ => None,
    };
    let delivered = Some(new_backlog.clone().unwrap_or(Wait::Packet));
    let Location::Cpu(cpu) = at else {
        // A flow that finds no backlog stays INLINE packet by packet, so it always has a last poll.
        return match s.polls_delivered >= s.last_qtail {
            true => delivered,
            false => Some(new_backlog.unwrap_or(Wait::Poll)),
        };
    };
    if s.drained || s.head >= s.last_qtail {
        return delivered;
    }
    let thread = s.thread;
    Some(match s.last_qtail.saturating_sub(s.gone) {
        0 => Wait::Delivery { cpu, thread },
        frames => Wait::Backlog {
            cpu,
            frames,
            thread,
        },
    })
}

impl Reader<'_> {
    /// Answers the question.
    ///
    /// # Errors
    /// When the maps can't be read.
    pub fn explain(&self, question: &Question) -> Result<Explanations> {
        let mut names = question.names.clone();
        let (mut in_tables, mut slots_missed) = (0, 0);
        if !question.local_ports.is_empty() {
            let query = Query {
                local_ports: question.local_ports.clone(),
                limit: question.limit,
                ..Query::default()
            };
            let found = self.flows(&query, flows::PATIENCE)?;
            in_tables = found.total;
            slots_missed = found.slots - found.slots_read;
            let name = |entry: Entry| entry.flow.map_or(Name::Hash(entry.hash), Name::Flow);
            names.extend(found.flows.into_iter().map(name));
        }
        let hashed = names.into_iter().map(|name| match name {
            Name::Hash(hash) => (hash.0, None),
            Name::Flow(flow) => {
                let hash = native::flow_hash(&flow.key(), &self.datapath.config().secret);
                (hash, Some(flow))
            }
        });
        let mut hashed: Vec<_> = hashed.collect();
        hashed.sort_by_key(|(hash, _)| *hash);
        hashed.dedup_by_key(|(hash, _)| *hash);
        let flows = hashed
            .into_iter()
            .map(|(hash, flow)| self.explain_one(hash, flow, &question.unconnected));
        let mut flows = flows.collect::<Result<Vec<_>>>()?;
        flows.sort_by_key(|e| std::cmp::Reverse(e.packets()));
        let in_tables_too = |e: &&Explanation| {
            let port = e.flow.and_then(|flow| flow.local_port());
            !e.seen.is_empty() && port.is_some_and(|port| question.local_ports.contains(&port))
        };
        let total = in_tables + flows.len() - flows.iter().filter(in_tables_too).count();
        flows.truncate(question.limit);
        let mut devices: Vec<_> = self.queues.iter().map(|q| q.device.clone()).collect();
        devices.dedup();
        Ok(Explanations {
            flows,
            total,
            devices,
            policy: self.policy,
            device_hash: self.datapath.config().rx_hash,
            not_followed: self.unseen.to_vec(),
            slots_missed,
        })
    }

    fn explain_one(
        &self,
        hash: u32,
        mut flow: Option<Flow>,
        unconnected: &[u16],
    ) -> Result<Explanation> {
        let tables = self.datapath.tables();
        let (mut seen, mut others) = (Vec::new(), Vec::new());
        for queue in &self.queues {
            let slot = tables.slot(queue.index, hash);
            let dev_flow = tables.dev_flow(slot)?;
            if !flows::in_use(&queue.counters, &dev_flow) {
                continue;
            }
            let name = self.name(slot, dev_flow.hash)?;
            if dev_flow.hash == hash {
                flow = flow.or(name);
                seen.push(self.seen(queue, slot, &dev_flow)?);
            } else {
                others.push(Other {
                    device: queue.device.clone(),
                    queue: queue.number,
                    slot: slot % tables.flow_cnt(),
                    owner: name.map_or(Name::Hash(FlowHash(dev_flow.hash)), Name::Flow),
                });
            }
        }
        let (value, _) = self.datapath.application(hash)?;
        let hints = match self.queues.first() {
            Some(queue) => self.hints(queue, hash)?,
            None => Hints::default(),
        };
        let unknown = match hints.application {
            Some(_) => None,
            None if hints.application_polls => None,
            None => Some(self.unknown(flow.as_ref(), value, unconnected)),
        };
        Ok(Explanation {
            flow,
            hash: FlowHash(hash),
            application: Application {
                cpu: hints.application,
                offline: hints.application_offline,
                polls: hints.application_polls,
                unknown,
                entry: hash & tables.sock_flow_mask(),
                entries: tables.sock_flow_mask() + 1,
                value: FlowHash(value),
            },
            seen,
            others,
        })
    }

    fn unknown(&self, flow: Option<&Flow>, value: u32, unconnected: &[u16]) -> Unknown {
        let config = self.datapath.config();
        let follows = self
            .queues
            .first()
            .is_some_and(|q| u32::from(q.counters.policy) & rx_policy::RX_FOLLOW.0 != 0);
        let port = flow.and_then(Flow::local_port);
        match self.policy {
            policy if policy.base == Base::Off => Unknown::PolicyOff,
            policy if !policy.follows() && self.datapath.config().rx_hash => Unknown::DeviceHash,
            policy if !policy.follows() => Unknown::PolicyRps,
            _ if !config.can_follow() => Unknown::NoTable,
            _ if !follows => Unknown::Unsupported,
            _ if flow.is_some_and(|flow| is_tunnel(flow, config.tunnels)) => Unknown::Tunnel,
            _ if flow.is_some() && port.is_none() => Unknown::NoPorts,
            _ if value != 0 => Unknown::EntryTaken,
            _ if port.is_some_and(|port| unconnected.contains(&port)) => Unknown::Unconnected,
            _ => Unknown::NotSeen,
        }
    }

    fn seen(&self, queue: &Queue, slot: u32, flow: &rps_dev_flow) -> Result<Seen> {
        let entry = self.entry(queue, slot, flow)?;
        let hints = self.hints(queue, flow.hash)?;
        let slots = self.datapath.tables().flow_cnt();
        let standing = self.standing(queue, flow, &entry)?;
        Ok(Seen {
            rps_slot: rps_map::slot_of(flow.hash) as u32,
            rps_slots: rps_map::SLOTS as u32,
            rps: hints.rps.map_or(Location::Inline, Location::Cpu),
            rps_offline: hints.rps_offline,
            slot: slot % slots,
            slots,
            waits: wait(entry.location, entry.wanted, standing),
            decision: Decision::of(&queue.counters, flow),
            queue_dropped: match entry.dropped {
                0 => None,
                _ => Some(self.drops(queue)?),
            },
            entry,
        })
    }

    fn drops(&self, queue: &Queue) -> Result<Drops> {
        let no_mask = String::new();
        let q = accounting::Queue::read(self.datapath, queue.index, queue.number, no_mask)?;
        Ok(Drops::from(&q))
    }

    fn standing(&self, queue: &Queue, flow: &rps_dev_flow, entry: &Entry) -> Result<Standing> {
        let backlogs = self.datapath.backlogs();
        let thread = |location| match location {
            Location::Cpu(cpu) => backlogs.thread(queue.index, cpu),
            Location::Inline => Ok(None),
        };
        let backlog = |location| match location {
            Location::Cpu(cpu) => self.datapath.backlog(queue.index, cpu),
            Location::Inline => Ok(backlog::default()),
        };
        let (at, to) = (backlog(entry.location)?, backlog(entry.wanted)?);
        Ok(Standing {
            last_qtail: flow.last_qtail,
            polls_delivered: queue.counters.polls_delivered,
            head: at.head.max(at.head_asleep),
            gone: at.taken,
            drained: match entry.location {
                Location::Cpu(cpu) => self.datapath.drained(queue.index, cpu)?,
                Location::Inline => false,
            },
            thread: thread(entry.location)?,
            wanted_exists: thread(entry.wanted)?.is_some(),
            wanted_asked: to.wanted != 0,
        })
    }
}

/// Whether the flow is a tunnel's whose inner flows are not looked for: bpf/flow.h has the ports.
fn is_tunnel(flow: &Flow, looked_into: u32) -> bool {
    const IPIP: [u8; 2] = [libc::IPPROTO_IPIP as u8, libc::IPPROTO_IPV6 as u8];
    const GRE: u8 = libc::IPPROTO_GRE as u8;
    const UDP: u8 = libc::IPPROTO_UDP as u8;
    let kind = match (flow.proto(), flow.local_port()) {
        (proto, _) if IPIP.contains(&proto) => flow_tunnel::FLOW_TUNNEL_IPIP,
        (GRE, _) => flow_tunnel::FLOW_TUNNEL_GRE,
        (UDP, Some(4789 | 8472)) => flow_tunnel::FLOW_TUNNEL_VXLAN,
        (UDP, Some(6081)) => flow_tunnel::FLOW_TUNNEL_GENEVE,
        (UDP, Some(2152)) => flow_tunnel::FLOW_TUNNEL_GTPU,
        _ => return false,
    };
    looked_into & kind.0 == 0
}

impl Explanation {
    fn packets(&self) -> Option<u64> {
        let packets = self.seen.iter().map(|seen| u64::from(seen.entry.packets));
        (!self.seen.is_empty()).then(|| packets.sum())
    }

    /// Its name, or its hash.
    pub fn name(&self) -> Name {
        self.flow.map_or(Name::Hash(self.hash), Name::Flow)
    }

    /// That no packet of it has been seen, in words.
    pub fn not_seen(&self, devices: &[String]) -> String {
        let mut text = format!(
            "no packet of {} is known on {}",
            self.name(),
            devices.join(", ")
        );
        for other in &self.others {
            let _ = write!(
                text,
                "; its slot on {} queue {} ({}) is now that of {}",
                other.device, other.queue, other.slot, other.owner
            );
        }
        text
    }
}

/// What is said to who asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// What was asked about, and as what it was taken: `pid:1`, `port:9`, a flow, a hash.
    pub target: String,
    /// What should be known of the question.
    pub notes: Vec<String>,
    /// What the running rxsteer answered.
    #[serde(flatten)]
    pub explanations: Explanations,
}

/// The text; ends with a newline.
pub fn render(answer: &Answer) -> String {
    let all = &answer.explanations;
    let mut out = String::new();
    for note in &answer.notes {
        let _ = writeln!(out, "{note}");
    }
    for (i, explanation) in all.flows.iter().enumerate() {
        if i > 0 || !answer.notes.is_empty() {
            out.push('\n');
        }
        one(&mut out, explanation, all);
    }
    if all.flows.len() < all.total {
        let _ = writeln!(
            out,
            "\n{} of {} flows, those with the most packets",
            all.flows.len(),
            all.total
        );
    }
    if all.slots_missed > 0 {
        let _ = writeln!(
            out,
            "\n{} slots of the tables could not be read in time: there may be more flows",
            all.slots_missed
        );
    }
    out
}

fn one(out: &mut String, e: &Explanation, all: &Explanations) {
    if e.seen.is_empty() {
        let _ = writeln!(out, "{}", e.not_seen(&all.devices));
        return;
    }
    let name = e.flow.map_or("unknown flow".to_owned(), |f| f.to_string());
    let _ = writeln!(out, "{name} (hash {})", e.hash);
    let a = &e.application;
    let _ = match a.unknown {
        None => writeln!(out, "  application: {}", application(a)),
        Some(unknown) => writeln!(
            out,
            "  application: not known where: {}",
            why_unknown(unknown, all.policy, &all.not_followed)
        ),
    };
    for seen in &e.seen {
        let entry = &seen.entry;
        let _ = writeln!(out, "  {} queue {}:", entry.device, entry.queue);
        let _ = writeln!(out, "    {}", is_at(entry));
        let _ = writeln!(out, "    {}", wants(seen, all.policy));
        for line in pressure(seen).into_iter().chain(change(seen)) {
            let _ = writeln!(out, "    {line}");
        }
        for why in waits(seen) {
            let _ = writeln!(out, "    {why}");
        }
        let _ = writeln!(
            out,
            "    {}, the last {} ago; moved {} time{}.",
            packets(entry.packets.into()),
            flows::ago(entry.idle_seconds),
            entry.moves,
            if entry.moves == 1 { "" } else { "s" },
        );
        if let Some(dropped) = dropped(seen) {
            let _ = writeln!(out, "    {dropped}");
        }
        let _ = writeln!(
            out,
            "    dev_flow_table slot {} of {}; rps_map slot {} of {}: {}{}",
            seen.slot,
            seen.slots,
            seen.rps_slot,
            seen.rps_slots,
            seen.rps,
            if seen.rps_offline { ", offline" } else { "" },
        );
    }
    let _ = writeln!(
        out,
        "  sock_flow_table entry {} of {}: {}",
        a.entry,
        a.entries,
        match (a.value.0, a.cpu) {
            (0, _) => "empty".to_owned(),
            (_, Some(cpu)) => format!("{}, CPU {cpu}", a.value),
            (_, None) if a.polls => format!("{}, polls", a.value),
            (_, None) => format!("{}, not this flow's", a.value),
        }
    );
    for other in &e.others {
        let _ = writeln!(
            out,
            "  {} queue {}: slot {} is now that of {}",
            other.device, other.queue, other.slot, other.owner
        );
    }
}

fn application(a: &Application) -> String {
    if a.polls {
        return "its reads poll the queue themselves (SO_BUSY_POLL), wherever they run.".to_owned();
    }
    let cpu = a.cpu.unwrap_or_default();
    let offline = match a.offline {
        true => ", which is offline now",
        false => "",
    };
    format!("it last took or sent data of this flow on CPU {cpu}{offline}.")
}

/// Where it is, and who polls.
fn is_at(entry: &Entry) -> String {
    match (entry.location, entry.polling_cpu) {
        (Location::Cpu(cpu), _) => {
            format!("It is processed on CPU {cpu}, by the thread of the queue's backlog there.")
        }
        (Location::Inline, Some(cpu)) => format!(
            "It is processed where it is received (INLINE): CPU {cpu} polled the queue when that \
             was last seen."
        ),
        (Location::Inline, None) => {
            "It is processed where it is received (INLINE), on the CPU that polls the queue."
                .to_owned()
        }
    }
}

/// Where it wants to be, and why.
fn wants(seen: &Seen, policy: Policy) -> String {
    let entry = &seen.entry;
    let place = match (entry.wanted == entry.location, entry.wanted) {
        (true, _) => "That is where it wants to be".to_owned(),
        (false, Location::Inline) => {
            "It wants to be processed where it is received (INLINE)".to_owned()
        }
        (false, Location::Cpu(cpu)) => format!("It wants to be on CPU {cpu}"),
    };
    // A flow wants INLINE because the CPU that it wants polls.
    let cpu = match (entry.wanted, entry.polling_cpu) {
        (Location::Inline, Some(cpu)) => format!("CPU {cpu}, which also polls the queue"),
        _ => "that CPU".to_owned(),
    };
    let why = match (entry.reason, entry.application_cpu) {
        (Reason::Application, _) => format!("its application is on {cpu}"),
        (Reason::BusyPoll, _) => {
            "its application polls the queue, and would not find it elsewhere".to_owned()
        }
        (Reason::Rps, None) => {
            format!("without the CPU of an application, its hash chooses {cpu}")
        }
        (Reason::Rps, Some(offline)) => {
            format!("its application's CPU {offline} is offline, and its hash chooses {cpu}")
        }
        (Reason::PolicyOff, _) => "policy off steers nothing".to_owned(),
        (Reason::Offline, _) => "every CPU that it could want is offline".to_owned(),
        (Reason::Undecided, _) => {
            "so it was at its last packet, and the next ones decide anew".to_owned()
        }
        (Reason::Room, _) => format!("{}, which polls the queue, has room", polling(entry)),
        (Reason::Small, _) => small(seen),
        (Reason::NoGain, _) => no_gain(entry, policy),
        (Reason::Consumer, _) => "its application is there and keeps up".to_owned(),
        (Reason::Spread, _) => "its hash chooses that CPU, which has room".to_owned(),
        (Reason::IdleCpu, _) => format!(
            "that CPU was idle when it was chosen, and is near {}, which is busy",
            base(entry)
        ),
        (Reason::Stay, _) => match entry.wanted {
            Location::Inline => format!(
                "{}, which polls the queue, has no room for more flows, but keeps what it has",
                polling(entry)
            ),
            Location::Cpu(_) => "it is there, and another place would gain it nothing".to_owned(),
        },
    };
    format!("{place}: {why}.")
}

fn polling(entry: &Entry) -> String {
    match entry.polling_cpu {
        Some(cpu) => format!("CPU {cpu}"),
        None => "the CPU".to_owned(),
    }
}

/// The CPU that the tables say, and how they come to it.
fn base(entry: &Entry) -> String {
    match (entry.base, entry.application_cpu) {
        (Some(Location::Cpu(cpu)), Some(application)) if cpu == application => {
            format!("CPU {cpu}, its application's")
        }
        (Some(Location::Cpu(cpu)), _) => format!("CPU {cpu}, its hash's choice"),
        _ => "the CPU that the tables say".to_owned(),
    }
}

/// Why a flow stays although the CPU that polls is pressed.
fn small(seen: &Seen) -> String {
    let Some(decision) = &seen.decision else {
        return "larger flows leave first".to_owned();
    };
    let threshold = match decision.load.as_ref().and_then(|load| load.leaving) {
        Some(leaving) => format!("those with {leaving} and more may leave now"),
        None => "none may leave now".to_owned(),
    };
    format!(
        "larger flows leave {} first: this one had {} in a turn of {TURN_MS} ms, and {threshold}",
        polling(&seen.entry),
        packets(decision.turn_packets.into()),
    )
}

/// Why a flow stays although it might leave.
fn no_gain(entry: &Entry, policy: Policy) -> String {
    let idle = match policy.idle {
        true => ", and no CPU near it is idle and has time enough",
        false => "",
    };
    format!(
        "no other CPU could take it on: {}, is busy, or got too much within the last second{idle}",
        base(entry)
    )
}

fn packets(number: u64) -> String {
    format!("{number} packet{}", if number == 1 { "" } else { "s" })
}

/// The load of the CPU that polls, where it decides.
fn pressure(seen: &Seen) -> Option<String> {
    let load = seen.decision.as_ref()?.load.as_ref()?;
    let state = match load.pressure {
        Pressure::Relaxed => "has room for all flows of the queue",
        Pressure::Full => "has no room for more than it has",
        Pressure::Pressed => "is pressed",
        Pressure::Polled => "runs an application that polls for its own packets",
    };
    Some(format!(
        "Load: {}, which polls the queue, {state}: busy {} % of the time, {} % in its polls.",
        match load.polling_cpu {
            Some(cpu) => format!("CPU {cpu}"),
            None => "the CPU".to_owned(),
        },
        load.busy_percent,
        load.polls_percent
    ))
}

/// That it is not free to change its mind again, if so.
fn change(seen: &Seen) -> Option<String> {
    let decision = seen.decision.as_ref()?;
    let (ago, between) = (decision.changed_turns_ago, decision.turns_between_changes);
    (between > 1).then(|| {
        let again = match between.saturating_sub(ago) {
            0 => "and may again".to_owned(),
            left => format!("and may again in {left}"),
        };
        format!(
            "It changed its mind {ago} turns of {TURN_MS} ms ago, {again}: since it did so often, \
             once in {between} at most."
        )
    })
}

/// What it lost, and why, as far as its queue's counters tell.
fn dropped(seen: &Seen) -> Option<String> {
    let of_queue = seen.queue_dropped.as_ref()?;
    let reasons = [
        (of_queue.full, "a backlog was full"),
        (
            of_queue.shed,
            "a flow had to leave a backlog and could not yet (shed)",
        ),
        (
            of_queue.limited,
            "a backlog was half full, and the flow large",
        ),
        (
            of_queue.inline_limited,
            "the CPU that polls could not keep up, and the flow was large",
        ),
    ];
    let reasons: Vec<_> = reasons.iter().filter(|(count, _)| *count > 0).collect();
    let why = match &reasons[..] {
        [] => return None,
        [(_, why)] => (*why).to_owned(),
        several => {
            let each = several
                .iter()
                .map(|(count, why)| format!("{count}, since {why}"));
            let each: Vec<_> = each.collect();
            format!("this queue dropped {}", each.join("; "))
        }
    };
    let was = if seen.entry.dropped == 1 {
        "was"
    } else {
        "were"
    };
    Some(format!(
        "{} of it {was} dropped before the stack: {why}.",
        packets(seen.entry.dropped.into())
    ))
}

/// What it waits for, in lines.
fn waits(seen: &Seen) -> Vec<String> {
    let thread = |name: &Option<String>, cpu: u32| match name {
        Some(name) => format!("CPU {cpu}'s thread ({name})"),
        None => format!("CPU {cpu}'s thread"),
    };
    let mut lines = match &seen.waits {
        None => Vec::new(),
        Some(Wait::Packet) => vec![
            "All its packets so far have been delivered: it moves with its next one.".to_owned(),
        ],
        Some(Wait::Backlog {
            cpu,
            frames,
            thread: name,
        }) => vec![
            "It has to wait, or its next packets would overtake those that are queued.".to_owned(),
            format!(
                "{} still has {} to process, up to its last one. If that number does \
                 not fall, something else keeps CPU {cpu} busy.",
                thread(name, *cpu),
                packets(*frames),
            ),
        ],
        Some(Wait::Delivery { cpu, thread: name }) => vec![
            "It has to wait, or its next packets would overtake earlier ones.".to_owned(),
            format!(
                "{} has taken all its packets and may be at work on them: they are known to be \
                 delivered when it sleeps, or holds back nothing to merge (GRO) at its next packets.",
                thread(name, *cpu),
            ),
        ],
        Some(Wait::Poll) => vec![
            "It moves with its next packet, if by then the poll that received its last one has ended \
             and nothing is held back to be merged with later packets (GRO)."
                .to_owned(),
        ],
        Some(Wait::NewBacklog { cpu, asked: true }) => vec![format!(
            "It stays until the queue's backlog for CPU {cpu}, a thread there, has been made. It has \
             been asked for; if that takes longer than a moment, see what `rxsteer run` says."
        )],
        Some(Wait::NewBacklog { cpu, asked: false }) => vec![format!(
            "The queue has no backlog for CPU {cpu} yet, that is a thread there: its next packet asks \
             for one, and it stays until then."
        )],
    };
    if seen.entry.shed {
        lines.push(
            "The backlog was full: until it can leave, its packets are dropped (shed).".to_owned(),
        );
    }
    lines
}

/// Why its application's CPU is not known.
fn why_unknown(unknown: Unknown, policy: Policy, not_followed: &[String]) -> String {
    let text = match unknown {
        Unknown::PolicyRps => {
            return format!(
                "policy {policy} does not follow applications (`rxsteer set --policy {}` does).",
                policy.with_following()
            );
        }
        Unknown::PolicyOff => "policy off steers nothing (`rxsteer set --policy rfs`).",
        Unknown::NoTable => {
            "rps_sock_flow_entries or rps_flow_cnt is 0, so no application is followed (`rxsteer \
             set` changes both)."
        }
        Unknown::Unsupported => {
            "this kernel does not let applications be followed; `rxsteer run` has said why."
        }
        Unknown::DeviceHash => {
            "with --hash device flows have the network card's hash, which sockets don't know."
        }
        Unknown::NoPorts => {
            "its packets carry no ports (fragments, ICMP, ESP, …), so the socket they are for can't \
             be told."
        }
        Unknown::Tunnel => {
            "it is a tunnel, which the kernel unpacks; to follow the flows inside, start rxsteer \
             with --tunnels."
        }
        Unknown::EntryTaken => {
            "another flow has its entry of the sock_flow_table. If that is often so, make the table \
             larger: `rxsteer set --rps-sock-flow-entries`."
        }
        Unknown::Unconnected => {
            "its UDP socket is not connected, and the application was not seen to ask who sent: use \
             recvfrom() or recvmsg() with an address, or connect() the socket."
        }
        Unknown::NotSeen => {
            "no application was seen to take or send its data. Seen are recvmsg(), sendmsg() and all \
             calls like them, on a connected socket or when they ask who sent; not seen are \
             splice(), zero-copy reads, and packets that are only forwarded."
        }
    };
    match unknown {
        Unknown::Unconnected if !not_followed.is_empty() => {
            format!(
                "its UDP socket is not connected, and {}.",
                not_followed.join("; ")
            )
        }
        Unknown::NotSeen if !not_followed.is_empty() => {
            format!("{text} On this host {}.", not_followed.join("; "))
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNKNOWN: [Unknown; 10] = [
        Unknown::PolicyOff,
        Unknown::PolicyRps,
        Unknown::NoTable,
        Unknown::Unsupported,
        Unknown::DeviceHash,
        Unknown::NoPorts,
        Unknown::Tunnel,
        Unknown::EntryTaken,
        Unknown::Unconnected,
        Unknown::NotSeen,
    ];

    /// A flow that is at its application, on CPU 3; CPU 0 polls.
    fn seen() -> Seen {
        Seen {
            entry: flows::tests::entry(),
            rps_slot: 5,
            rps_slots: 1024,
            rps: Location::Cpu(1),
            rps_offline: false,
            slot: 21,
            slots: 4096,
            waits: None,
            decision: None,
            queue_dropped: None,
        }
    }

    fn explanation(seen: Seen) -> Explanation {
        Explanation {
            flow: seen.entry.flow,
            hash: seen.entry.hash,
            application: Application {
                cpu: Some(3),
                offline: false,
                polls: false,
                unknown: None,
                entry: 8,
                entries: 32768,
                value: FlowHash(0x1234_5604),
            },
            seen: vec![seen],
            others: Vec::new(),
        }
    }

    fn text(explanation: Explanation) -> String {
        text_under(Policy::RFS, explanation)
    }

    fn text_under(policy: Policy, explanation: Explanation) -> String {
        render(&Answer {
            target: "port:9".to_owned(),
            notes: Vec::new(),
            explanations: Explanations {
                flows: vec![explanation],
                total: 1,
                devices: vec!["eth0".to_owned()],
                policy,
                device_hash: false,
                not_followed: vec!["unconnected UDP sockets are not followed".to_owned()],
                slots_missed: 0,
            },
        })
    }

    fn says(explanation: Explanation, what: &[&str]) {
        let text = text(explanation);
        for what in what {
            assert!(text.contains(what), "not {what:?} in\n{text}");
        }
    }

    #[test]
    fn a_flow_at_its_application() {
        assert_eq!(
            text(explanation(seen())),
            "udp/192.0.2.1:1024/9 (hash 0x12345678)
  application: it last took or sent data of this flow on CPU 3.
  eth0 queue 2:
    It is processed on CPU 3, by the thread of the queue's backlog there.
    That is where it wants to be: its application is on that CPU.
    17 packets, the last 12 ms ago; moved 1 time.
    dev_flow_table slot 21 of 4096; rps_map slot 5 of 1024: CPU 1
  sock_flow_table entry 8 of 32768: 0x12345604, CPU 3
"
        );
    }

    #[test]
    fn each_wish_has_its_reason() {
        let wish = |wanted, reason, application_cpu| {
            let mut seen = seen();
            seen.entry.location = Location::Cpu(7);
            (seen.entry.wanted, seen.entry.reason) = (wanted, reason);
            seen.entry.application_cpu = application_cpu;
            explanation(seen)
        };
        let inline = "It wants to be processed where it is received (INLINE): ";
        for (wanted, reason, cpu, why) in [
            (
                Location::Cpu(3),
                Reason::Application,
                Some(3),
                "CPU 3: its application is on that CPU.",
            ),
            (
                Location::Inline,
                Reason::Application,
                Some(0),
                "its application is on CPU 0, which also polls the queue.",
            ),
            (
                Location::Cpu(1),
                Reason::Rps,
                None,
                "its hash chooses that CPU.",
            ),
            (
                Location::Inline,
                Reason::Rps,
                None,
                "its hash chooses CPU 0, which also polls the queue.",
            ),
            (
                Location::Cpu(1),
                Reason::Rps,
                Some(3),
                "its application's CPU 3 is offline, and its hash chooses that CPU.",
            ),
            (
                Location::Inline,
                Reason::PolicyOff,
                None,
                "policy off steers nothing.",
            ),
            (
                Location::Inline,
                Reason::Offline,
                None,
                "every CPU that it could want is offline.",
            ),
        ] {
            says(wish(wanted, reason, cpu), &[why]);
            if wanted == Location::Inline {
                says(wish(wanted, reason, cpu), &[inline]);
            }
        }
        let mut unpolled = seen();
        unpolled.entry.location = Location::Inline;
        unpolled.entry.polling_cpu = None;
        says(explanation(unpolled), &["on the CPU that polls the queue."]);
    }

    fn load() -> Load {
        Load {
            polling_cpu: Some(0),
            pressure: Pressure::Pressed,
            busy_percent: 97,
            polls_percent: 61,
            leaving: Some(40),
            limiting_percent: 0,
        }
    }

    /// A flow whose place the load decides.
    fn decided(wanted: Location, reason: Reason, base: Option<u32>) -> Seen {
        let mut seen = seen();
        seen.entry.location = Location::Inline;
        (seen.entry.wanted, seen.entry.reason) = (wanted, reason);
        seen.entry.base = base.map(Location::Cpu);
        seen.decision = Some(Decision {
            load: Some(load()),
            turn_packets: 3,
            changed_turns_ago: 5,
            turns_between_changes: 1,
        });
        seen
    }

    #[test]
    fn each_decision_has_its_reason() {
        use Location::{Cpu, Inline};
        let mut said = std::collections::BTreeSet::new();
        for (wanted, reason, base, why) in [
            (
                Inline,
                Reason::Undecided,
                None,
                "so it was at its last packet, and the next ones decide anew.",
            ),
            (
                Inline,
                Reason::Room,
                None,
                "That is where it wants to be: CPU 0, which polls the queue, has room.",
            ),
            (
                Inline,
                Reason::Small,
                Some(3),
                "larger flows leave CPU 0 first: this one had 3 packets in a turn of 10 ms, and those \
                 with 40 and more may leave now.",
            ),
            (
                Inline,
                Reason::NoGain,
                Some(3),
                "no other CPU could take it on: CPU 3, its application's, is busy, or got too much \
                 within the last second, and no CPU near it is idle and has time enough.",
            ),
            (
                Inline,
                Reason::NoGain,
                Some(1),
                "no other CPU could take it on: CPU 1, its hash's choice, is busy",
            ),
            (
                Cpu(3),
                Reason::Consumer,
                Some(3),
                "It wants to be on CPU 3: its application is there and keeps up.",
            ),
            (
                Cpu(1),
                Reason::Spread,
                Some(1),
                "It wants to be on CPU 1: its hash chooses that CPU, which has room.",
            ),
            (
                Cpu(2),
                Reason::IdleCpu,
                Some(3),
                "It wants to be on CPU 2: that CPU was idle when it was chosen, and is near CPU 3, \
                 its application's, which is busy.",
            ),
            (
                Inline,
                Reason::Stay,
                Some(3),
                "CPU 0, which polls the queue, has no room for more flows, but keeps what it has.",
            ),
            (
                Cpu(3),
                Reason::Stay,
                Some(3),
                "it is there, and another place would gain it nothing.",
            ),
        ] {
            let text = text_under(Policy::ADAPTIVE, explanation(decided(wanted, reason, base)));
            assert!(text.contains(why), "not {why:?} in\n{text}");
            said.insert(why);
        }
        assert_eq!(said.len(), 10);
        let no_gain = explanation(decided(Inline, Reason::NoGain, Some(1)));
        let adapt = "rfs+adapt".parse().unwrap();
        assert!(!text_under(adapt, no_gain).contains("is idle"));
    }

    #[test]
    fn the_load_has_its_figures() {
        for (pressure, words) in [
            (Pressure::Relaxed, "has room for all flows of the queue"),
            (Pressure::Full, "has no room for more than it has"),
            (Pressure::Pressed, "is pressed"),
            (
                Pressure::Polled,
                "runs an application that polls for its own packets",
            ),
        ] {
            let mut seen = decided(Location::Inline, Reason::Small, None);
            let decision = seen.decision.as_mut().unwrap();
            decision.load = Some(Load {
                pressure,
                leaving: None,
                ..load()
            });
            let line = format!(
                "\n    Load: CPU 0, which polls the queue, {words}: busy 97 % of the time, 61 % in its \
                 polls.\n"
            );
            let none = "this one had 3 packets in a turn of 10 ms, and none may leave now.\n";
            says(explanation(seen), &[&line, none]);
        }
        let mut early = decided(Location::Inline, Reason::Undecided, None);
        early.decision.as_mut().unwrap().load = None;
        for seen in [early, seen()] {
            assert!(!text(explanation(seen)).contains("Load:"));
        }
    }

    #[test]
    fn a_mind_that_changed_often_is_bound() {
        for (ago, between, words) in [
            (5, 1, None),
            (
                5,
                16,
                Some("It changed its mind 5 turns of 10 ms ago, and may again in 11: since"),
            ),
            (
                40,
                16,
                Some(
                    "ago, and may again: since it did so often, \
             once in 16 at most.",
                ),
            ),
        ] {
            let mut seen = decided(Location::Inline, Reason::Room, None);
            let decision = seen.decision.as_mut().unwrap();
            (decision.changed_turns_ago, decision.turns_between_changes) = (ago, between);
            let text = text(explanation(seen));
            assert_eq!(text.contains("changed its mind"), words.is_some(), "{text}");
            assert!(words.is_none_or(|words| text.contains(words)), "{text}");
        }
    }

    #[test]
    fn what_a_flow_lost_has_its_reason() {
        let full = Drops {
            full: 40,
            ..Drops::default()
        };
        let policed = Drops {
            inline_limited: 4,
            ..Drops::default()
        };
        let both = Drops {
            shed: 2,
            limited: 5,
            ..full.clone()
        };
        for (dropped, of_queue, words) in [
            (
                3,
                full,
                "3 packets of it were dropped before the stack: a backlog was full.",
            ),
            (
                1,
                policed,
                "1 packet of it was dropped before the stack: the CPU that polls could not keep up, \
                 and the flow was large.",
            ),
            (
                3,
                both,
                "3 packets of it were dropped before the stack: this queue dropped 40, since a backlog \
                 was full; 2, since a flow had to leave a backlog and could not yet (shed); 5, since a \
                 backlog was half full, and the flow large.",
            ),
        ] {
            let mut seen = seen();
            seen.entry.dropped = dropped;
            seen.queue_dropped = Some(of_queue);
            says(explanation(seen), &[words]);
        }
        assert!(!text(explanation(seen())).contains("dropped"));
    }

    #[test]
    fn policies_without_applications_name_the_one_with() {
        for (policy, words) in [
            (
                "rps",
                "policy rps does not follow applications (`rxsteer set --policy rfs` does).",
            ),
            (
                "rps+idle+adapt+balance",
                "policy rps+idle+adapt+balance does not follow applications (`rxsteer set --policy \
                 adaptive` does).",
            ),
        ] {
            let policy = policy.parse().unwrap();
            assert_eq!(why_unknown(Unknown::PolicyRps, policy, &[]), words);
        }
    }

    #[test]
    fn each_wait_has_its_words() {
        let thread = Some("cpumap/3/map:7".to_owned());
        for (wait, words) in [
            (Wait::Packet, "it moves with its next one."),
            (
                Wait::Backlog {
                    cpu: 3,
                    frames: 42,
                    thread: thread.clone(),
                },
                "CPU 3's thread (cpumap/3/map:7) still has 42 packets to process",
            ),
            (
                Wait::Backlog {
                    cpu: 3,
                    frames: 1,
                    thread: None,
                },
                "CPU 3's thread still has 1 packet to process",
            ),
            (
                Wait::Delivery { cpu: 3, thread },
                "CPU 3's thread (cpumap/3/map:7) has taken all its packets",
            ),
            (Wait::Poll, "the poll that received its last one has ended"),
            (
                Wait::NewBacklog {
                    cpu: 1,
                    asked: true,
                },
                "the queue's backlog for CPU 1, a thread there, has been made. It has been asked",
            ),
            (
                Wait::NewBacklog {
                    cpu: 1,
                    asked: false,
                },
                "no backlog for CPU 1 yet, that is a thread there: its next packet asks",
            ),
        ] {
            for shed in [false, true] {
                let mut seen = seen();
                seen.waits = Some(wait.clone());
                seen.entry.shed = shed;
                let explanation = explanation(seen);
                assert_eq!(text(explanation.clone()).contains("(shed)"), shed);
                says(explanation, &[words]);
            }
        }
    }

    #[test]
    fn each_unknown_application_has_its_reason() {
        let mut all = std::collections::BTreeSet::new();
        for unknown in UNKNOWN {
            let mut explanation = explanation(seen());
            explanation.application.cpu = None;
            explanation.application.unknown = Some(unknown);
            explanation.application.value = FlowHash(0);
            let why = why_unknown(unknown, Policy::RFS, &["sockets are not".to_owned()]);
            assert!(why.len() > 40 && why.ends_with('.'), "{why}");
            let missing = matches!(unknown, Unknown::NotSeen | Unknown::Unconnected);
            assert_eq!(why.ends_with("sockets are not."), missing, "{why}");
            let elsewhere = why_unknown(unknown, Policy::RFS, &[]);
            assert!(!elsewhere.contains("sockets are not."), "{elsewhere}");
            let words = format!("application: not known where: {}", &why[..20]);
            says(
                explanation,
                &[&words, "sock_flow_table entry 8 of 32768: empty"],
            );
            all.insert(why);
        }
        assert_eq!(all.len(), UNKNOWN.len(), "each its own");
    }

    #[test]
    fn offline_and_overwritten() {
        let mut explanation = explanation(seen());
        explanation.application.offline = true;
        explanation.seen[0].rps_offline = true;
        explanation.others.push(Other {
            device: "eth1".to_owned(),
            queue: 1,
            slot: 9,
            owner: Name::Hash(FlowHash(1)),
        });
        let words = [
            "on CPU 3, which is offline now.",
            "rps_map slot 5 of 1024: CPU 1, offline",
            "eth1 queue 1: slot 9 is now that of 0x00000001",
        ];
        says(explanation.clone(), &words);
        explanation.seen.clear();
        says(
            explanation,
            &[
                "no packet of udp/192.0.2.1:1024/9 is known on eth0; its slot on eth1 queue 1 (9) is",
            ],
        );
    }

    #[test]
    fn what_a_flow_waits_for() {
        use Location::{Cpu, Inline};
        // Frame 100 of CPU 3's backlog was its last; 60 have gone.
        let queued = Standing {
            last_qtail: 100,
            head: 50,
            gone: 60,
            wanted_exists: true,
            ..Standing::default()
        };
        let with = |change: &dyn Fn(&mut Standing)| {
            let mut standing = queued.clone();
            change(&mut standing);
            standing
        };
        let backlog = Wait::Backlog {
            cpu: 3,
            frames: 40,
            thread: None,
        };
        let delivery = Wait::Delivery {
            cpu: 3,
            thread: None,
        };
        let made = |asked| Wait::NewBacklog { cpu: 1, asked };
        for (at, wanted, standing, waits) in [
            (Cpu(3), Cpu(3), queued.clone(), None),
            (Inline, Inline, queued.clone(), None),
            (Cpu(3), Inline, queued.clone(), Some(backlog.clone())),
            (Cpu(3), Cpu(1), queued.clone(), Some(backlog.clone())),
            // It has to leave before it can ask.
            (
                Cpu(3),
                Cpu(1),
                with(&|s| s.wanted_exists = false),
                Some(backlog),
            ),
            (Cpu(3), Inline, with(&|s| s.gone = 130), Some(delivery)),
            (Cpu(3), Inline, with(&|s| s.head = 100), Some(Wait::Packet)),
            (
                Cpu(3),
                Inline,
                with(&|s| s.drained = true),
                Some(Wait::Packet),
            ),
            (
                Cpu(3),
                Cpu(1),
                with(&|s| (s.drained, s.wanted_exists) = (true, false)),
                Some(made(false)),
            ),
            (
                Inline,
                Cpu(1),
                with(&|s| s.polls_delivered = 99),
                Some(Wait::Poll),
            ),
            (
                Inline,
                Cpu(1),
                with(&|s| s.polls_delivered = 100),
                Some(Wait::Packet),
            ),
            (
                Inline,
                Cpu(1),
                with(&|s| (s.wanted_exists, s.wanted_asked) = (false, true)),
                Some(made(true)),
            ),
        ] {
            assert_eq!(
                wait(at, wanted, standing.clone()),
                waits,
                "{at} {wanted} {standing:?}"
            );
        }
    }

    #[test]
    fn tunnels_that_are_not_looked_into() {
        let bit = |kind: flow_tunnel| kind.0;
        for (flow, kind) in [
            ("ipencap/192.0.2.1/192.0.2.2", flow_tunnel::FLOW_TUNNEL_IPIP),
            ("ipv6/192.0.2.1/192.0.2.2", flow_tunnel::FLOW_TUNNEL_IPIP),
            ("gre/192.0.2.1/192.0.2.2", flow_tunnel::FLOW_TUNNEL_GRE),
            ("udp/192.0.2.1:1/4789", flow_tunnel::FLOW_TUNNEL_VXLAN),
            ("udp/192.0.2.1:1/8472", flow_tunnel::FLOW_TUNNEL_VXLAN),
            ("udp/192.0.2.1:1/6081", flow_tunnel::FLOW_TUNNEL_GENEVE),
            ("udp/192.0.2.1:1/2152", flow_tunnel::FLOW_TUNNEL_GTPU),
        ] {
            let flow: Flow = flow.parse().unwrap();
            assert!(is_tunnel(&flow, !bit(kind)), "{flow}");
            assert!(!is_tunnel(&flow, bit(kind)), "{flow}");
        }
        for flow in [
            "tcp/192.0.2.1:1/4789",
            "udp/192.0.2.1:4789/1",
            "icmp/192.0.2.1/192.0.2.2",
        ] {
            assert!(!is_tunnel(&flow.parse().unwrap(), 0), "{flow}");
        }
    }

    #[test]
    fn targets() {
        let flow: Name = "udp/192.0.2.1:53/5353".parse().unwrap();
        for (text, target) in [
            ("udp/192.0.2.1:53/5353", Target::Name(flow)),
            ("0x00000010", Target::Name(Name::Hash(FlowHash(16)))),
            ("pid:1", Target::Pid(1)),
            ("port:53", Target::Port(53)),
            ("53", Target::Number(53)),
        ] {
            assert_eq!(text.parse(), Ok(target));
            assert_eq!(target.to_string(), text);
        }
        for (text, why) in [
            ("", "write PROTOCOL/ADDRESS:PORT/LOCAL-PORT"),
            ("eth0", "pid:NUMBER asks about a process"),
            ("pid:", "\"\" is not a process id"),
            ("pid:-1", "\"-1\" is not a process id"),
            ("port:65536", "\"65536\" is not a port, 0 to 65535"),
            ("4294967296", "is not a port or process id"),
            ("0xgg", "write 0x and up to 8 hex digits"),
        ] {
            let said = text.parse::<Target>().expect_err(text);
            assert!(said.contains(why), "{text}: {said}");
        }
    }
}
