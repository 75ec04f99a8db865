// SPDX-License-Identifier: MIT OR Apache-2.0
//! Questions and answers of `flows`: the flows of a running rxsteer, with their locations.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_with::{DeserializeFromStr, SerializeDisplay};

use crate::datapath::flow::{Flow, FlowHash};
use crate::types::{rps_location, rx_reason};

/// Upper limit of [`Query::limit`].
pub const LIMIT_MAX: usize = 10_000;

/// Where a packet is processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, SerializeDisplay, DeserializeFromStr)]
pub enum Location {
    /// In the poll that receives it.
    Inline,
    /// By the thread of the queue's backlog for a CPU.
    Cpu(u32),
}

impl Location {
    /// Converts the data path's value; `None` for `RPS_NO_CPU`.
    pub fn from_raw(raw: u16) -> Option<Self> {
        match rps_location(raw.into()) {
            rps_location::RPS_NO_CPU => None,
            rps_location::RPS_INLINE | rps_location::RPS_INLINE_SHED => Some(Self::Inline),
            _ => Some(Self::Cpu(raw.into())),
        }
    }

    /// The CPU, unless INLINE.
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

/// The reason for a flow's wanted location.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// Its application last received or sent data on that CPU.
    Application,
    /// Its application polls the queue: polls would not find packets processed elsewhere.
    BusyPoll,
    /// The application is unknown, or its CPU offline or not among the queue's: the hash selects a CPU of
    /// the queue.
    Rps,
    /// Policy off.
    PolicyOff,
    /// All candidate CPUs are offline or stalled: the flow stays where it is received.
    Offline,
    /// As at its last packet: the load was not consulted, or the tables have changed since.
    Undecided,
    /// INLINE: the polling CPU has room.
    Room,
    /// INLINE: no other CPU has room for the flow.
    NoGain,
    /// The application is on that CPU, which has room.
    Consumer,
    /// That CPU of the queue has room.
    Spread,
    /// That CPU was idle, and the CPU according to the tables busy.
    IdleCpu,
    /// The present location, since no reason to leave applies.
    Stay,
    /// INLINE: GRO merges its segments there.
    Merged,
    /// INLINE: when the queue's flows moved, no more was delivered.
    Unhelpful,
}

impl Reason {
    /// Whether the queue's load alone decides, without a look at the tables.
    pub(crate) fn is_by_pressure(self) -> bool {
        matches!(self, Self::Room | Self::Unhelpful)
    }

    /// Converts the data path's value; `None` if the tables alone decide.
    pub(crate) fn from_raw(raw: u8) -> Option<Self> {
        Some(match rx_reason(raw.into()) {
            rx_reason::RX_ROOM => Self::Room,
            rx_reason::RX_NO_GAIN => Self::NoGain,
            rx_reason::RX_CONSUMER => Self::Consumer,
            rx_reason::RX_SPREAD => Self::Spread,
            rx_reason::RX_IDLE_CPU => Self::IdleCpu,
            rx_reason::RX_STAY => Self::Stay,
            rx_reason::RX_MERGED => Self::Merged,
            rx_reason::RX_UNHELPFUL => Self::Unhelpful,
            _ => return None,
        })
    }
}

/// A flow on a queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Entry {
    /// Null if the device supplied the hash and no packet was parsed.
    #[schemars(with = "Option<String>")]
    pub flow: Option<Flow>,
    /// Hash of its packets.
    #[schemars(with = "String")]
    pub hash: FlowHash,
    /// Interface name of the receiving device.
    pub device: String,
    /// Receive queue.
    pub queue: u32,
    /// Where it is processed.
    #[schemars(with = "String")]
    pub location: Location,
    /// Where it wants to be.
    #[schemars(with = "String")]
    pub wanted: Location,
    /// Reason for `wanted`.
    pub reason: Reason,
    /// The location according to the tables alone, if the load was consulted.
    #[schemars(with = "Option<String>")]
    pub base: Option<Location>,
    /// The CPU on which its application was last seen; null if unknown.
    pub application_cpu: Option<u32>,
    /// `application_cpu` is offline.
    pub application_offline: bool,
    /// The CPU that polls the queue, as of the last packet processed INLINE.
    pub polling_cpu: Option<u32>,
    /// Packets since the flow got the slot, modulo 2³².
    pub packets: u32,
    /// Packets dropped in XDP since then, modulo 2³².
    pub dropped: u32,
    /// Changes of location since then.
    pub moves: u32,
    /// Time since its last packet, in kernel ticks and modulo 2³² ticks (49 days at 1000 Hz), s.
    pub idle_seconds: f64,
    /// Its packets are dropped until it can leave a backlog that was full, or whose CPU went offline.
    pub shed: bool,
}

/// The order of the flows in an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Most {
    /// Most packets first.
    #[default]
    Packets,
    /// Most drops first; flows without drops are left out.
    Dropped,
}

/// A question about flows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query {
    /// Only flows of this device.
    pub device: Option<String>,
    /// If not empty, only flows to one of these local ports.
    pub local_ports: Vec<u16>,
    /// Upper limit of flows in the answer.
    pub limit: usize,
    /// The flows to select up to the limit.
    pub most: Most,
    /// Only flows with a packet in this time, to the kernel's tick; at most 24 days at 1000 Hz.
    #[serde(default)]
    pub within: Option<Duration>,
}

/// The answer to a [`Query`], ordered as it asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Flows {
    /// At most `limit` flows.
    pub flows: Vec<Entry>,
    /// Number of flows that match. Flows that share a slot count as one, which can change once a
    /// tick.
    pub total: usize,
    /// Slots of all tables.
    pub slots: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
