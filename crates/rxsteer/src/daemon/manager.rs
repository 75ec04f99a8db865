// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a service manager is told (sd_notify(3)), if one has started this process.

use sd_notify::NotifyState;
use tracing::debug;

/// All devices are steered.
pub(super) fn ready() {
    tell(NotifyState::Ready);
}

/// Steering goes on. The manager ends a process that does not say so in time (`WatchdogSec=`).
pub(super) fn alive() {
    if sd_notify::watchdog_enabled().is_some() {
        tell(NotifyState::Watchdog);
    }
}

/// Flows return to INLINE.
pub(super) fn stopping() {
    tell(NotifyState::Stopping);
}

/// Steering does not depend on it.
fn tell(state: NotifyState<'_>) {
    if let Err(e) = sd_notify::notify(&[state]) {
        debug!("the service manager was not told: {e}");
    }
}
