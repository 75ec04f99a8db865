// SPDX-License-Identifier: MIT OR Apache-2.0
//! When to look at what others change on the host.

use std::time::{Duration, Instant};

/// Time between two looks at what changes without an event.
const LOOK: Duration = Duration::from_secs(1);

/// Time between an event and the second look after it: others set up a device that has just come.
const SOON: Duration = Duration::from_millis(50);

/// See the module's documentation.
pub(super) struct Looks {
    next: Instant,
    /// One more look soon after the next one.
    again: bool,
}

impl Default for Looks {
    fn default() -> Self {
        Self {
            next: Instant::now() + LOOK,
            again: false,
        }
    }
}

impl Looks {
    /// Something has changed: a look is due now, and one soon after.
    pub(super) fn soon(&mut self) {
        self.next = Instant::now();
        self.again = true;
    }

    /// Time until the next look is due.
    pub(super) fn due(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Whether a look is due; if so, the caller looks now.
    pub(super) fn is_due(&mut self) -> bool {
        if self.due() > Duration::ZERO {
            return false;
        }
        let again = std::mem::take(&mut self.again);
        self.next = Instant::now() + if again { SOON } else { LOOK };
        true
    }
}
