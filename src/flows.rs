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
use crate::run::{Hash, Policy};
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
    /// Only those that come to this local port.
    pub local_port: Option<u16>,
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
    pub(crate) hash: Hash,
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
        hash: Hash,
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
            hash,
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
        for (slot, flow) in (0u32..).zip(self.datapath.tables().dev_flows()?) {
            if slot % 4096 == 0 && Instant::now() > deadline {
                break;
            }
            slots_read += 1;
            let flow = flow?;
            let queue = &self.queues[(slot / per_queue) as usize];
            let other_device = query.device.as_ref().is_some_and(|d| *d != queue.device);
            if !in_use(queue, &flow) || other_device {
                continue;
            }
            if let Some(port) = query.local_port
                && self.name(slot, flow.hash)?.and_then(|f| f.local_port()) != Some(port)
            {
                continue;
            }
            total += 1;
            most.push((Reverse(flow.nr_packets), slot));
            if most.len() > limit {
                most.pop();
            }
        }
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
    let here = |cpu: Option<u32>| match (entry.wanted, cpu) {
        (Location::Inline, Some(cpu)) => format!(", and CPU {cpu} polls"),
        _ => String::new(),
    };
    match (entry.reason, entry.application_cpu) {
        (Reason::Application, cpu) => format!("application there{}", here(cpu)),
        (Reason::Rps, Some(cpu)) => format!(
            "RPS{}: the application's CPU {cpu} is offline",
            here(entry.polling_cpu)
        ),
        (Reason::Rps, None) => format!("RPS{}", here(entry.polling_cpu)),
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
