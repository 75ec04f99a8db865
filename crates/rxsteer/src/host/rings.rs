// SPDX-License-Identifier: MIT OR Apache-2.0
//! The size of a device's receive rings (`ethtool -g`).

use super::ethtool::Ethtool;

// linux/ethtool.h
const ETHTOOL_GRINGPARAM: u32 = 0x10;

/// Descriptors of each receive ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxRings {
    pub max: u32,
    pub now: u32,
}

impl RxRings {
    /// `None` if the driver doesn't tell.
    pub fn of(device: &Ethtool) -> Option<Self> {
        // struct ethtool_ringparam: cmd, rx_max_pending, rx_mini_max_pending,
        // rx_jumbo_max_pending, tx_max_pending, rx_pending, rx_mini_pending, rx_jumbo_pending,
        // tx_pending
        let mut request = [ETHTOOL_GRINGPARAM, 0, 0, 0, 0, 0, 0, 0, 0];
        device.call(&mut request).ok()?;
        let [_, max, _, _, _, now, ..] = request;
        Some(Self { max, now })
    }
}
