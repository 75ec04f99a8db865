// SPDX-License-Identifier: MIT OR Apache-2.0
//! Flows that share a slot: one has its name and counters, which change hands once a tick at most.

use super::world::*;
use rxsteer::datapath::native;
use rxsteer::types::rps_dev_flow;

const TICKS: u32 = 20;
const PACKETS: u32 = 500;

/// A slot for both flows of a world.
struct Slot {
    world: World,
    flow: rps_dev_flow,
    /// Backlogs are emptied after each packet.
    served: bool,
}

impl Slot {
    fn new(policy: u16) -> Self {
        Self {
            world: World::new(policy, 2),
            flow: rps_dev_flow::default(),
            served: true,
        }
    }

    fn packet(&mut self, flow: usize) {
        let w = &mut self.world;
        w.facts.nr_polls += 1;
        w.facts.sock_flow = w.applications[flow];
        let hash = World::hash(flow);
        native::rx_steer(
            &mut w.facts,
            &mut w.q,
            &mut w.backlogs,
            &w.map,
            &mut self.flow,
            hash,
            w.polling,
        );
        if self.served {
            w.serve();
        }
    }

    /// Packets of the flow that has the slot.
    fn counted(&self) -> u32 {
        self.flow.nr_packets + self.flow.nr_dropped
    }
}

/// Both flows alternate, and begin in turns; their applications are on another CPU, or one is. Unless
/// its backlog is served, it drops nearly all packets.
fn alternate(policy: u16, served: bool) -> Slot {
    let mut slot = Slot::new(policy);
    slot.served = served;
    for flow in usize::from(served)..2 {
        slot.world.application(flow, 3);
    }
    let (mut owner, mut own) = (2, 0);
    for tick in 0..TICKS {
        slot.world.facts.jiffies = tick + 1;
        let first = (tick / 2 % 2) as usize;
        let before = slot.world.facts.nr_flows_new;
        for packet in 0..PACKETS {
            let flow = (first + packet as usize) % 2;
            slot.packet(flow);
            let now = usize::from(slot.flow.hash == World::hash(1));
            if now != owner {
                assert_eq!(now, flow);
                (owner, own) = (now, 0);
            }
            own += u32::from(flow == owner);
            assert_eq!(slot.counted(), own, "tick {tick}, packet {packet}");
            // The load of the slot is that of both.
            let load = slot.counted().wrapping_sub(slot.flow.frames);
            assert_eq!(load, tick * PACKETS + packet + 1);
        }
        assert!(slot.world.facts.nr_flows_new - before <= 1, "tick {tick}");
        // The control: who is first in a tick gets the slot.
        assert!(owner == first || !served, "tick {tick}");
    }
    slot
}

#[test]
fn flows_that_alternate_change_the_slots_name_once_a_tick() {
    for (policy, served) in [(FOLLOW, true), (FOLLOW, false), (ADAPT | FOLLOW, true)] {
        let slot = alternate(policy, served);
        let changes = slot.world.facts.nr_flows_new;
        assert!(changes == TICKS / 2 || !served, "{changes}");
        assert_eq!(slot.flow.nr_dropped > 0, !served);
    }
}

/// Without a window the load counts from the beginning; with windows, all packets of each.
#[test]
fn the_load_of_a_window_is_that_of_all_flows() {
    let mut slot = Slot::new(ADAPT | FOLLOW);
    for window in 1..4 {
        slot.world.window(WHOLE, WHOLE);
        slot.world.facts.jiffies += 1;
        slot.packet(0);
        if window > 1 {
            assert_eq!(slot.flow.load, PACKETS);
        }
        for packet in 1..PACKETS {
            slot.packet(packet as usize % 2);
        }
    }
    // The control: a flow alone.
    let mut alone = Slot::new(ADAPT | FOLLOW);
    for _ in 1..4 {
        alone.world.window(WHOLE, WHOLE);
        alone.world.facts.jiffies += 1;
        for _ in 0..PACKETS {
            alone.packet(0);
        }
    }
    assert_eq!(alone.flow.load, slot.flow.load);
    assert_eq!(alone.counted(), 3 * PACKETS);
    assert_eq!(slot.counted(), 3 * PACKETS / 2);
}
