// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `flows` is asked and answers: the flows of a running rxsteer, where they are and where they want to be.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::datapath::flow::{Flow, FlowHash};
use crate::types::{rps_location, rx_reason};

/// How many flows can be asked for at once.
pub const LIMIT_MAX: usize = 10_000;

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
    pub(crate) fn from_raw(raw: u8) -> Option<Self> {
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
