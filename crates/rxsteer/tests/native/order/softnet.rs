// SPDX-License-Identifier: MIT OR Apache-2.0
//! Softirq mode: a flow whose last packet was lost, flows that share a slot, and a CPU that goes offline.

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
        if verdict == rx_verdict::RX_REDIRECTED {
            self.enters();
        }
        verdict
    }

    /// A packet enters the softnet backlog of [`TARGET`], of this flow or another.
    fn enters(&mut self) {
        let tail = &mut self.facts.tails[TARGET as usize];
        *tail = tail.wrapping_add(1);
    }

    /// A packet of another flow goes there from this CPU.
    fn other(&mut self) {
        let mut flow = rps_dev_flow::default();
        std::mem::swap(&mut self.flow, &mut flow);
        self.packet(INLINE);
        assert_eq!(self.packet(TARGET as u16), rx_verdict::RX_REDIRECTED);
        self.flow = flow;
    }

    /// The kernel has passed up so many packets there.
    fn passes(&mut self, n: u32) {
        let head = &mut self.facts.heads[TARGET as usize];
        *head = head.wrapping_add(n);
    }

    /// Everything is passed up there, and the poll ends.
    fn pass_up(&mut self) {
        self.facts.heads = self.facts.tails;
        let b = &mut self.backlogs[TARGET as usize];
        b.dequeued = b.tail - b.nr_lost;
        self.facts.nr_polls += 1;
    }
}

/// The tail that is read for the next packet covers the flow's last one, and none that comes later.
#[test]
fn a_flow_leaves_when_its_last_packet_has_been_passed_up() {
    let start = |before: u32| {
        let mut path = Path::new(true);
        path.pass_up();
        // The kernel's counters wrap.
        path.facts.tails[TARGET as usize] = before;
        path.facts.heads[TARGET as usize] = before;
        path.packet(TARGET as u16);
        path.other();
        path.other();
        path
    };
    for before in [0, 7, u32::MAX, u32::MAX - 1] {
        let mut path = start(before);
        path.passes(1);
        assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS, "{before}");
        // The control.
        let mut path = start(before);
        assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED, "{before}");
    }
}

/// Without a later packet from this CPU, what others have put there meanwhile counts too.
#[test]
fn a_flow_alone_leaves_when_all_has_been_passed_up() {
    let start = || {
        let mut path = Path::new(true);
        path.enters();
        path
    };
    let mut path = start();
    path.passes(2);
    assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);
    let mut path = start();
    path.passes(1);
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);
}

/// A flow with packets on their way at all times, as TCP in bulk, returns where moving did not help: its packets are
/// dropped until those have been passed up.
#[test]
fn a_flow_that_never_pauses_returns_by_a_gap() {
    let start = || {
        let mut path = Path::new(true);
        path.queue.load.kept = 2;
        path
    };
    let mut path = start();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_DROP);
    path.pass_up();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);
    assert_eq!(path.backlogs[TARGET as usize].nr_shed, 1);
    // It has paused: what comes then may be sent again.
    let mut path = start();
    path.facts.jiffies += 2;
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);
    // Its slot is mixed: one packet enters when all polls have ended, and the slot knows that one.
    let mut path = start();
    path.facts.mixed_at = 1;
    assert_eq!(path.packet(INLINE), rx_verdict::RX_DROP);
    path.facts.polls_ended = 1;
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);
    assert_eq!(path.packet(INLINE), rx_verdict::RX_DROP);
    // A control: before a window is over.
    let mut path = start();
    path.queue.load.kept = 1;
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);
}

/// A way remembers a few tails: a later one covers the packet too.
#[test]
fn a_flow_leaves_after_many_packets_of_others() {
    let start = || {
        let mut path = Path::new(true);
        for _ in 0..20 {
            path.other();
        }
        path
    };
    let mut path = start();
    path.passes(20);
    assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);
    let mut path = start();
    path.passes(1);
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);
}

/// Without NAPI what is INLINE waits in the softnet backlog of the CPU that receives.
#[test]
fn a_flow_leaves_inline_when_its_softnet_backlog_has_passed_it_up() {
    let mut path = Path::new(true);
    path.pass_up();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);
    path.facts.tails[64] = 1;
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_PASS);
    path.facts.heads[64] = 1;
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_REDIRECTED);
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
    // The kernel counts as passed up what it takes to another CPU.
    path.pass_up();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_DROP);

    let mut path = down(Path::new(true));
    assert_eq!(path.packet(INLINE), rx_verdict::RX_DROP);
    path.backlogs[TARGET as usize].closed = backlog_closed::BACKLOG_PASSED.0.into();
    assert_eq!(path.packet(INLINE), rx_verdict::RX_PASS);

    // The control.
    let mut path = Path::new(true);
    assert_eq!(path.packet(INLINE), rx_verdict::RX_REDIRECTED);
}

/// The flow's packets wait where another CPU has sent them, and this CPU has no way there yet.
#[test]
fn without_a_way_of_its_own_a_cpu_overtakes_nothing() {
    let mut path = Path::new(true);
    path.facts.entries = 0;
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_DROP);
    path.pass_up();
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_PASS);
    // The control: with a way it enters.
    let mut path = Path::new(true);
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_REDIRECTED);
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
        path.facts.poll_ended_elsewhere = 1;
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
    // Without NAPI they may wait on the CPU that has received them.
    assert_eq!(path.packet(TARGET as u16), rx_verdict::RX_PASS);
    path.facts.inline_passed = 1;
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
