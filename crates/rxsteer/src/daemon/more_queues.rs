// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices that have more receive queues than when steering started: by `ethtool -L`, or because
//! the driver adds queues while an XDP program is attached, as virtio_net does. The tables can't
//! grow, so steering starts anew.

use super::plan::Steered;
use crate::host::device::{Device, RxMode};

/// The queues of a device now.
pub(super) enum Queues {
    /// All of them are steered.
    Steered,
    /// They are this number, and a new start can steer all of them.
    More(u32),
    /// More than are steered, and a new start would fail: why, in a sentence with a remedy.
    Obstructed(String),
}

/// Looks at a device. A new start is one of `all` steered devices.
pub(super) fn look(steered: &Steered, all: &[&Steered]) -> Queues {
    let Device {
        name, rx_queues, ..
    } = &steered.device;
    // A device that is gone has none.
    let now = steered.device.rx_queues_now().unwrap_or(0);
    // In softirq mode CPUs are the queues.
    if now <= *rx_queues || steered.mode == RxMode::Softirq {
        return Queues::Steered;
    }
    match all.iter().try_for_each(|steered| steered.unobstructed()) {
        Ok(()) => Queues::More(now),
        Err(e) => Queues::Obstructed(format!(
            "{name} has {now} receive queues, of which {rx_queues} are steered: {e:#}"
        )),
    }
}
