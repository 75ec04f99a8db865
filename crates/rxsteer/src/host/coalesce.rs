// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a device delays its receive interrupts (`ethtool -c`).

use super::ethtool::Ethtool;

// linux/ethtool.h
const ETHTOOL_GCOALESCE: u32 = 0x0e;
/// Words of `struct ethtool_coalesce`: cmd, rx_coalesce_usecs, …, use_adaptive_rx_coalesce as the
/// eleventh, and others.
const COALESCE: usize = 23;
const RX_USECS: usize = 1;
const ADAPTIVE_RX: usize = 10;

/// The longest delay from a packet to its interrupt, us; `None` if the driver doesn't tell, or chooses
/// it by itself (adaptive-rx).
pub fn rx_usecs(device: &Ethtool) -> Option<u32> {
    let mut request = [0; COALESCE];
    request[0] = ETHTOOL_GCOALESCE;
    device.call(&mut request).ok()?;
    (request[ADAPTIVE_RX] == 0).then_some(request[RX_USECS])
}
