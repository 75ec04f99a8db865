// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every flow leaves its location eventually.

use super::mix::*;
use crate::cases::{config, fixed};
use crate::sim::gro::Kind;
use crate::sim::path::Path;
use crate::sim::shape::{End, Event, Fault, Kernel, Shape};
use proptest::prelude::*;

/// Rounds within which a flow reaches its wanted location if every component runs in each round.
/// The first one finishes earlier work. In the second the flow leaves its backlog, for INLINE if
/// the wanted backlog has no entry yet. In the third its frame finds INLINE's GRO in use by other
/// flows and requests a check; the first frame of the fourth finds it empty. One more round if the
/// NAPI is unknown.
const ROUNDS: usize = 5;

/// The final targets of flows, interrupts and policy.
#[derive(Clone, Debug)]
struct Wants {
    interrupt: u32,
    follow: bool,
    applications: Vec<u32>,
    map: Vec<u32>,
    /// the flows' frames in each poll
    frames: Vec<usize>,
}

fn wants() -> impl Strategy<Value = Wants> {
    let flows = (0..HASHES.len()).collect::<Vec<_>>();
    let more = proptest::collection::vec(0..HASHES.len(), 0..8);
    (
        0u32..4,
        any::<bool>(),
        proptest::collection::vec(0u32..4, HASHES.len()),
        proptest::collection::vec(0u32..5, 4),
        (Just(flows).prop_shuffle(), more).prop_map(|(flows, more)| [flows, more].concat()),
    )
        .prop_map(|(interrupt, follow, applications, map, frames)| Wants {
            interrupt,
            follow,
            applications,
            map,
            frames,
        })
}

/// Whether flows reach their wanted location within [`ROUNDS`], and stay there.
fn settle(shape: &Shape, mix: Mix, events: &[u32], wants: &Wants) -> Result<(), String> {
    // Room for a round's frames: a flow dropped by a full backlog has not moved.
    let shape = &Shape {
        limit: 40,
        flow_limit: 0,
        ..shape.clone()
    };
    let mut path = run(shape, mix, events)?;

    // Finish what has begun.
    path.apply(Event::EndPoll(End::Complete));
    for cpu in 0..shape.nr_cpus {
        path.apply(Event::PollTraced(cpu));
        path.apply(Event::Online(cpu, true));
    }
    rest(&mut path, shape);
    // The second check follows the account of the frames that vanished.
    path.apply(Event::Check);
    path.apply(Event::Check);
    if path.returning() {
        return Err("not all flows returned INLINE".into());
    }

    path.apply(Event::Interrupt(wants.interrupt % shape.nr_cpus));
    path.apply(Event::Policy(if wants.follow { FOLLOW } else { 0 }));
    for (flow, cpu) in wants.applications.iter().enumerate() {
        path.apply(Event::Application(flow, application(*cpu, shape.nr_cpus)));
    }
    for (slot, &cpu) in (0..4).zip(&wants.map) {
        let location = if cpu == 4 {
            INLINE
        } else {
            (cpu % shape.nr_cpus) as u16
        };
        path.apply(Event::Map(slot * 256, slot * 256 + 255, location));
    }
    for _ in 0..ROUNDS {
        round(&mut path, shape, &wants.frames);
    }

    // Flows in one slot share its location. If they want different ones, only their order is
    // guaranteed: each frame may move the slot.
    let wanted: Vec<u16> = (0..HASHES.len()).map(|flow| path.wanted(flow)).collect();
    let alone = |&flow: &usize| {
        (0..HASHES.len()).all(|f| path.slot(f) != path.slot(flow) || wanted[f] == wanted[flow])
    };
    let alone: Vec<usize> = (0..HASHES.len()).filter(alone).collect();
    let moves = path.q.nr_moves;
    for _ in 0..10 {
        for &flow in &alone {
            if path.location(flow) != wanted[flow] {
                return Err(format!("flow {flow} is at {}", path.location(flow)));
            }
        }
        round(&mut path, shape, &wants.frames);
    }
    if alone.len() == HASHES.len() && path.q.nr_moves != moves {
        return Err(format!("{} moves too many", path.q.nr_moves - moves));
    }
    path.balance()
}

proptest! {
    #![proptest_config(config(2500))]

    #[test]
    fn flows_get_where_they_want_to_be_and_stay(
        shape in shapes(),
        mix in mixes(),
        events in events(300),
        wants in wants(),
    ) {
        prop_assert_eq!(settle(&shape, mix, &events, &wants).err(), None);
    }
}

/// All frames of a backlog may be lost before the thread, still unknown then, dequeues any.
#[test]
fn a_flow_leaves_a_backlog_that_lost_all_its_frames() {
    let shape = busy(Kernel::ALL[2], 40);
    let mut path = Path::new(shape.clone());
    path.apply(Event::Map(0, 0, 1));
    for _ in 0..4 {
        path.apply(Event::Lose(1));
        round(&mut path, &shape, &[MOVER]);
    }
    let b = path.backlogs[1];
    assert_eq!((path.location(MOVER), b.kthread, b.tail), (1, 0, b.nr_lost));
    assert!(b.nr_lost > 0);
    path.apply(Event::Map(0, 0, 2));
    round(&mut path, &shape, &[MOVER]);
    assert_ne!(path.location(MOVER), 1);
    path.apply(Event::Return);
    path.apply(Event::Check);
    assert!(!path.returning());
}

/// The control: without its proof of delivery a flow stays.
#[test]
fn without_its_proofs_a_flow_never_moves() {
    for fault in [Fault::Sleepless, Fault::NapiGroHolds, Fault::Unsettled] {
        let mut cases = fixed((shapes(), mixes(), events(300), wants())).take(100);
        let stuck = cases.any(|(mut shape, mix, events, wants)| {
            shape.fault = Some(fault);
            settle(&shape, mix, &events, &wants).is_err()
        });
        assert!(stuck, "{fault:?}");
    }
}

/// The flow that is to leave. OTHERS stay.
const MOVER: usize = 0;

const OTHERS: [usize; 4] = [4, 5, 6, 7];

/// Limit of frames in the backlog.
const LIMIT: u32 = 100;

/// One poll: other flows keep `standing` frames queued for CPU 1, or as many as fit. The mover sends
/// the first frame, with room left, and the last one.
fn send(path: &mut Path, standing: usize, mover: [bool; 2]) {
    if mover[0] {
        path.apply(Event::Frame(MOVER, Kind::Merge));
    }
    // GRO always holds a packet of this jiffy.
    let kinds = [Kind::Push, Kind::Merge].into_iter().cycle();
    let others = kinds.flat_map(|kind| OTHERS.map(|flow| Event::Frame(flow, kind)));
    for frame in others.take(standing) {
        if path.waiting(1) >= standing {
            break;
        }
        path.apply(frame);
    }
    if mover[1] {
        path.apply(Event::Frame(MOVER, Kind::Merge));
    }
    path.apply(Event::EndPoll(End::Complete));
    path.apply(Event::PollTraced(0));
}

/// One batch of CPU 1's thread, unless it sleeps.
fn batch(path: &mut Path) {
    let dequeued = path.backlogs[1].dequeued;
    while path.backlogs[1].dequeued == dequeued && !path.thread(1).unwrap().asleep() {
        path.apply(Event::Thread(1, 1));
    }
}

/// One poll, and one batch of CPU 1's thread, which never runs empty.
fn busy_round(path: &mut Path, standing: usize, mover: [bool; 2]) {
    send(path, standing, mover);
    batch(path);
    assert!(!path.thread(1).unwrap().asleep());
}

/// Frames that the thread dequeues until the mover has left the backlog for CPU 1, where its last
/// frame is the latest of `standing`. A jiffy has `jiffy` batches; the mover sends in every `gap`th
/// poll. None if it doesn't leave in 2,000 polls.
fn frames_to_leave(shape: &Shape, standing: usize, jiffy: usize, gap: usize) -> Option<u64> {
    let mut path = Path::new(shape.clone());
    path.apply(Event::Map(0, 1023, 1));
    for mover in [2, 1] {
        path.apply(Event::Map(0, 0, mover));
        for _ in 0..ROUNDS {
            round(&mut path, shape, &[4, 5, 6, 7, MOVER]);
        }
        assert_eq!(path.location(MOVER), mover);
    }
    for poll in 0..30 {
        busy_round(&mut path, standing - 1, [false, true]);
        if poll % jiffy == 0 {
            path.apply(Event::Jiffy);
        }
    }
    path.apply(Event::Map(0, 0, 2));
    let from = path.backlogs[1].dequeued;
    for poll in 0..2000 {
        let sends = poll % gap == 0;
        busy_round(&mut path, standing, [sends, sends]);
        if poll % jiffy == 0 {
            path.apply(Event::Jiffy);
        }
        if path.location(MOVER) == 2 {
            assert_eq!(path.stack.nr_overtaken, 0);
            return Some(path.backlogs[1].dequeued - from);
        }
    }
    None
}

fn busy(kernel: Kernel, limit: u32) -> Shape {
    Shape {
        kernel,
        limit,
        nr_cpus: 3,
        hashes: HASHES.to_vec(),
        flow_order: 10,
        sock_flow_order: 3,
        driver_batch: 1,
        flow_limit: 0,
        fault: None,
    }
}

/// Frames that the thread dequeues until GRO is known to hold none of the frames dequeued before.
/// Without GRO: 0. With GRO: a flush. If flushes spare the present jiffy: first the flush under
/// way, then another one (backlog_age_gro()); each takes a jiffy, a flush and a batch.
fn gro_lag(kernel: Kernel, jiffy: u64) -> u64 {
    const BATCH: u64 = 8;
    const FLUSH: u64 = 64;
    match (kernel.gro, kernel.hz1000) {
        (false, _) => BATCH,
        (true, false) => FLUSH + BATCH,
        (true, true) => 2 * (jiffy * BATCH + FLUSH + 2 * BATCH),
    }
}

/// The saturated backlog: other flows keep it full permanently. The flow is shed, so that the
/// thread has to dequeue at most the limit, plus a batch by which the counters trail, plus the lag
/// of GRO.
#[test]
fn a_flow_leaves_a_backlog_that_others_keep_full() {
    for kernel in Kernel::ALL {
        for (limit, jiffy) in [(40, 1), (40, 8), (100, 1), (100, 8), (1000, 8)] {
            let left = frames_to_leave(&busy(kernel, limit), limit as usize, jiffy, 1);
            let bound = u64::from(limit) + 2 * 8 + gro_lag(kernel, jiffy as u64);
            assert!(
                left.is_some_and(|n| n <= bound),
                "{left:?} > {bound}, {kernel:?}"
            );
        }
    }
}

/// A backlog that is neither full nor empty: the flow leaves with its first frame after a pause as
/// long as the queue. Without such a pause it stays, as in kernel RFS: the queue always has a frame
/// of it, and nothing is dropped while there is room.
#[test]
fn a_flow_leaves_a_standing_queue_in_its_first_pause() {
    for kernel in Kernel::ALL {
        for jiffy in [1, 8] {
            let (limit, standing) = (100, 80);
            let shape = busy(kernel, limit);
            let bound = standing as u64 + 2 * 8 + gro_lag(kernel, jiffy as u64);
            let pause = bound.div_ceil(8);
            let left = frames_to_leave(&shape, standing, jiffy, pause as usize);
            assert!(
                left.is_some_and(|n| n <= 2 * pause * 8),
                "{left:?}, {pause}, {kernel:?}"
            );
            assert_eq!(frames_to_leave(&shape, standing, jiffy, 1), None);
        }
    }
}

/// Frames that the thread of CPU 1 dequeues after that CPU has gone offline, until its backlog is
/// empty and has been removed, while `flows` send as many frames as keep `standing` queued there.
/// None if that takes more than 2,000 polls. `sheds`: user space stops waiting.
fn frames_to_drain(kernel: Kernel, flows: &[usize], standing: usize, sheds: bool) -> Option<u64> {
    let shape = busy(kernel, LIMIT);
    let mut path = Path::new(shape.clone());
    path.apply(Event::Map(0, 1023, 1));
    for _ in 0..ROUNDS {
        round(&mut path, &shape, flows);
    }
    let poll = |path: &mut Path| {
        for &flow in flows.iter().cycle().take(standing) {
            if path.waiting(1) < standing {
                path.apply(Event::Frame(flow, Kind::Merge));
            }
        }
        path.apply(Event::EndPoll(End::Complete));
        path.apply(Event::PollTraced(0));
        batch(path);
        path.apply(Event::Jiffy);
    };
    (0..30).for_each(|_| poll(&mut path));
    path.apply(Event::Online(1, false));
    if sheds {
        path.apply(Event::Shed);
    }
    let from = path.backlogs[1].dequeued;
    for _ in 0..2000 {
        poll(&mut path);
        path.apply(Event::Check);
        if path.thread(1).is_none() {
            assert_eq!((path.stack.nr_overtaken, path.balance()), (0, Ok(())));
            return Some(path.backlogs[1].dequeued - from);
        }
    }
    None
}

/// While a CPU is offline or returns, one flow can keep its backlog from being empty for as long as
/// it sends, also if the backlog is never full. In the end it is shed: nothing enters, and the thread
/// dequeues what is there.
#[test]
fn the_backlog_of_an_offline_cpu_is_drained() {
    for kernel in Kernel::ALL {
        for flows in [&[MOVER][..], &OTHERS] {
            for standing in [20, 80] {
                let drained = |sheds| frames_to_drain(kernel, flows, standing, sheds);
                let left = drained(true);
                assert!(
                    left.is_some_and(|n| n <= standing as u64),
                    "{left:?} of {standing}, {kernel:?}"
                );
                // The control.
                assert_eq!(drained(false), None, "{standing}, {kernel:?}");
            }
        }
    }
}

/// Polls until a flow has left INLINE, while GRO always holds the latest packet of flows that stay.
/// A jiffy has `jiffy` polls. None if it doesn't leave in 2,000 polls.
fn polls_to_leave(kernel: Kernel, end: End, jiffy: usize) -> Option<usize> {
    let shape = busy(kernel, 100);
    let mut path = Path::new(shape.clone());
    for location in [1, INLINE] {
        path.apply(Event::Map(0, 0, location));
        for _ in 0..ROUNDS {
            round(&mut path, &shape, &[4, 5, 6, 7, MOVER]);
        }
        assert_eq!(path.location(MOVER), location);
    }
    path.apply(Event::Map(0, 0, 1));
    for poll in 0..2000 {
        for flow in OTHERS {
            path.apply(Event::Frame(flow, Kind::Push));
            path.apply(Event::Frame(flow, Kind::Merge));
        }
        path.apply(Event::Frame(MOVER, Kind::Merge));
        if path.location(MOVER) == 1 {
            assert_eq!(path.stack.nr_overtaken, 0);
            return Some(poll);
        }
        path.apply(Event::EndPoll(end));
        path.apply(Event::PollTraced(0));
        if poll % jiffy == 0 {
            path.apply(Event::Jiffy);
        }
    }
    None
}

/// The first poll requests a check of GRO, the second one makes it. If every poll spares packets of
/// the present jiffy, GRO may never be empty, and the flow stays: nothing shows that its own
/// packets have been delivered.
#[test]
fn a_flow_leaves_inline_once_a_poll_leaves_nothing_behind() {
    for kernel in Kernel::ALL {
        for jiffy in [1, 8] {
            assert_eq!(polls_to_leave(kernel, End::Complete, jiffy), Some(1));
            assert_eq!(polls_to_leave(kernel, End::CompleteOld, jiffy), None);
            let spares = kernel.hz1000;
            assert_eq!(
                polls_to_leave(kernel, End::Budget, jiffy),
                (!spares).then_some(1)
            );
        }
    }
}
