// SPDX-License-Identifier: MIT OR Apache-2.0
//! How many queues a device uses, of those that it has (`ethtool -l`).

use super::ethtool::Ethtool;

// linux/ethtool.h
const ETHTOOL_GCHANNELS: u32 = 0x3c;

/// Numbers of channels. A combined channel has a receive and a transmit queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Channels {
    pub max_rx: u32,
    pub max_combined: u32,
    pub rx: u32,
    pub combined: u32,
}

impl Channels {
    /// `None` if the driver doesn't tell.
    pub fn of(device: &Ethtool) -> Option<Self> {
        // struct ethtool_channels: cmd, max_rx, max_tx, max_other, max_combined, rx_count,
        // tx_count, other_count, combined_count
        let mut request = [ETHTOOL_GCHANNELS, 0, 0, 0, 0, 0, 0, 0, 0];
        device.call(&mut request).ok()?;
        let [_, max_rx, _, _, max_combined, rx, _, _, combined] = request;
        Some(Self {
            max_rx,
            max_combined,
            rx,
            combined,
        })
    }
}
