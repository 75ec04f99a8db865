// SPDX-License-Identifier: MIT OR Apache-2.0
//! The flows in the order of what they do now.

use std::collections::HashMap;

use crate::api::flows::{Entry, Flows, Most};
use crate::cli::flows::why;

/// A flow, and its rates per second; unknown for a flow that was not in the sample before.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowRow {
    /// The flow as of the later sample.
    pub entry: Entry,
    /// Packets accepted.
    pub rate: Option<f64>,
    /// Packets dropped in XDP.
    pub drops: Option<f64>,
    /// Changes of location.
    pub moves: Option<f64>,
}

/// The order of the flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// Most packets per second first.
    #[default]
    Rate,
    /// Most drops per second first.
    Drops,
    /// Most moves per second first.
    Moves,
}

impl Sort {
    /// The next one, for a key that goes through all.
    pub fn next(self) -> Self {
        match self {
            Self::Rate => Self::Drops,
            Self::Drops => Self::Moves,
            Self::Moves => Self::Rate,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::Drops => "drops",
            Self::Moves => "moves",
        }
    }

    /// The flows to ask for.
    pub fn most(self) -> Most {
        match self {
            Self::Drops => Most::Dropped,
            Self::Rate | Self::Moves => Most::Packets,
        }
    }
}

/// Increase of a counter that wraps. A flow that lost its slot and got it again has counted from
/// zero.
fn increase(before: u32, now: u32) -> f64 {
    match now.wrapping_sub(before) {
        more if more <= u32::MAX / 2 => more.into(),
        _ => now.into(),
    }
}

/// The flows of the later sample, with their rates.
pub fn rows(before: &Flows, now: &Flows, seconds: f64) -> Vec<FlowRow> {
    let key = |entry: &Entry| (entry.device.clone(), entry.queue, entry.hash.0);
    let before: HashMap<_, _> = before.flows.iter().map(|e| (key(e), e)).collect();
    let row = |entry: &Entry| {
        let earlier = before.get(&key(entry));
        let rate = |of: fn(&Entry) -> u32| Some(increase(of(earlier?), of(entry)) / seconds);
        FlowRow {
            rate: rate(|e| e.packets),
            drops: rate(|e| e.dropped),
            moves: rate(|e| e.moves),
            entry: entry.clone(),
        }
    };
    now.flows.iter().map(row).collect()
}

impl FlowRow {
    /// The flow's name, or its hash.
    pub fn name(&self) -> String {
        let hash = || self.entry.hash.to_string();
        self.entry.flow.map_or_else(hash, |flow| flow.to_string())
    }

    fn contains(&self, text: &str) -> bool {
        let Entry {
            hash,
            device,
            location,
            wanted,
            ..
        } = &self.entry;
        let all = format!(
            "{} {hash} {device} {location} {wanted} {}",
            self.name(),
            why(&self.entry)
        );
        all.to_lowercase().contains(text)
    }
}

/// The flows that contain a text, in any case, in this order.
pub fn sorted<'a>(flows: &'a [FlowRow], sort: Sort, filter: &str) -> Vec<&'a FlowRow> {
    let filter = filter.to_lowercase();
    let mut flows: Vec<_> = flows.iter().filter(|f| f.contains(&filter)).collect();
    flows.sort_by(|a, b| {
        let rank = |row: &FlowRow| match sort {
            Sort::Rate => row.rate,
            Sort::Drops => row.drops,
            Sort::Moves => row.moves,
        };
        let [a, b] = [a, b].map(|row| (rank(row).unwrap_or(-1.0), row.entry.packets));
        b.0.total_cmp(&a.0).then(b.1.cmp(&a.1))
    });
    flows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::flows::tests::entry;
    use crate::datapath::flow::FlowHash;

    fn flow(hash: u32, packets: u32, dropped: u32, moves: u32) -> Entry {
        Entry {
            hash: FlowHash(hash),
            flow: Some(format!("udp/192.0.2.{hash}:1024/9").parse().unwrap()),
            packets,
            dropped,
            moves,
            ..entry()
        }
    }

    fn flows(flows: Vec<Entry>) -> Flows {
        Flows {
            total: flows.len(),
            flows,
            slots: 4096,
        }
    }

    #[test]
    fn a_flow_has_rates_from_its_second_sample_on() {
        let before = flows(vec![flow(1, u32::MAX - 9, 0, 0), flow(2, 500, 9, 3)]);
        let now = flows(vec![flow(1, 90, 0, 2), flow(2, 50, 1, 0), flow(3, 7, 0, 0)]);
        let rows = rows(&before, &now, 2.0);
        let rates: Vec<_> = rows.iter().map(|r| [r.rate, r.drops, r.moves]).collect();
        assert_eq!(
            rates,
            [
                // Counters wrap.
                [Some(50.0), Some(0.0), Some(1.0)],
                // The flow lost its slot in between.
                [Some(25.0), Some(0.5), Some(0.0)],
                [None; 3],
            ]
        );
    }

    #[test]
    fn flows_are_sorted_and_filtered() {
        let before = [1, 2, 3].map(|hash| flow(hash, 0, 0, 0)).to_vec();
        let now = vec![
            flow(1, 100, 0, 1),
            flow(2, 300, 5, 0),
            flow(3, 200, 9, 7),
            flow(4, 900, 9, 9),
        ];
        let rows = rows(&flows(before), &flows(now), 1.0);
        let order = |sort, filter| -> Vec<u32> {
            let sorted = sorted(&rows, sort, filter);
            sorted.iter().map(|row| row.entry.hash.0).collect()
        };
        assert_eq!(order(Sort::Rate, ""), [2, 3, 1, 4]);
        assert_eq!(order(Sort::Rate.next(), ""), [3, 2, 1, 4]);
        assert_eq!(order(Sort::Rate.next().next(), ""), [3, 1, 2, 4]);
        assert_eq!(Sort::Moves.next(), Sort::Rate);
        assert_eq!(order(Sort::Rate, "192.0.2.3:"), [3]);
        assert_eq!(order(Sort::Rate, "UDP/"), [2, 3, 1, 4]);
        assert_eq!(order(Sort::Rate, "application on cpu 3"), [2, 3, 1, 4]);
        assert_eq!(order(Sort::Rate, "tcp"), [0; 0]);
    }
}
