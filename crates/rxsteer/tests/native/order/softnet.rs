// SPDX-License-Identifier: MIT OR Apache-2.0
//! Skb mode: a flow whose last packet was lost, flows that share a slot, and a CPU that goes offline.

use rxsteer::datapath::native;
use rxsteer::types::{
    backlog, backlog_closed, rps_dev_flow, rps_map, rx_facts, rx_queue, rx_verdict,
};

use crate::sim::shape::INLINE;

const POLLING: u32 = 0;
const TARGET: u32 = 1;

struct Path {
    facts: rx_facts,
    queue: rx_queue,
    backlogs: [backlog; 2],
    flow: rps_dev_flow,
}

impl Path {
    /// A flow whose last packet is in the backlog for [`TARGET`].
    fn new(softnet: bool) -> Self {
        let mut path = Self {
            facts: rx_facts {
                entries: 1 << TARGET,
                limit: 64,
                nr_cpus: 2,
                cpu_mask: 3,
                gro_empty: 1,
                softnet: softnet.into(),
                ..Default::default()
            },
            queue: rx_queue {
                epoch: 1,
                ..Default::default()
            },
            backlogs: Default::default(),
            flow: rps_dev_flow::default(),
        };
        path.packet(INLINE);
        assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_REDIRECTED);
        path
    }

    /// A packet, in a poll of its own.
    fn packet(&mut self, wanted: u16) -> rx_verdict {
        let map = rps_map {
            location: [wanted; _],
        };
        let verdict = native::rx_steer(
            &mut self.facts,
            &mut self.queue,
            &mut self.backlogs,
            &map,
            &mut self.flow,
            7,
            POLLING,
        );
        self.facts.nr_polls += 1;
        verdict
    }

    fn lose(&mut self) {
        self.backlogs[TARGET as usize].nr_lost += 1;
    }

    /// All that has entered and was not lost is passed up, and the poll ends.
    fn pass_up(&mut self) {
        let b = &mut self.backlogs[TARGET as usize];
        let n = b.tail - b.nr_lost - b.dequeued;
        b.passed_in = native::poll_stamp(TARGET as u16, self.facts.nr_polls);
        native::backlog_dequeue(b, n as u32, true, 0);
        self.facts.nr_polls += 1;
    }
}

/// Earlier packets may have come in another queue, and wait in the same ring.
#[test]
fn a_flow_stays_where_its_last_packet_was_lost() {
    let mut path = Path::new(true);
    path.lose();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);
    path.pass_up();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);

    // The control: in a ring of its own nothing waits.
    let mut path = Path::new(false);
    path.lose();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);
}

/// Otherwise nothing would ever prove that its earlier packets have been delivered.
#[test]
fn its_next_packet_is_not_shed() {
    let mut path = Path::new(true);
    path.lose();
    path.flow.shed = 1;
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);

    // The control: a packet that waits proves it later.
    let mut path = Path::new(true);
    path.flow.shed = 1;
    assert_eq!(path.packet(INLINE), rx_verdict::RX_DROP);
}

/// The kernel would leave them where they come, ahead of those that wait on the other CPU.
#[test]
fn packets_for_a_cpu_that_goes_offline_are_dropped() {
    let down = |mut path: Path| {
        path.backlogs[TARGET as usize].closed = backlog_closed::BACKLOG_DOWN.0.into();
        path
    };
    let mut path = down(Path::new(true));
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_DROP);
    assert_eq!(path.packet_elsewhere(INLINE), rx_verdict::RX_DROP);
    assert_eq!(path.backlogs[TARGET as usize].nr_shed, 2);
    path.pass_up();
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_PASS);

    // Where no packet may be dropped otherwise.
    let mut path = down(Path::new(true));
    path.lose();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_DROP);
    path.backlogs[TARGET as usize].closed = backlog_closed::BACKLOG_PASSED.0.into();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);

    // The control.
    let mut path = Path::new(true);
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);
}

impl Path {
    /// A packet that comes in another queue, in a poll of its own.
    fn packet_elsewhere(&mut self, wanted: u16) -> rx_verdict {
        self.facts.queue ^= 1;
        let verdict = self.packet(wanted);
        self.facts.queue ^= 1;
        verdict
    }

    /// A slot whose flow is INLINE, or at [`TARGET`], with packets from two queues; those before
    /// the last one have been delivered, or entered the backlog, if `entered`.
    fn mixed(inline: bool, entered: bool) -> Self {
        let mut path = Self::new(true);
        path.pass_up();
        if inline {
            assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);
        }
        path.facts.entered_elsewhere = entered.into();
        path.facts.delivered_elsewhere = 1;
        path.facts.mixing = 1;
        let stays = if inline { INLINE } else { TARGET as u16 };
        path.packet_elsewhere(stays);
        path.packet(stays);
        path
    }
}

/// The slot knows the last packet alone. The control: without doubt of the others that is enough.
#[test]
fn a_mixed_slot_stays_inline_until_polls_have_ended() {
    let mut path = Path::mixed(true, false);
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_PASS);
    path.facts.polls_ended = 1;
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_REDIRECTED);

    let mut path = Path::mixed(true, true);
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_REDIRECTED);
}

/// The packet that finds the polls ended is the first that is behind all others in the backlog.
#[test]
fn a_mixed_slot_stays_at_its_cpu_for_one_packet_more() {
    let mut path = Path::mixed(false, false);
    path.pass_up();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);
    path.pass_up();
    path.facts.polls_ended = 1;
    // One that does not enter proves nothing.
    let limit = std::mem::replace(&mut path.facts.limit, 0);
    path.backlogs[TARGET as usize].tail_limit = 0;
    assert_eq!(path.packet(INLINE), rx_verdict::RX_DROP);
    path.facts.limit = limit;
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);
    path.pass_up();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);

    let mut path = Path::mixed(false, true);
    path.pass_up();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);
}

/// It would wait for a packet of the other queue, which may not come.
#[test]
fn a_flow_that_came_elsewhere_is_not_shed() {
    let mut path = Path::new(true);
    path.facts.entered_elsewhere = 1;
    path.flow.shed = 1;
    assert_eq!(path.packet_elsewhere(INLINE), rx_verdict::RX_REDIRECTED);

    // The control: in the same queue.
    let mut path = Path::new(true);
    path.flow.shed = 1;
    assert_eq!(path.packet(INLINE), rx_verdict::RX_DROP);
}
