// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table by which a device spreads flows over its receive queues (`ethtool -x`).

use std::collections::BTreeSet;

use super::ethtool::Ethtool;

// linux/ethtool.h
const ETHTOOL_GRXFHINDIR: u32 = 0x38;

/// The receive queues in the indirection table; `None` if the device has none.
pub fn queues(device: &Ethtool) -> Option<BTreeSet<u32>> {
    // struct ethtool_rxfh_indir: cmd, size, ring_index[size]. With size 0 the kernel tells the size.
    let mut request = vec![ETHTOOL_GRXFHINDIR, 0];
    device.call(&mut request).ok()?;
    let size = request[1];
    if size == 0 {
        return None;
    }
    let mut table = vec![0; 2 + size as usize];
    table[..2].copy_from_slice(&[ETHTOOL_GRXFHINDIR, size]);
    device.call(&mut table).ok()?;
    Some(table[2..].iter().copied().collect())
}
