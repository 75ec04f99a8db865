// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer flows`: the flows of a running rxsteer, where they are and where they want to be.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table};
use nix::time::{ClockId, clock_getres};
use serde::{Deserialize, Serialize};

use crate::datapath::Datapath;
use crate::flow::{Flow, FlowHash};
use crate::load;
use crate::native;
use crate::policy::Policy;
use crate::rps_map::RpsMap;
use crate::rx::types::{rps_dev_flow, rps_location, rx_policy, rx_queue, rx_reason};
use crate::table;

/// How many flows can be asked for at once.
pub const LIMIT_MAX: usize = 10_000;

/// How long the tables are read: who asks waits for 2 seconds, and backlogs may have to be made.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// A packet's place: `INLINE`, in the poll that receives it, or `CPU n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Location {
    /// In the poll that receives it.
    Inline,
    /// In the queue's backlog for a CPU.
    Cpu(u32),
}

impl Location {
    /// As the kernel side has it; `None` for no location.
    pub fn from_raw(raw: u16) -> Option<Self> {
        match rps_location(raw.into()) {
            rps_location::RPS_NO_CPU => None,
            rps_location::RPS_INLINE | rps_location::RPS_INLINE_SHED => Some(Self::Inline),
            _ => Some(Self::Cpu(raw.into())),
        }
    }

    /// The CPU, if it is one.
    pub fn cpu(self) -> Option<u32> {
        match self {
            Self::Inline => None,
            Self::Cpu(cpu) => Some(cpu),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline => f.pad("INLINE"),
            Self::Cpu(cpu) => f.pad(&format!("CPU {cpu}")),
        }
    }
}

impl FromStr for Location {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("CPU ").map(str::parse) {
            Some(Ok(cpu)) => Ok(Self::Cpu(cpu)),
            None if text == "INLINE" => Ok(Self::Inline),
            _ => Err(format!("{text:?} is not a location")),
        }
    }
}

impl From<Location> for String {
    fn from(location: Location) -> Self {
        location.to_string()
    }
}

impl TryFrom<String> for Location {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Why a flow wants to be where it wants to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// Its application last took or sent data on that CPU.
    Application,
    /// Its application polls the queue itself: elsewhere its polls would not find the packet.
    BusyPoll,
    /// No application is known, or its CPU is offline: the hash chooses among the queue's CPUs.
    Rps,
    /// Policy off: nothing is steered.
    PolicyOff,
    /// Every CPU that it might want is offline: it stays where it is received.
    Offline,
    /// As it was at its last packet: the load has not been looked at for it, or the tables say
    /// something else now.
    Undecided,
    /// INLINE: the CPU that polls has room.
    Room,
    /// INLINE: larger flows leave first.
    Small,
    /// INLINE: no other CPU could take it on.
    NoGain,
    /// Its application, on that CPU, waits for packets.
    Consumer,
    /// The hash chooses that CPU, which has room.
    Spread,
    /// That CPU was idle, and the one that the tables say busy.
    IdleCpu,
    /// It is there, and nothing speaks against it.
    Stay,
}

impl Reason {
    /// As the kernel side has it; `None` if the tables alone decide.
    fn from_raw(raw: u8) -> Option<Self> {
        Some(match rx_reason(raw.into()) {
            rx_reason::RX_ROOM => Self::Room,
            rx_reason::RX_SMALL => Self::Small,
            rx_reason::RX_NO_GAIN => Self::NoGain,
            rx_reason::RX_CONSUMER => Self::Consumer,
            rx_reason::RX_SPREAD => Self::Spread,
            rx_reason::RX_IDLE_CPU => Self::IdleCpu,
            rx_reason::RX_STAY => Self::Stay,
            _ => return None,
        })
    }
}

/// What decides where a flow wants to be. CPUs may be offline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Where its application was last seen; `None` if that is not known, or not asked for.
    pub application: Option<u32>,
    /// That CPU is offline.
    pub application_offline: bool,
    /// It polls the queue itself, on whatever CPU.
    pub application_polls: bool,
    /// What the `rps_map` says; `None` for "here".
    pub rps: Option<u32>,
    /// That CPU is offline.
    pub rps_offline: bool,
    /// Which CPU polls the queue, if that has been seen.
    pub polling: Option<u32>,
    /// Policy off.
    pub off: bool,
}

impl Hints {
    /// A CPU as a location, as `rx_usable()` in bpf/policy.h has it. The CPU that polls is never left
    /// for itself: a flow that wants it wants INLINE. Which CPU polls is known only from the last
    /// packet that was processed INLINE, so a flow that is at the CPU that it wants is said to want
    /// just that.
    fn usable(&self, cpu: Option<u32>, offline: bool, now: Location) -> Option<Location> {
        let cpu = cpu.filter(|_| !offline || cpu == self.polling)?;
        let here = self.polling == Some(cpu) && now != Location::Cpu(cpu);
        Some(if here {
            Location::Inline
        } else {
            Location::Cpu(cpu)
        })
    }

    /// Where the flow's next packet will want to be by the tables alone, as `rx_base()` in
    /// bpf/policy.h has it, and why.
    pub fn wanted(&self, now: Location) -> (Location, Reason) {
        if self.application_polls {
            return (Location::Inline, Reason::BusyPoll);
        }
        if let Some(location) = self.usable(self.application, self.application_offline, now) {
            return (location, Reason::Application);
        }
        match self.usable(self.rps, self.rps_offline, now) {
            Some(location) => (location, Reason::Rps),
            None if self.off => (Location::Inline, Reason::PolicyOff),
            None => (Location::Inline, Reason::Offline),
        }
    }

    /// The same where the load is looked at: what was decided for the flow, unless the CPU is
    /// `offline` now.
    pub fn decided(&self, flow: &rps_dev_flow, offline: bool, now: Location) -> (Location, Reason) {
        let tables = self.wanted(now);
        let wanted = match Location::from_raw(flow.wanted) {
            Some(Location::Cpu(cpu)) => self.usable(Some(cpu), offline, now),
            other => other,
        };
        match (wanted, Reason::from_raw(flow.reason)) {
            (None, _) => tables,
            (Some(Location::Inline), _) if self.application_polls => tables,
            (Some(wanted), Some(reason)) => (wanted, reason),
            (Some(wanted), None) if wanted == tables.0 => tables,
            (Some(wanted), None) => (wanted, Reason::Undecided),
        }
    }
}

/// A flow on a queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Its name; null if the device gave a hash and no packet was looked into.
    pub flow: Option<Flow>,
    /// The hash of its packets.
    pub hash: FlowHash,
    /// Where it is received: the device,
    pub device: String,
    /// and its receive queue.
    pub queue: u32,
    /// Where it is processed.
    pub location: Location,
    /// Where it wants to be.
    pub wanted: Location,
    /// Why there.
    pub reason: Reason,
    /// Where the tables alone would have it, if that was weighed against the load.
    pub base: Option<Location>,
    /// Where its application was last seen, if that is known.
    pub application_cpu: Option<u32>,
    /// That CPU is offline.
    pub application_offline: bool,
    /// Who polls the queue: as of the last packet that was processed INLINE.
    pub polling_cpu: Option<u32>,
    /// Its packets since it has the slot; counts up to 2³² - 1, and then from 0.
    pub packets: u32,
    /// And those that were dropped in XDP; likewise.
    pub dropped: u32,
    /// Times that it changed its location since then.
    pub moves: u32,
    /// Since its last packet, in steps of the kernel's tick; from 2³² ticks (49 days at 1000 a
    /// second) on, it counts from 0 again.
    pub idle_seconds: f64,
    /// Its packets are dropped until it can leave a backlog that was full.
    pub shed: bool,
}

/// Which flows are shown, and come first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Most {
    /// Those with the most packets.
    #[default]
    Packets,
    /// Those that lost the most; not those that lost none.
    Dropped,
}

/// What is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query {
    /// Only this device's.
    pub device: Option<String>,
    /// Only those that come to one of these local ports, if there are some.
    pub local_ports: Vec<u16>,
    /// At most so many:
    pub limit: usize,
    /// those with the most of this.
    pub most: Most,
}

/// Flows, those with the most of what was asked for first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Flows {
    /// No more than were asked for.
    pub flows: Vec<Entry>,
    /// How many there are. Flows that share a slot of the table are one: the latest.
    pub total: usize,
    /// Slots of all tables,
    pub slots: u64,
    /// and how many of them were read in time; the others' flows are missing.
    pub slots_read: u64,
}

impl Flows {
    /// That some may be missing, in words, if so.
    pub(crate) fn missed(&self) -> Option<String> {
        (self.slots_read < self.slots).then(|| {
            format!(
                "only {} of {} slots of the tables could be read in time",
                self.slots_read, self.slots
            )
        })
    }
}

/// A receive queue, as it is while a question is answered.
pub(crate) struct Queue {
    pub(crate) device: String,
    /// Of its device.
    pub(crate) number: u32,
    /// Over all devices.
    pub(crate) index: u32,
    pub(crate) counters: rx_queue,
    pub(crate) map: RpsMap,
}

/// The tables of a running rxsteer, and what is needed to understand them.
pub struct Reader<'a> {
    pub(crate) datapath: &'a Datapath,
    pub(crate) queues: Vec<Queue>,
    pub(crate) policy: Policy,
    /// What can't be followed on this host, in words.
    pub(crate) unseen: &'a [String],
}

impl<'a> Reader<'a> {
    /// `devices`: their names and numbers of queues, in the data path's order.
    ///
    /// # Errors
    /// When the maps can't be read.
    pub fn new(
        datapath: &'a Datapath,
        devices: impl IntoIterator<Item = (&'a str, u32)>,
        policy: Policy,
        unseen: &'a [String],
    ) -> Result<Self> {
        let queues = devices
            .into_iter()
            .flat_map(|(device, queues)| (0..queues).map(move |number| (device, number)))
            .zip(0..)
            .map(|((device, number), index)| {
                Ok(Queue {
                    device: device.to_owned(),
                    number,
                    index,
                    counters: datapath.rx_queue(index)?,
                    map: datapath.rps_map(index)?,
                })
            });
        Ok(Self {
            queues: queues.collect::<Result<_>>()?,
            datapath,
            policy,
            unseen,
        })
    }

    /// The flows that are asked for, as far as the tables can be read within `patience`.
    ///
    /// # Errors
    /// When the maps can't be read.
    pub fn flows(&self, query: &Query, patience: Duration) -> Result<Flows> {
        let deadline = Instant::now() + patience;
        let per_queue = self.datapath.tables().flow_cnt();
        let limit = query.limit.min(LIMIT_MAX);
        let mut most = BinaryHeap::new();
        let (mut total, mut slots_read) = (0, 0);
        let all = 0..per_queue * self.datapath.nr_queues();
        self.datapath.tables().dev_flows(all, |slot, flow| {
            if slot % 4096 == 0 && Instant::now() > deadline {
                return Ok(false);
            }
            slots_read += 1;
            let queue = &self.queues[(slot / per_queue) as usize];
            let other_device = query.device.as_ref().is_some_and(|d| *d != queue.device);
            let rank = match query.most {
                Most::Packets => Some(flow.nr_packets),
                Most::Dropped => Some(flow.nr_dropped).filter(|dropped| *dropped > 0),
            };
            let Some(rank) = rank.filter(|_| in_use(&queue.counters, flow) && !other_device) else {
                return Ok(true);
            };
            if !query.local_ports.is_empty() {
                let port = self.name(slot, flow.hash)?.and_then(|f| f.local_port());
                if !port.is_some_and(|port| query.local_ports.contains(&port)) {
                    return Ok(true);
                }
            }
            total += 1;
            most.push((Reverse(rank), slot));
            if most.len() > limit {
                most.pop();
            }
            Ok(true)
        })?;
        let flows = most.into_sorted_vec().into_iter();
        let flows = flows.map(|(_, slot)| {
            let queue = &self.queues[(slot / per_queue) as usize];
            self.entry(queue, slot, &self.datapath.tables().dev_flow(slot)?)
        });
        Ok(Flows {
            flows: flows.collect::<Result<_>>()?,
            total,
            slots: u64::from(per_queue) * self.queues.len() as u64,
            slots_read,
        })
    }

    /// The name of the flow that has the slot, if the key there is its key.
    pub(crate) fn name(&self, slot: u32, hash: u32) -> Result<Option<Flow>> {
        let key = self.datapath.tables().flow_key(slot)?;
        let own = native::flow_hash(&key, &self.datapath.config().secret) == hash;
        Ok(own.then(|| Flow::from_key(&key)).flatten())
    }

    pub(crate) fn hints(&self, queue: &Queue, hash: u32) -> Result<Hints> {
        let application = match u32::from(queue.counters.policy) & rx_policy::RX_FOLLOW.0 {
            0 => None,
            _ => Location::from_raw(self.datapath.application(hash)?.1),
        };
        let application_polls = application == Some(Location::Inline);
        let application = application.and_then(Location::cpu);
        let rps = native::rps_location_of(queue.map.raw(), hash);
        let rps = Location::from_raw(rps).and_then(Location::cpu);
        Ok(Hints {
            application,
            application_offline: self.offline(queue, application)?,
            application_polls,
            rps,
            rps_offline: self.offline(queue, rps)?,
            polling: load::polling_cpu(&queue.counters),
            off: self.policy == Policy::OFF,
        })
    }

    fn offline(&self, queue: &Queue, cpu: Option<u32>) -> Result<bool> {
        match cpu {
            Some(cpu) => Ok(self.datapath.backlog(queue.index, cpu)?.closed != 0),
            None => Ok(false),
        }
    }

    fn wish(
        &self,
        queue: &Queue,
        flow: &rps_dev_flow,
        hints: &Hints,
        now: Location,
    ) -> Result<(Location, Reason)> {
        if !load::decides(&queue.counters) {
            return Ok(hints.wanted(now));
        }
        let cpu = Location::from_raw(flow.wanted).and_then(Location::cpu);
        Ok(hints.decided(flow, self.offline(queue, cpu)?, now))
    }

    pub(crate) fn entry(&self, queue: &Queue, slot: u32, flow: &rps_dev_flow) -> Result<Entry> {
        let hints = self.hints(queue, flow.hash)?;
        let location = Location::from_raw(flow.location).unwrap_or(Location::Inline);
        let (wanted, reason) = self.wish(queue, flow, &hints, location)?;
        // Nobody asks the tables while there is room.
        let weighed =
            Reason::from_raw(flow.reason).is_some_and(|r| r == reason && r != Reason::Room);
        // Read later than the flow, or it could be in its future.
        let ticks = self.datapath.jiffies()?.wrapping_sub(flow.last_seen);
        Ok(Entry {
            flow: self.name(slot, flow.hash)?,
            hash: FlowHash(flow.hash),
            device: queue.device.clone(),
            queue: queue.number,
            location,
            wanted,
            reason,
            base: Location::from_raw(flow.base).filter(|_| weighed),
            application_cpu: hints.application,
            application_offline: hints.application_offline,
            polling_cpu: hints.polling,
            packets: flow.nr_packets,
            dropped: flow.nr_dropped,
            moves: flow.nr_moves,
            idle_seconds: f64::from(ticks) * tick()?.as_secs_f64(),
            shed: flow.shed != 0,
        })
    }
}

/// Whether the slot has a flow.
pub(crate) fn in_use(queue: &rx_queue, flow: &rps_dev_flow) -> bool {
    flow.epoch != 0 && flow.epoch == queue.epoch
}

/// The kernel's tick, 1/HZ: what its coarse clocks resolve.
fn tick() -> Result<Duration> {
    let tick = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).context("the kernel's tick")?;
    Ok(Duration::from(tick))
}

/// Why a flow wants to be where it wants to be, in few words.
fn why(entry: &Entry) -> String {
    // A flow wants INLINE because the CPU that it wants polls.
    let rps = match (entry.wanted, entry.polling_cpu) {
        (Location::Inline, Some(cpu)) => format!("RPS: CPU {cpu}, which polls"),
        _ => "RPS".to_owned(),
    };
    match (entry.reason, entry.application_cpu) {
        (Reason::Application, cpu) => format!(
            "application on CPU {}{}",
            cpu.unwrap_or_default(),
            match entry.wanted {
                Location::Inline => ", which polls",
                Location::Cpu(_) => "",
            }
        ),
        (Reason::BusyPoll, _) => "its application polls".to_owned(),
        (Reason::Rps, Some(cpu)) => format!("{rps}; the application's CPU {cpu} is offline"),
        (Reason::Rps, None) => rps,
        (Reason::PolicyOff, _) => "policy off".to_owned(),
        (Reason::Offline, _) => "its CPUs are offline".to_owned(),
        (Reason::Undecided, _) => "undecided".to_owned(),
        (Reason::Room, _) => "the CPU that polls has room".to_owned(),
        (Reason::Small, _) => "larger flows leave first".to_owned(),
        (Reason::NoGain, _) => "no other CPU could take it on".to_owned(),
        (Reason::Consumer, _) => "its application keeps up there".to_owned(),
        (Reason::Spread, _) => "RPS: has room".to_owned(),
        (Reason::IdleCpu, _) => match entry.base {
            Some(base) => format!("was idle; {base} is busy"),
            None => "was idle".to_owned(),
        },
        (Reason::Stay, _) => "it is there".to_owned(),
    }
}

/// A time in the unit that suits it.
pub(crate) fn ago(seconds: f64) -> String {
    match seconds {
        s if s < 0.9995 => format!("{:.0} ms", s * 1e3),
        s if s < 99.95 => format!("{s:.1} s"),
        s if s < 5999.5 => format!("{:.0} min", s / 60.0),
        s => format!("{:.0} h", s / 3600.0),
    }
}

/// The text; ends with a newline.
pub fn render(flows: &Flows) -> String {
    let mut out = String::new();
    if !flows.flows.is_empty() {
        out += &format!("{}\n\n", table(&flows.flows).trim_fmt());
    }
    out += &match (flows.total, flows.flows.len()) {
        (0, _) => "no flows".to_owned(),
        (1, 1) => "1 flow".to_owned(),
        (total, shown) if shown == total => format!("{total} flows"),
        (total, shown) => format!("{shown} of {total} flows, those with the most packets"),
    };
    if let Some(missed) = flows.missed() {
        out += &format!("; {missed}");
    }
    out.push('\n');
    out
}

fn table(flows: &[Entry]) -> Table {
    let mut table = table::table(&[
        "flow", "hash", "device", "queue", "packets", "dropped", "moves", "idle", "is at", "wants",
        "why",
    ]);
    for name in [0, 2, 10] {
        if let Some(column) = table.column_mut(name) {
            column.set_cell_alignment(CellAlignment::Left);
        }
    }
    for entry in flows {
        table.add_row([
            entry.flow.map_or("unknown".to_owned(), |f| f.to_string()),
            entry.hash.to_string(),
            entry.device.clone(),
            entry.queue.to_string(),
            entry.packets.to_string(),
            entry.dropped.to_string(),
            entry.moves.to_string(),
            ago(entry.idle_seconds),
            entry.location.to_string(),
            entry.wanted.to_string(),
            why(entry),
        ]);
    }
    table
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A flow that is at its application, on CPU 3; CPU 0 polls.
    pub(crate) fn entry() -> Entry {
        Entry {
            flow: Some("udp/192.0.2.1:1024/9".parse().unwrap()),
            hash: FlowHash(0x1234_5678),
            device: "eth0".to_owned(),
            queue: 2,
            location: Location::Cpu(3),
            wanted: Location::Cpu(3),
            reason: Reason::Application,
            application_cpu: Some(3),
            application_offline: false,
            polling_cpu: Some(0),
            base: None,
            packets: 17,
            dropped: 0,
            moves: 1,
            idle_seconds: 0.012,
            shed: false,
        }
    }

    #[test]
    fn locations_round_trip() {
        for location in [Location::Inline, Location::Cpu(0), Location::Cpu(511)] {
            assert_eq!(location.to_string().parse(), Ok(location));
        }
        for text in ["", "CPU", "CPU x", "inline", "CPU -1", "1"] {
            assert!(text.parse::<Location>().is_err(), "{text}");
        }
        for (raw, location) in [
            (rps_location::RPS_NO_CPU.0, None),
            (rps_location::RPS_INLINE.0, Some(Location::Inline)),
            (rps_location::RPS_INLINE_SHED.0, Some(Location::Inline)),
            (7, Some(Location::Cpu(7))),
        ] {
            assert_eq!(Location::from_raw(raw as u16), location);
        }
    }

    #[test]
    fn a_flow_wants_its_application_then_rps_then_to_stay() {
        use Location::{Cpu, Inline};
        let hints = Hints {
            application: Some(3),
            rps: Some(1),
            polling: Some(0),
            ..Hints::default()
        };
        let offline = Hints {
            application_offline: true,
            ..hints
        };
        let unknown = Hints {
            application: None,
            ..hints
        };
        let nowhere = Hints {
            rps_offline: true,
            ..offline
        };
        let off = Hints {
            off: true,
            ..Hints::default()
        };
        let busy_polls = Hints {
            application_polls: true,
            ..unknown
        };
        // Who polls is not left, not even for itself, and whatever is said of it.
        let polls = |hints: Hints, polling| Hints {
            polling: Some(polling),
            ..hints
        };
        for (hints, now, wanted, reason) in [
            (hints, Inline, Cpu(3), Reason::Application),
            (hints, Cpu(3), Cpu(3), Reason::Application),
            (polls(hints, 3), Cpu(1), Inline, Reason::Application),
            (polls(hints, 3), Inline, Inline, Reason::Application),
            (polls(hints, 3), Cpu(3), Cpu(3), Reason::Application),
            (polls(offline, 3), Inline, Inline, Reason::Application),
            (offline, Inline, Cpu(1), Reason::Rps),
            (unknown, Inline, Cpu(1), Reason::Rps),
            (polls(unknown, 1), Inline, Inline, Reason::Rps),
            (nowhere, Cpu(1), Inline, Reason::Offline),
            (off, Cpu(1), Inline, Reason::PolicyOff),
            (busy_polls, Cpu(1), Inline, Reason::BusyPoll),
            (busy_polls, Inline, Inline, Reason::BusyPoll),
        ] {
            assert_eq!(hints.wanted(now), (wanted, reason), "{hints:?} {now}");
        }
        // As long as nobody was seen to poll, there is only the CPU to name.
        let unseen = Hints {
            polling: None,
            ..hints
        };
        assert_eq!(unseen.wanted(Inline).0, Cpu(3));
    }

    #[test]
    fn what_was_decided_holds_while_its_cpu_is_online() {
        use Location::{Cpu, Inline};
        let hints = Hints {
            application: Some(3),
            rps: Some(1),
            polling: Some(0),
            ..Hints::default()
        };
        const INLINE: u16 = rps_location::RPS_INLINE.0 as u16;
        for (wanted, reason, offline, now, decided) in [
            (
                INLINE,
                rx_reason::RX_ROOM,
                false,
                Inline,
                (Inline, Reason::Room),
            ),
            (
                3,
                rx_reason::RX_CONSUMER,
                false,
                Inline,
                (Cpu(3), Reason::Consumer),
            ),
            (
                2,
                rx_reason::RX_IDLE_CPU,
                false,
                Cpu(2),
                (Cpu(2), Reason::IdleCpu),
            ),
            // As the next packet will find.
            (
                2,
                rx_reason::RX_IDLE_CPU,
                true,
                Cpu(2),
                (Cpu(3), Reason::Application),
            ),
            (
                0,
                rx_reason::RX_SPREAD,
                false,
                Cpu(1),
                (Inline, Reason::Spread),
            ),
            // By the tables alone; which may have changed since.
            (
                3,
                rx_reason::RX_TABLES,
                false,
                Inline,
                (Cpu(3), Reason::Application),
            ),
            (
                1,
                rx_reason::RX_TABLES,
                false,
                Inline,
                (Cpu(1), Reason::Undecided),
            ),
            (
                INLINE,
                rx_reason::RX_TABLES,
                false,
                Inline,
                (Inline, Reason::Undecided),
            ),
            (
                3,
                rx_reason::NR_RX_REASONS,
                false,
                Inline,
                (Cpu(3), Reason::Application),
            ),
        ] {
            let flow = rps_dev_flow {
                wanted,
                reason: reason.0 as u8,
                ..rps_dev_flow::default()
            };
            let got = hints.decided(&flow, offline, now);
            assert_eq!(got, decided, "{wanted} {reason:?} {offline} {now}");
        }
    }

    #[test]
    fn each_reason_of_the_data_path_has_a_name() {
        let mut words = std::collections::BTreeSet::new();
        for raw in 1..rx_reason::NR_RX_REASONS.0 as u8 {
            let reason = Reason::from_raw(raw).expect("a reason");
            words.insert(why(&Entry { reason, ..entry() }));
        }
        assert_eq!(words.len(), rx_reason::NR_RX_REASONS.0 as usize - 1);
        for raw in [0, rx_reason::NR_RX_REASONS.0 as u8, u8::MAX] {
            assert_eq!(Reason::from_raw(raw), None);
        }
    }

    #[test]
    fn the_table_says_where_and_why() {
        let inline = Entry {
            flow: None,
            location: Location::Cpu(1),
            wanted: Location::Inline,
            application_cpu: Some(0),
            idle_seconds: 75.0,
            ..entry()
        };
        let offline = Entry {
            wanted: Location::Cpu(1),
            reason: Reason::Rps,
            application_offline: true,
            ..entry()
        };
        let rps = Entry {
            application_cpu: None,
            wanted: Location::Inline,
            ..offline.clone()
        };
        let flows = Flows {
            flows: vec![entry(), inline, offline, rps],
            total: 9,
            slots: 4096,
            slots_read: 4096,
        };
        let text = render(&flows);
        for words in [
            "udp/192.0.2.1:1024/9  0x12345678  eth0        2       17        0      1   12 ms  CPU 3   CPU 3  \
             application on CPU 3",
            "75.0 s  CPU 1  INLINE  application on CPU 0, which polls",
            "CPU 3   CPU 1  RPS; the application's CPU 3 is offline",
            "CPU 3  INLINE  RPS: CPU 0, which polls",
            "\n\n4 of 9 flows, those with the most packets\n",
        ] {
            assert!(text.contains(words), "not {words:?} in\n{text}");
        }
        let cut = render(&Flows {
            flows: Vec::new(),
            total: 0,
            slots: 4096,
            slots_read: 128,
        });
        assert_eq!(
            cut,
            "no flows; only 128 of 4096 slots of the tables could be read in time\n"
        );
    }

    #[test]
    fn times_have_the_unit_that_suits_them() {
        for (seconds, text) in [
            (0.0, "0 ms"),
            (0.9994, "999 ms"),
            (0.9996, "1.0 s"),
            (99.9, "99.9 s"),
            (120.0, "2 min"),
            (7200.0, "2 h"),
        ] {
            assert_eq!(ago(seconds), text);
        }
    }
}
