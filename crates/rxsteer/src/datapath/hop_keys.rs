// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keys for the kernel's flow hash: which packet has a hash that is free in the tables where it is looked up.
//!
//! The hash has a secret of this boot, so the kernel is asked: it hashes made-up packets.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

/// Ethernet, IPv4, UDP, and some bytes.
const PACKET: usize = 14 + 20 + 8 + 22;

/// Source and destination port (`HOP_PORT` in bpf/types.h).
const PORT: u16 = 7;

/// The number of a way's hashes: a power of two, with room for one from each CPU to each other.
pub(super) fn nr_hashes(nr_cpus: u32) -> u32 {
    (4 * nr_cpus * nr_cpus)
        .next_power_of_two()
        .clamp(1024, 1 << 18)
}

/// The factor of the kernel's `hash_32()`.
const GOLDEN_RATIO: u32 = 0x61c8_8647;

/// A key, and its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    /// Source and destination address, in network order.
    pub(super) address: u32,
    pub(super) hash: u32,
}

/// Keys with hashes that share no slot of a table with so many slots, a power of two, neither by their low
/// bits nor by `hash_32()`, which Linux 6.19 and later use for a queue's table.
pub(super) struct Keys<F> {
    hash_of: F,
    slots: u32,
    next: u32,
    low: BTreeSet<u32>,
    mixed: BTreeSet<u32>,
}

impl<F: Fn(&[u8]) -> Result<u32>> Keys<F> {
    /// `hash_of`: the kernel's hash of a packet. `first`: the first address that is tried, a random one. The
    /// kernel's table is the host's, and another rxsteer should not take the same hashes.
    pub(super) fn new(slots: u32, first: u32, hash_of: F) -> Self {
        Self {
            hash_of,
            slots,
            next: first,
            low: BTreeSet::new(),
            mixed: BTreeSet::new(),
        }
    }

    fn slots_of(&self, hash: u32) -> (u32, u32) {
        let shift = 32 - self.slots.trailing_zeros();
        (
            hash & (self.slots - 1),
            hash.wrapping_mul(GOLDEN_RATIO) >> shift,
        )
    }

    /// Another key.
    ///
    /// # Errors
    /// When the kernel can't be asked, or the table is full.
    pub(super) fn take(&mut self) -> Result<Key> {
        for _ in 0..64 * self.slots {
            let address = self.next.to_be();
            self.next = self.next.wrapping_add(1);
            let hash = (self.hash_of)(&packet(address))?;
            let (low, mixed) = self.slots_of(hash);
            if hash == 0 || self.low.contains(&low) || self.mixed.contains(&mixed) {
                continue;
            }
            self.low.insert(low);
            self.mixed.insert(mixed);
            return Ok(Key { address, hash });
        }
        bail!("no key has a hash of its own among {} slots", self.slots)
    }

    /// A key that was taken may be taken again.
    pub(super) fn give_back(&mut self, hash: u32) {
        let (low, mixed) = self.slots_of(hash);
        self.low.remove(&low);
        self.mixed.remove(&mixed);
    }
}

/// A packet that the dissector describes by this key (`dissector_answer()` in bpf/dissector.bpf.c).
fn packet(address: u32) -> [u8; PACKET] {
    let mut packet = [0; PACKET];
    packet[12] = 8; // ETH_P_IP
    packet[14] = 0x45;
    packet[17] = (PACKET - 14) as u8;
    packet[22] = 64;
    packet[23] = libc::IPPROTO_UDP as u8;
    packet[26..30].copy_from_slice(&address.to_ne_bytes());
    packet[30..34].copy_from_slice(&address.to_ne_bytes());
    packet[34..36].copy_from_slice(&PORT.to_be_bytes());
    packet[36..38].copy_from_slice(&PORT.to_be_bytes());
    packet[39] = (PACKET - 34) as u8;
    packet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_share_no_slot() {
        // Not the kernel's hash, but one with collisions.
        let hash_of = |packet: &[u8]| Ok(u32::from(packet[29]) % 128 * 77 + 1);
        let mut keys = Keys::new(64, u32::MAX - 7, hash_of);
        let mut taken = Vec::new();
        while let Ok(key) = keys.take() {
            taken.push(key.hash);
        }
        assert!(taken.len() > 16, "{}", taken.len());
        let low: BTreeSet<_> = taken.iter().map(|hash| hash % 64).collect();
        assert_eq!(low.len(), taken.len());
        keys.give_back(taken[0]);
        assert_eq!(keys.take().unwrap().hash % 64, taken[0] % 64);
    }
}
