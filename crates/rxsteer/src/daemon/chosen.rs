// SPDX-License-Identifier: MIT OR Apache-2.0
//! The mode that was chosen for a device by its traffic (choice.rs), across starts anew.

use std::time::{Duration, Instant};

use crate::host::device::RxMode;

/// Time between two changes, at first; it doubles with each one. Drivers may restart their queues,
/// and some their link, when XDP comes or goes.
const APART: Duration = Duration::from_secs(30);
const APART_MAX: Duration = Duration::from_secs(3600);

/// The mode that was chosen for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// One of the modes between which traffic decides: not generic.
    pub(super) mode: RxMode,
    /// No other choice before.
    pub(super) after: Instant,
    /// The time from this choice to the next one.
    apart: Duration,
}

impl Chosen {
    /// The choice of another mode, after `before`.
    pub(super) fn next(mode: RxMode, before: Option<Self>, now: Instant) -> Self {
        let apart = before.map_or(APART, |before| (before.apart * 2).min(APART_MAX));
        Self {
            mode,
            after: now + apart,
            apart,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_become_rarer() {
        let now = Instant::now();
        let mut chosen = Chosen::next(RxMode::Skb, None, now);
        assert_eq!(chosen.after, now + APART);
        for _ in 0..20 {
            let next = Chosen::next(RxMode::Native, Some(chosen), now);
            assert!(next.apart == chosen.apart * 2 || next.apart == APART_MAX);
            chosen = next;
        }
        assert_eq!(chosen.apart, APART_MAX);
    }
}
