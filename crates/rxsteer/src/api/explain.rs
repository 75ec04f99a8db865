// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `explain` is asked and answers: all that is known of flows.

use std::fmt::{self, Write};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::flows::{Entry, Location};
use crate::datapath::flow::{Flow, FlowError, FlowHash};
use crate::datapath::load::Load;
use crate::datapath::policy::Policy;

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

/// What is known of a flow where the load decides. A turn is that of [`crate::datapath::load::TURN_MS`].
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

impl Explanation {
    /// Of all queues; `None` where no packet of it is known.
    pub(crate) fn packets(&self) -> Option<u64> {
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
}
