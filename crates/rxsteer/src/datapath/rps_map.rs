// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rps_map`: a queue's indirection table from hash to location.

use crate::types::{rps_location, rps_map};

/// Slots in a map (`RPS_MAP_SLOTS`).
pub const SLOTS: usize = size_of::<rps_map>() / size_of::<u16>();

/// Locations that are no CPU (`enum rps_location` in bpf/types.h).
pub const INLINE: u16 = rps_location::RPS_INLINE.0 as u16;
/// As [`INLINE`], and frames of flows that can't move there yet are dropped.
pub const INLINE_SHED: u16 = rps_location::RPS_INLINE_SHED.0 as u16;
/// See [`INLINE`].
pub const NO_CPU: u16 = rps_location::RPS_NO_CPU.0 as u16;

/// The slot of a hash (`bpf/core/tables.h`, `rps_location_of`).
pub fn slot_of(hash: u32) -> usize {
    (hash >> (u32::BITS - SLOTS.ilog2())) as usize
}

/// See the module's documentation.
#[derive(Clone, Copy)]
pub struct RpsMap(rps_map);

impl RpsMap {
    /// Every flow stays in the NAPI poll that received it.
    pub fn inline() -> Self {
        Self::all(INLINE)
    }

    /// Every flow has this location.
    pub fn all(location: u16) -> Self {
        Self(rps_map {
            location: [location; SLOTS],
        })
    }

    /// The map of the kernel side.
    pub fn from_raw(map: rps_map) -> Self {
        Self(map)
    }

    /// The map for the kernel side.
    pub fn raw(&self) -> &rps_map {
        &self.0
    }

    /// The map spread over `cpus`, with as few changed slots as an even spread allows: each CPU
    /// gets the same number of slots, or one more. Without a CPU, [`Self::inline`].
    #[must_use]
    pub fn spread_over(&self, cpus: &[u32]) -> Self {
        let cpus: Vec<u16> = cpus.iter().filter_map(|&c| u16::try_from(c).ok()).collect();
        if cpus.is_empty() {
            return Self::inline();
        }
        let share = SLOTS / cpus.len();
        let mut spare = SLOTS % cpus.len();
        let mut taken = vec![0; cpus.len()];
        let mut take = |i: usize| {
            if taken[i] == share + 1 || (taken[i] == share && spare == 0) {
                return false;
            }
            spare -= usize::from(taken[i] == share);
            taken[i] += 1;
            true
        };

        let mut map = *self;
        let owner = |location: u16| cpus.iter().position(|&c| c == location);
        let without_cpu: Vec<usize> = (0..SLOTS)
            .filter(|&slot| !owner(self.0.location[slot]).is_some_and(&mut take))
            .collect();
        // In turn, so that neighbouring slots are at different CPUs.
        let mut next = 0;
        for slot in without_cpu {
            while !take(next) {
                next = (next + 1) % cpus.len();
            }
            map.0.location[slot] = cpus[next];
            next = (next + 1) % cpus.len();
        }
        map
    }

    /// Number of slots by CPU, without INLINE slots.
    pub fn slots_per_cpu(&self) -> std::collections::BTreeMap<u32, usize> {
        let mut slots = std::collections::BTreeMap::new();
        let special = INLINE_SHED;
        for &l in self.0.location.iter().filter(|&&l| l < special) {
            *slots.entry(u32::from(l)).or_default() += 1;
        }
        slots
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn changed(a: &RpsMap, b: &RpsMap) -> usize {
        a.0.location
            .iter()
            .zip(&b.0.location)
            .filter(|(a, b)| a != b)
            .count()
    }

    proptest! {
        #[test]
        fn every_cpu_of_the_mask_gets_its_share_and_no_other_any(
            first in proptest::collection::btree_set(0u32..256, 1..65),
            second in proptest::collection::btree_set(0u32..256, 1..65),
        ) {
            let mut map = RpsMap::inline();
            for cpus in [&first, &second] {
                let list: Vec<u32> = cpus.iter().copied().collect();
                map = map.spread_over(&list);
                let slots = map.slots_per_cpu();
                prop_assert_eq!(slots.keys().copied().collect::<Vec<_>>(), list);
                prop_assert_eq!(slots.values().sum::<usize>(), SLOTS);
                let (min, max) = (slots.values().min().unwrap(), slots.values().max().unwrap());
                prop_assert!(max - min <= 1, "{slots:?}");
            }
        }

        #[test]
        fn a_change_moves_no_more_slots_than_it_must(
            cpus in proptest::collection::btree_set(0u32..64, 2..33),
        ) {
            let all: Vec<u32> = cpus.iter().copied().collect();
            let fewer = &all[1..];
            let wide = RpsMap::inline().spread_over(&all);
            prop_assert_eq!(changed(&wide, &wide.spread_over(&all)), 0);
            let narrow = wide.spread_over(fewer);
            // Exactly the slots of the CPU that left.
            prop_assert_eq!(changed(&wide, &narrow), wide.slots_per_cpu()[&all[0]]);
            // Back again: the slots of the returning CPU, and at most one more for an even spread.
            let back = narrow.spread_over(&all);
            prop_assert!(changed(&narrow, &back) <= SLOTS / all.len() + 1);
        }
    }

    #[test]
    fn no_cpu_means_inline() {
        let map = RpsMap::inline().spread_over(&[1]).spread_over(&[]);
        assert_eq!(map.slots_per_cpu().len(), 0);
        assert_eq!(changed(&map, &RpsMap::inline()), 0);
    }
}
