// SPDX-License-Identifier: MIT OR Apache-2.0
//! Questions and answers of `explain`.

use std::fmt::{self, Write};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_with::{DeserializeFromStr, SerializeDisplay};

use super::flows::{Entry, Location};
use crate::datapath::flow::{Flow, FlowError, FlowHash};
use crate::datapath::load::Load;
use crate::datapath::policy::Policy;

/// The two ways to name a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, SerializeDisplay, DeserializeFromStr)]
pub enum Name {
    /// Addresses, protocol and ports.
    Flow(Flow),
    /// Hash of the flow.
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

/// Most names, and most ports, in a list of a [`Question`].
pub const NAMES_MAX: usize = 4096;

/// A question to a running rxsteer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// The flows to explain.
    pub names: Vec<Name>,
    /// Also the flows in its tables with one of these local ports.
    pub local_ports: Vec<u16>,
    /// Ports of unconnected UDP sockets that the asking process has found.
    pub unconnected: Vec<u16>,
    /// Upper limit of flows in the answer: those with the most packets. At most
    /// [`LIMIT_MAX`](super::flows::LIMIT_MAX).
    pub limit: usize,
}

impl Question {
    /// The same with lists that can be asked about.
    pub fn bounded(mut self) -> Self {
        self.names.truncate(NAMES_MAX);
        self.local_ports.truncate(NAMES_MAX);
        self.unconnected.truncate(NAMES_MAX);
        self
    }

    /// # Errors
    /// When a list has more elements than can be asked about.
    pub fn check(&self) -> Result<(), String> {
        let longest = self.names.len().max(self.local_ports.len());
        match longest.max(self.unconnected.len()) {
            0..=NAMES_MAX => Ok(()),
            n => Err(format!(
                "{n} flows or ports at once: {NAMES_MAX} can be asked about"
            )),
        }
    }
}

/// Why the CPU of a flow's application is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unknown {
    /// Policy off.
    PolicyOff,
    /// Policy rps, also with additions.
    PolicyRps,
    /// One of the tables has size 0.
    NoTable,
    /// The kernel has no way to watch sockets.
    Unsupported,
    /// Flows are named by the device's hash.
    DeviceHash,
    /// Both directions of a connection have one hash, which sockets don't know.
    SymmetricHash,
    /// The packets have no ports: no socket can be found.
    NoPorts,
    /// The packets are in a tunnel that is not parsed.
    Tunnel,
    /// Another flow has the entry of the `sock_flow_table`.
    EntryTaken,
    /// The application has closed the socket.
    Closed,
    /// The socket is not connected, and the application does not ask for the sender's address.
    Unconnected,
    /// No application has been seen to receive or send its data.
    NotSeen,
}

/// The entry of a flow in the `sock_flow_table`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Application {
    /// The CPU on which the application was last seen.
    pub cpu: Option<u32>,
    /// That CPU is offline.
    pub offline: bool,
    /// The application polls the queue, on whatever CPU it runs.
    pub polls: bool,
    /// Why `cpu` is unknown.
    pub unknown: Option<Unknown>,
    /// Index of the flow's entry.
    pub entry: u32,
    /// Number of entries of the table.
    pub entries: u32,
    /// Content of the entry: upper bits of a hash, a bit for unconnected sockets, and a CPU's number
    /// plus one.
    pub value: FlowHash,
}

/// The event that a flow waits for before it moves to where it wants to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "for", rename_all = "kebab-case")]
pub enum Wait {
    /// Its next packet.
    Packet,
    /// Its packets in a CPU's backlog.
    Backlog {
        /// CPU of the backlog.
        cpu: u32,
        /// Frames up to the flow's last one that have not been dequeued yet.
        frames: u64,
        /// Name of the backlog's thread; null in softirq mode.
        thread: Option<String>,
    },
    /// A CPU has dequeued its packets, but may not have delivered them.
    Delivery {
        /// CPU of the backlog.
        cpu: u32,
        /// Name of the backlog's thread; null in softirq mode.
        thread: Option<String>,
    },
    /// The end of a poll that leaves GRO empty.
    Poll,
    /// User space has to create the backlog for its new CPU.
    NewBacklog {
        /// CPU of the backlog.
        cpu: u32,
        /// The data path has asked for it.
        asked: bool,
    },
}

/// How the load decides for a flow. A window is [`crate::datapath::load::WINDOW_MS`] long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Load of the queue; null before the first packets.
    pub load: Option<Load>,
    /// The flow's packets in the last window in which the load was consulted for it, which it is
    /// not while the polling CPU has room.
    pub window_packets: u32,
    /// Windows since the flow's decision last changed, or since it got the slot.
    pub changed_windows_ago: u32,
}

/// Packets that a queue has dropped in XDP, of all flows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drops {
    /// The CPU's backlog was full.
    pub full: u64,
    /// The flow had to leave and could not yet.
    pub shed: u64,
    /// The flow was large, and the backlog half full.
    pub limited: u64,
}

/// A flow on a queue that has received it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// The line of `rxsteer flows`.
    #[serde(flatten)]
    pub entry: Entry,
    /// In softirq mode: its backlogs are the CPUs' softnet backlogs, which have no threads.
    pub softirq: bool,
    /// Slot of the queue's `rps_map`.
    pub rps_slot: u32,
    /// Number of slots of the `rps_map`.
    pub rps_slots: u32,
    /// Location in that slot.
    pub rps: Location,
    /// The CPU in that slot is offline.
    pub rps_offline: bool,
    /// Slot of the queue's `dev_flow_table`.
    pub slot: u32,
    /// Number of slots of the `dev_flow_table`.
    pub slots: u32,
    /// The event that it waits for, if it is not where it wants to be.
    pub waits: Option<Wait>,
    /// The load's part in the decision; null if the tables alone decide.
    pub decision: Option<Decision>,
    /// The queue's drops by cause, not counted per flow; null if the flow lost nothing.
    pub queue_dropped: Option<Drops>,
}

/// A queue on which another flow has the slot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Other {
    /// Interface name.
    pub device: String,
    /// Receive queue.
    pub queue: u32,
    /// Slot of the queue's `dev_flow_table`.
    pub slot: u32,
    /// The flow that has the slot.
    pub owner: Name,
}

/// Everything known about a flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Null if only the hash is known.
    pub flow: Option<Flow>,
    /// Hash of the flow.
    pub hash: FlowHash,
    /// Its packets always stay INLINE, by its ports, and are not counted for it.
    pub inline_port: bool,
    /// The application's entry in the table.
    pub application: Application,
    /// Queues that have received it.
    pub seen: Vec<Seen>,
    /// Queues that may have received it before another flow took the slot.
    pub others: Vec<Other>,
}

impl Explanation {
    /// The flow, or its hash if that is unknown.
    pub fn name(&self) -> Name {
        self.flow.map_or(Name::Hash(self.hash), Name::Flow)
    }

    /// Says that none of its packets has been seen.
    pub fn not_seen(&self, devices: &[String]) -> String {
        if self.inline_port {
            return format!(
                "packets of {} stay where they are received: one of its ports is in --inline-ports",
                self.name()
            );
        }
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

/// The answer to a [`Question`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanations {
    /// At most `limit` flows, those with the most packets first.
    pub flows: Vec<Explanation>,
    /// Number of flows that match.
    pub total: usize,
    /// Steered devices.
    pub devices: Vec<String>,
    /// The policy in effect.
    pub policy: Policy,
    /// Flows are hashed by the device; those with such a hash are not found by their addresses.
    pub device_hash: bool,
    /// Messages about flows that can't follow their applications on this host.
    pub not_followed: Vec<String>,
}
