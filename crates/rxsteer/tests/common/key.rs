// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keys of flows, of any skeleton.

use rxsteer::types::flow_key;

/// What a socket knows of a key from any skeleton.
pub fn words(key: &flow_key) -> [u32; 10] {
    let mut words = [0; 10];
    words[..4].copy_from_slice(&key.saddr);
    words[4..8].copy_from_slice(&key.daddr);
    words[8] = key.ports;
    words[9] = key.proto;
    words
}
