// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frames that pass a device unsteered: in native mode those of queues or devices that its program does not
//! know, in softirq mode those with a hash.

use crate::host::device::RxMode;

/// Share of a device's frames between two looks, in percent, above which they are reported.
const LIMIT: u64 = 1;

/// Frames of a device, since attach.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Frames {
    pub(super) foreign: u64,
    /// Frames of the queues that are steered.
    pub(super) received: u64,
}

/// The frames of a device between the last two looks that saw some.
#[derive(Debug, Default)]
pub(super) struct Foreign {
    seen: Frames,
    foreign: u64,
    all: u64,
}

impl Foreign {
    /// Looks at the device's counters, once a second. Returns whether [`Self::is_reported`] has
    /// changed.
    pub(super) fn look(&mut self, now: Frames) -> bool {
        let before = std::mem::replace(&mut self.seen, now);
        let foreign = now.foreign.saturating_sub(before.foreign);
        let all = foreign + now.received.saturating_sub(before.received);
        if all == 0 {
            return false;
        }
        let reported = self.is_reported();
        (self.foreign, self.all) = (foreign, all);
        reported != self.is_reported()
    }

    /// Whether there were too many.
    pub(super) fn is_reported(&self) -> bool {
        self.foreign * 100 > self.all * LIMIT
    }

    /// The report, in a sentence with a remedy, if there were too many. `name`: of the device.
    pub(super) fn report(&self, name: &str, mode: RxMode) -> Option<String> {
        let why = match mode {
            RxMode::Native => format!(
                "a queue that rxsteer does not know received them, or another device below {name}; restart \
                 rxsteer, or steer that device"
            ),
            RxMode::Softirq => {
                "they came with a hash, of a sender on this host or of the card below a tunnel: \
                            for the latter `ethtool -K CARD rxhash off`"
                    .to_owned()
            }
        };
        self.is_reported().then(|| {
            format!(
                "{} of {} frames of {name} in a second were not steered: {why}",
                self.foreign, self.all
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that is looked at after so many further frames.
    #[derive(Default)]
    struct World {
        foreign: Foreign,
        frames: Frames,
    }

    impl World {
        /// Whether the report has changed, and whether there is one.
        fn look(&mut self, foreign: u64, received: u64) -> (bool, bool) {
            self.frames.foreign += foreign;
            self.frames.received += received;
            let changed = self.foreign.look(self.frames);
            (changed, self.foreign.is_reported())
        }
    }

    #[test]
    fn more_than_one_percent_is_reported_once() {
        let mut world = World::default();
        assert_eq!(world.look(0, 1_000), (false, false));
        assert_eq!(world.look(21, 2_000), (true, true));
        assert_eq!(world.look(500, 0), (false, true));
        // Without traffic nothing changes.
        assert_eq!(world.look(0, 0), (false, true));
        assert_eq!(world.look(0, 1), (true, false));
    }

    #[test]
    fn less_is_not_reported() {
        let mut world = World::default();
        // The control: 10 of 2,010, and 1 of 100.
        assert_eq!(world.look(10, 2_000), (false, false));
        assert_eq!(world.look(1, 99), (false, false));
        assert_eq!(world.look(2, 98), (true, true));
    }
}
