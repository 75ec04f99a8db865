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
use crate::native;
use crate::rps_map::RpsMap;
use crate::run::Policy;
use crate::rx::types::{rps_dev_flow, rps_location, rx_queue};
use crate::status;
use crate::tables;

/// How many flows can be asked for at once.
pub const LIMIT_MAX: usize = 10_000;

/// How long the tables are read: who asks waits for 2 seconds, and backlogs may have to be made.
const PATIENCE: Duration = Duration::from_secs(1);

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
    /// No application is known, or its CPU is offline: the hash chooses among the queue's CPUs.
    Rps,
    /// Policy off: nothing is steered.
    PolicyOff,
    /// Every CPU that it might want is offline: it stays where it is received.
    Offline,
}

/// What decides where a flow wants to be. CPUs may be offline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Where its application was last seen; `None` if that is not known, or not asked for.
    pub application: Option<u32>,
    /// That CPU is offline.
    pub application_offline: bool,
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
    /// Where the flow's next packet will want to be, as `rx_wanted()` in bpf/steer.h has it, and why.
    /// The CPU that polls is never left for itself: a flow that wants it wants INLINE. Which CPU
    /// polls is known only from the last packet that was processed INLINE, so a flow that is at the
    /// CPU that it wants is said to want just that.
    pub fn wanted(&self, now: Location) -> (Location, Reason) {
        let usable = |cpu: Option<u32>, offline: bool| {
            let cpu = cpu.filter(|_| !offline || cpu == self.polling)?;
            let here = self.polling == Some(cpu) && now != Location::Cpu(cpu);
            Some(if here {
                Location::Inline
            } else {
                Location::Cpu(cpu)
            })
        };
        if let Some(location) = usable(self.application, self.application_offline) {
            return (location, Reason::Application);
        }
        match usable(self.rps, self.rps_offline) {
            Some(location) => (location, Reason::Rps),
            None if self.off => (Location::Inline, Reason::PolicyOff),
            None => (Location::Inline, Reason::Offline),
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
    /// Where its application was last seen, if that is known.
    pub application_cpu: Option<u32>,
    /// That CPU is offline.
    pub application_offline: bool,
    /// Who polls the queue: as of the last packet that was processed INLINE.
    pub polling_cpu: Option<u32>,
    /// Its packets since it has the slot; counts up to 2³² - 1, and then from 0.
    pub packets: u32,
    /// Times that it changed its location since then.
    pub moves: u32,
    /// Since its last packet, in steps of the kernel's tick; from 2³² ticks (49 days at 1000 a
    /// second) on, it counts from 0 again.
    pub idle_seconds: f64,
    /// Its packets are dropped until it can leave a backlog that was full.
    pub shed: bool,
}

/// What is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query {
    /// Only this device's.
    pub device: Option<String>,
    /// Only those that come to one of these local ports, if there are some.
    pub local_ports: Vec<u16>,
    /// At most so many: those with the most packets.
    pub limit: usize,
}

/// Flows, those with the most packets first.
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

impl Queue {
    fn polling(&self) -> Option<u32> {
        let stamp = self.counters.poll;
        (stamp != 0).then(|| native::poll_stamp_cpu(stamp).into())
    }
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

    /// The flows that are asked for.
    ///
    /// # Errors
    /// When the maps can't be read.
    pub fn flows(&self, query: &Query) -> Result<Flows> {
        let deadline = Instant::now() + PATIENCE;
        let per_queue = self.datapath.tables().flow_cnt();
        let limit = query.limit.min(LIMIT_MAX);
        let mut most = BinaryHeap::new();
        let (mut total, mut slots_read) = (0, 0);
        self.datapath.tables().dev_flows(|slot, flow| {
            if slot % 4096 == 0 && Instant::now() > deadline {
                return Ok(false);
            }
            slots_read += 1;
            let queue = &self.queues[(slot / per_queue) as usize];
            let other_device = query.device.as_ref().is_some_and(|d| *d != queue.device);
            if !in_use(queue, flow) || other_device {
                return Ok(true);
            }
            if !query.local_ports.is_empty() {
                let port = self.name(slot, flow.hash)?.and_then(|f| f.local_port());
                if !port.is_some_and(|port| query.local_ports.contains(&port)) {
                    return Ok(true);
                }
            }
            total += 1;
            most.push((Reverse(flow.nr_packets), slot));
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
        let location = |raw| match Location::from_raw(raw) {
            Some(Location::Cpu(cpu)) => Some(cpu),
            _ => None,
        };
        let offline = |cpu: Option<u32>| match cpu {
            Some(cpu) => {
                Ok::<_, anyhow::Error>(self.datapath.backlog(queue.index, cpu)?.closed != 0)
            }
            None => Ok(false),
        };
        let application = match queue.counters.rfs {
            0 => None,
            _ => location(self.application(hash)?.1),
        };
        let rps = location(native::rps_location_of(queue.map.raw(), hash));
        Ok(Hints {
            application,
            application_offline: offline(application)?,
            rps,
            rps_offline: offline(rps)?,
            polling: queue.polling(),
            off: self.policy == Policy::Off,
        })
    }

    /// The `sock_flow_table`'s entry for a hash, and the CPU in it.
    pub(crate) fn application(&self, hash: u32) -> Result<(u32, u16)> {
        let entry = self.datapath.tables().sock_flow(hash)?;
        let mask = tables::cpu_mask(self.datapath.nr_cpus());
        Ok((entry, native::sock_flow_cpu(entry, hash, mask)))
    }

    pub(crate) fn entry(&self, queue: &Queue, slot: u32, flow: &rps_dev_flow) -> Result<Entry> {
        let hints = self.hints(queue, flow.hash)?;
        let location = Location::from_raw(flow.location).unwrap_or(Location::Inline);
        let (wanted, reason) = hints.wanted(location);
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
            application_cpu: hints.application,
            application_offline: hints.application_offline,
            polling_cpu: hints.polling,
            packets: flow.nr_packets,
            moves: flow.nr_moves,
            idle_seconds: f64::from(ticks) * tick()?.as_secs_f64(),
            shed: flow.shed != 0,
        })
    }
}

/// Whether the slot has a flow.
pub(crate) fn in_use(queue: &Queue, flow: &rps_dev_flow) -> bool {
    flow.epoch != 0 && flow.epoch == queue.counters.epoch
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
        (Reason::Rps, Some(cpu)) => format!("{rps}; the application's CPU {cpu} is offline"),
        (Reason::Rps, None) => rps,
        (Reason::PolicyOff, _) => "policy off".to_owned(),
        (Reason::Offline, _) => "its CPUs are offline".to_owned(),
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
    if flows.slots_read < flows.slots {
        out += &format!(
            "; only {} of {} slots of the tables could be read in time",
            flows.slots_read, flows.slots
        );
    }
    out.push('\n');
    out
}

fn table(flows: &[Entry]) -> Table {
    let mut table = status::table(&[
        "flow", "hash", "device", "queue", "packets", "moves", "idle", "is at", "wants", "why",
    ]);
    for name in [0, 2, 9] {
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
            packets: 17,
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
            "udp/192.0.2.1:1024/9  0x12345678  eth0        2       17      1   12 ms  CPU 3   CPU 3  \
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
