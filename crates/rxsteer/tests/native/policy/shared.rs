// SPDX-License-Identifier: MIT OR Apache-2.0
//! Softirq mode: queues share the table of flows, and a queue is a CPU that receives.

use super::world::*;
use rxsteer::types::{rx_queue, rx_verdict};

/// The sender's CPU, saturated, and that of the application.
const SENDER: u32 = 0;
const APPLICATION: u32 = 3;

/// A flow in softirq mode; what came in other queues has been delivered.
fn world() -> World {
    let mut world = World::new(FOLLOW | ADAPT, 1);
    world.q.ifindex = 0;
    world.facts.softnet = 1;
    world.facts.poll_ended_elsewhere = 1;
    world.facts.entered_elsewhere = 1;
    world.application(0, APPLICATION);
    world
}

/// A flow of which a packet in eight comes on its application's CPU, in a queue without load.
/// `queue`: the number of that queue; the sender's is 0. Returns how
/// many of the last packets on the sender's CPU stayed there.
fn stay_on_the_senders_cpu(queue: u32) -> usize {
    let mut world = world();
    let mut relaxed = rx_queue {
        epoch: world.q.epoch,
        policy: world.q.policy,
        polls_delivered: u64::MAX,
        ..Default::default()
    };
    let mut stay = 0;
    for window in 0..20 {
        world.window(WHOLE, WHOLE);
        // The hops alone do not saturate the CPU.
        if window >= 4 {
            world.q.load.pressure = FULL;
            world.q.load.saturated = 0;
        }
        for packet in 0..64 {
            let verdict = world.frame(0);
            stay += usize::from(window >= 4 && verdict == rx_verdict::RX_PASS);
            if packet % 8 == 7 {
                std::mem::swap(&mut world.q, &mut relaxed);
                (world.polling, world.facts.queue) = (APPLICATION, queue);
                // It needs no hop.
                assert_eq!(world.frame(0), rx_verdict::RX_PASS);
                std::mem::swap(&mut world.q, &mut relaxed);
                (world.polling, world.facts.queue) = (SENDER, 0);
            }
        }
    }
    stay
}

#[test]
fn packets_on_the_applications_cpu_do_not_bring_the_flow_back() {
    assert_eq!(stay_on_the_senders_cpu(APPLICATION), 0);
    // The control: packets of the application's CPU decide too if theirs is the same queue.
    let stay = stay_on_the_senders_cpu(0);
    assert!(stay > 200, "{stay}");
}

#[test]
fn the_decision_goes_where_the_packets_come() {
    let mut world = world();
    for queue in [0, 1, 2] {
        (world.polling, world.facts.queue) = (queue, queue);
        // Queues number their windows apart.
        world.q.load.window = 1000 * (3 - queue);
        for _ in 0..3 {
            world.window(WHOLE, WHOLE);
            world.frame(0);
        }
        assert_eq!(world.frame(0), rx_verdict::RX_REDIRECTED, "queue {queue}");
        assert_eq!(u32::from(world.flows[0].decider), queue);
    }
}

/// The queue that decides after a packet on the CPU that the flow wanted beside its application, which
/// is on this CPU now.
fn decider_with(application: u32) -> u16 {
    let mut world = world();
    world.window(WHOLE, WHOLE);
    world.frame(0);
    let beside = 2;
    world.flows[0].wanted = beside;
    world.application(0, application);
    (world.polling, world.facts.queue) = (beside.into(), beside.into());
    world.frame(0);
    world.flows[0].decider
}

#[test]
fn a_flow_follows_its_application_from_the_cpu_beside_it() {
    assert_eq!(decider_with(APPLICATION + 1), 2);
    // The control: an application that has stayed.
    assert_eq!(decider_with(APPLICATION), 0);
}
