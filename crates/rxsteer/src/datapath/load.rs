// SPDX-License-Identifier: MIT OR Apache-2.0
//! A queue's load, on which the policies `+idle` and `+adapt` depend (`bpf/core/load.h`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::native;
use crate::types::{load_unit, rx_policy, rx_pressure, rx_queue};

/// Unit of shares in the data path.
pub(crate) const WHOLE: u32 = load_unit::LOAD_WHOLE.0;

/// Length of a window in milliseconds; longer if polls are rare.
pub const WINDOW_MS: u64 = load_unit::LOAD_WINDOW_MS.0 as u64;

/// Whether the CPU that polls a queue has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Pressure {
    /// Room for all flows of the queue.
    Relaxed,
    /// All flows of the queue stay: when they moved, no more was delivered.
    Kept,
    /// No room for more flows.
    Full,
    /// Hardly any time is left.
    Saturated,
    /// An application polls the queue for its own packets.
    Polled,
}

impl Pressure {
    /// All states.
    pub const ALL: [Self; 5] = [
        Self::Relaxed,
        Self::Kept,
        Self::Full,
        Self::Saturated,
        Self::Polled,
    ];

    /// As in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Relaxed => "relaxed",
            Self::Kept => "kept",
            Self::Full => "full",
            Self::Saturated => "saturated",
            Self::Polled => "polled",
        }
    }
}

/// A queue's load in its last window. Without packets no window ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Load {
    /// The CPU that polls the queue, as of the last packet processed INLINE.
    pub polling_cpu: Option<u32>,
    /// Whether that CPU has room.
    pub pressure: Pressure,
    /// Percentage of that CPU's time in which it was not idle.
    pub busy_percent: u32,
    /// Percentage of that CPU's time in polls.
    pub polls_percent: u32,
}

impl Load {
    /// `None` while no window has ended, and if the policy does not depend on the load.
    pub fn of(q: &rx_queue) -> Option<Self> {
        let l = &q.load;
        let percent = |share: u16| (u32::from(share) * 100 + WHOLE / 2) / WHOLE;
        let pressure = match rx_pressure(l.pressure.into()) {
            rx_pressure::RX_RELAXED if l.kept != 0 => Pressure::Kept,
            rx_pressure::RX_RELAXED => Pressure::Relaxed,
            rx_pressure::RX_FULL => Pressure::Full,
            rx_pressure::RX_POLLED => Pressure::Polled,
            _ => Pressure::Saturated,
        };
        (decides(q) && l.window != 0).then(|| Self {
            polling_cpu: polling_cpu(q),
            pressure,
            busy_percent: percent(l.busy_share),
            polls_percent: percent(l.poll_share),
        })
    }
}

/// Whether the queue's policy depends on the load.
pub(crate) fn decides(q: &rx_queue) -> bool {
    u32::from(q.policy) & (rx_policy::RX_IDLE.0 | rx_policy::RX_ADAPT.0) != 0
}

/// The CPU that polls the queue, if a packet has been processed INLINE.
pub(crate) fn polling_cpu(q: &rx_queue) -> Option<u32> {
    (q.poll != 0).then(|| native::poll_stamp_cpu(q.poll).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::policy::Policy;
    use crate::types::rx_load;

    #[test]
    fn shares_are_percents() {
        let mut q = rx_queue {
            policy: Policy::ADAPTIVE.bits(),
            poll: native::poll_stamp(3, 7),
            load: rx_load {
                window: 1,
                busy_share: 1024,
                poll_share: 512,
                pressure: rx_pressure::RX_FULL.0 as u16,
                ..rx_load::default()
            },
            ..rx_queue::default()
        };
        let load = Load {
            polling_cpu: Some(3),
            pressure: Pressure::Full,
            busy_percent: 100,
            polls_percent: 50,
        };
        assert_eq!(Load::of(&q), Some(load.clone()));
        q.poll = 0;
        let unpolled = Load {
            polling_cpu: None,
            ..load
        };
        assert_eq!(Load::of(&q), Some(unpolled));
        q.load.window = 0;
        assert_eq!(Load::of(&q), None, "no window has ended");
        q.load.window = 1;
        q.policy = Policy::RFS.bits();
        assert_eq!(Load::of(&q), None, "nobody learns whether the CPU is busy");
    }
}
