// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lookup by hash in the tables of core/tables.h.

use proptest::prelude::*;
use rxsteer::datapath::native;
use rxsteer::datapath::rps_map::{INLINE, NO_CPU, SLOTS};
use rxsteer::datapath::tables::cpu_mask;
use rxsteer::types::rps_map;

/// A number of CPUs, and one of these CPUs.
fn cpus() -> impl Strategy<Value = (u32, u32)> {
    prop_oneof![1u32..10, 1u32..8192].prop_flat_map(|nr_cpus| (Just(nr_cpus), 0..nr_cpus))
}

/// The bits of an entry that hold no hash: the CPU, and the mark of unconnected sockets.
fn not_hash(mask: u32) -> u32 {
    mask | native::sock_flow_peer(mask)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn an_entry_gives_back_its_cpu((nr_cpus, cpu) in cpus(), hash: u32) {
        let mask = cpu_mask(nr_cpus);
        let cpu = cpu as u16;
        let entry = native::sock_flow_entry(hash, cpu, mask);
        prop_assert_eq!(native::sock_flow_location(entry, hash, mask), cpu);
    }

    /// The entry of a polling application is INLINE, with any number of CPUs.
    #[test]
    fn the_entry_of_a_polling_application_is_inline((nr_cpus, _) in cpus(), hash: u32) {
        let mask = cpu_mask(nr_cpus);
        let entry = native::sock_flow_entry(hash, INLINE, mask);
        prop_assert_eq!(native::sock_flow_location(entry, hash, mask), INLINE);
    }

    #[test]
    fn the_entry_of_a_closed_socket_is_no_cpu((nr_cpus, _) in cpus(), hash: u32) {
        let mask = cpu_mask(nr_cpus);
        let entry = native::sock_flow_entry(hash, NO_CPU, mask);
        prop_assert_eq!(entry, hash & !not_hash(mask));
        prop_assert!(!native::sock_flow_is_connected(entry, mask));
        prop_assert_eq!(native::sock_flow_location(entry, hash, mask), NO_CPU);
    }

    /// A hash that differs in the bits stored in an entry finds no CPU, not a wrong one.
    #[test]
    fn another_flows_entry_is_no_cpu((nr_cpus, cpu) in cpus(), hash: u32, other: u32) {
        let mask = cpu_mask(nr_cpus);
        let cpu = cpu as u16;
        let entry = native::sock_flow_entry(hash, cpu, mask);
        let expected = if (hash ^ other) & !not_hash(mask) == 0 { cpu } else { NO_CPU };
        prop_assert_eq!(native::sock_flow_location(entry, other, mask), expected);
    }

    /// The mark of a flow of an unconnected socket is all that distinguishes its entry.
    #[test]
    fn entries_of_unconnected_sockets_are_marked((nr_cpus, cpu) in cpus(), hash: u32, polls: bool) {
        let mask = cpu_mask(nr_cpus);
        let location = if polls { INLINE } else { cpu as u16 };
        let connected = native::sock_flow_entry(hash, location, mask);
        let marked = connected | native::sock_flow_peer(mask);
        prop_assert_ne!(connected, marked);
        prop_assert_eq!(native::sock_flow_location(marked, hash, mask), location);
        prop_assert!(native::sock_flow_is_connected(connected, mask));
        prop_assert!(!native::sock_flow_is_connected(marked, mask));
        prop_assert!(!native::sock_flow_is_connected(0, mask));
    }

    #[test]
    fn an_empty_entry_is_no_cpu((nr_cpus, _) in cpus(), hash: u32) {
        prop_assert_eq!(native::sock_flow_location(0, hash, cpu_mask(nr_cpus)), NO_CPU);
    }

    /// Holds for any content of an entry: torn, stale, or of a kernel with more CPUs.
    #[test]
    fn an_entry_never_names_more_than_the_mask_can((nr_cpus, _) in cpus(), entry: u32, hash: u32) {
        let location = native::sock_flow_location(entry, hash, cpu_mask(nr_cpus));
        let names = [NO_CPU, INLINE].contains(&location);
        prop_assert!(names || u32::from(location) + 1 < cpu_mask(nr_cpus));
    }

    /// Each queue has its own slots, and uses all of them.
    #[test]
    fn slots_are_within_their_queue(queue in 0u32..64, order in 0u32..20, hash: u32) {
        let cnt = 1u32 << order;
        let slot = native::flow_slot(queue, hash, 32 - order);
        prop_assert_eq!(slot / cnt, queue);
        let (first, last) = (queue * cnt, queue * cnt + cnt - 1);
        prop_assert_eq!(native::flow_slot(queue, 0, 32 - order), first);
        prop_assert_eq!(native::flow_slot(queue, u32::MAX, 32 - order), last);
    }

    /// Flows that share a slot have the same RPS location: the table has as many slots as the map.
    #[test]
    fn flows_of_one_slot_share_their_rps_location(
        order in 10u32..20, hash: u32, low: u32, at in 0..SLOTS,
    ) {
        let shift = 32 - order;
        let other = (hash >> shift << shift) | (low >> order);
        prop_assert_eq!(native::flow_slot(0, hash, shift), native::flow_slot(0, other, shift));
        let mut map = rps_map { location: [0; SLOTS] };
        map.location[at] = 7;
        map.location[(hash >> 22) as usize] = 9;
        prop_assert_eq!(native::rps_location_of(&map, hash), 9);
        prop_assert_eq!(native::rps_location_of(&map, other), 9);
    }

    #[test]
    fn polls_have_names_of_their_own(
        a in any::<u16>(), b in any::<u16>(), m in 0u64..1 << 48, n in 0u64..1 << 48,
    ) {
        let (a, b) = (a & 0x3fff, b & 0x3fff);
        prop_assert_eq!(native::poll_stamp(a, m) == native::poll_stamp(b, n), a == b && m == n);
        prop_assert_ne!(native::poll_stamp(a, m), native::poll_stamp(a, m + 1));
        prop_assert_ne!(native::poll_stamp(a, m), 0);
    }
}
