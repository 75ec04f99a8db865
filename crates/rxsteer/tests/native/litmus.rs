// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory order on which the proofs of delivery depend, and which the models in `model/`
//! assume: loom checks all executions that the memory model of C11 allows.
//!
//! A value-returning atomic of BPF is a full barrier on both sides. arm64's JIT emits `ldaddal`, or
//! `ldxr`/`stlxr` followed by `dmb ish` (arch/arm64/net/bpf_jit_comp.c), x86's a `lock xadd`. The
//! model uses less, which suffices: an acquire and release operation between two such fences. An
//! atomic without a result (`stadd`, or `ldxr`/`stxr`) orders nothing, nor does a plain access.
//!
//! Delivery is an atomic exchange at the place where frames meet, like taking a socket's lock: the
//! second one sees everything that the first one wrote. The `unlocked` word stands for data that a
//! receiver reads without a lock.

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Relaxed};
use loom::sync::atomic::{AtomicUsize, fence};
use loom::thread;

const RUNNING: usize = 0;
const INTERRUPTIBLE: usize = 1;

/// The frame that the thread delivers, and the later frame that XDP delivers INLINE.
const FIRST: usize = 1;
const SECOND: usize = 2;

struct World {
    state: AtomicUsize,
    dequeued: AtomicUsize,
    head: AtomicUsize,
    socket: AtomicUsize,
    unlocked: AtomicUsize,
}

/// Compilation of an atomic.
#[derive(Clone, Copy)]
enum Rmw {
    /// The value is used: fully ordered.
    Fetch,
    /// The value is not used: not ordered.
    Plain,
}

impl Rmw {
    fn add(self, word: &AtomicUsize, n: usize) -> usize {
        match self {
            Rmw::Plain => word.fetch_add(n, Relaxed),
            Rmw::Fetch => {
                fence(AcqRel);
                let before = word.fetch_add(n, AcqRel);
                fence(AcqRel);
                before
            }
        }
    }

    fn read(self, word: &AtomicUsize) -> usize {
        match self {
            Rmw::Plain => word.load(Relaxed),
            Rmw::Fetch => self.add(word, 0),
        }
    }
}

impl World {
    /// The thread was asleep, has a frame in its ring, and was woken.
    fn new() -> Arc<Self> {
        Arc::new(Self {
            state: AtomicUsize::new(INTERRUPTIBLE),
            dequeued: AtomicUsize::new(0),
            head: AtomicUsize::new(0),
            socket: AtomicUsize::new(0),
            unlocked: AtomicUsize::new(0),
        })
    }

    /// Fails if a later frame was delivered before.
    fn deliver(&self, frame: usize) {
        let before = self.socket.swap(frame, AcqRel);
        assert!(before < frame, "{before} before {frame}");
    }

    /// `cpu_map_kthread_run()` and its tracepoint: a batch with one frame, an empty one, and sleep.
    fn kthread(&self, add: Rmw, head_first: bool) {
        self.state.store(RUNNING, Relaxed);
        add.add(&self.dequeued, 1);
        self.unlocked.store(FIRST, Relaxed);
        self.deliver(FIRST);
        if head_first {
            self.head.store(1, Relaxed);
        }
        let before = add.add(&self.dequeued, 1);
        if !head_first {
            self.head.store(before, Relaxed);
        }
    }
}

/// `backlog_asleep()` against the thread's first batch and its sleep.
fn asleep(add: Rmw, read: Rmw) {
    loom::model(move || {
        let world = World::new();
        let thread = thread::spawn({
            let world = world.clone();
            move || {
                world.state.store(RUNNING, Relaxed);
                add.add(&world.dequeued, 1);
                world.deliver(FIRST);
                world.state.store(INTERRUPTIBLE, Relaxed);
            }
        });
        if read.read(&world.dequeued) == 1 && world.state.load(Relaxed) == INTERRUPTIBLE {
            world.deliver(SECOND);
        }
        thread.join().unwrap();
    });
}

/// XDP reads the head of `backlog_dequeue()`: whether readers without a lock see what was
/// delivered.
fn head(add: Rmw, head_first: bool, fenced: bool) {
    loom::model(move || {
        let world = World::new();
        let thread = thread::spawn({
            let world = world.clone();
            move || world.kthread(add, head_first)
        });
        if world.head.load(Relaxed) == 1 {
            if fenced {
                Rmw::Fetch.read(&world.dequeued);
            }
            assert_eq!(world.unlocked.load(Relaxed), FIRST);
            world.deliver(SECOND);
        }
        thread.join().unwrap();
    });
}

#[test]
fn reading_taken_implies_a_running_thread() {
    asleep(Rmw::Fetch, Rmw::Fetch);
}

#[test]
#[should_panic(expected = "2 before 1")]
fn control_taken_added_without_order() {
    asleep(Rmw::Plain, Rmw::Fetch);
}

#[test]
#[should_panic(expected = "2 before 1")]
fn control_taken_read_without_order() {
    asleep(Rmw::Fetch, Rmw::Plain);
}

#[test]
fn reading_head_implies_delivery() {
    head(Rmw::Fetch, false, true);
}

#[test]
#[should_panic]
fn control_head_read_without_order() {
    head(Rmw::Fetch, false, false);
}

#[test]
#[should_panic]
fn control_head_written_before_the_atomic() {
    head(Rmw::Fetch, true, true);
}

#[test]
#[should_panic]
fn control_head_written_after_a_plain_add() {
    head(Rmw::Plain, false, true);
}

/// Order alone, without unlocked data, needs no barriers: the lock suffices.
#[test]
fn head_orders_delivery_without_barriers() {
    loom::model(|| {
        let world = World::new();
        let thread = thread::spawn({
            let world = world.clone();
            move || {
                world.deliver(FIRST);
                world.head.store(1, Relaxed);
            }
        });
        if world.head.load(Relaxed) == 1 {
            world.deliver(SECOND);
        }
        thread.join().unwrap();
    });
}

/// `softnet_enter()` of another CPU against `softnet_passed()`: the ring has an old tail where that of the
/// next packet is going to be.
fn tail(add: Rmw, read: Rmw) {
    const OLD: usize = 3;
    const NEXT: usize = 11;
    loom::model(move || {
        let way = Arc::new((AtomicUsize::new(OLD), AtomicUsize::new(0)));
        let thread = thread::spawn({
            let way = way.clone();
            move || {
                way.0.store(NEXT, Relaxed);
                add.add(&way.1, 1);
            }
        });
        if read.read(&way.1) == 1 {
            assert_eq!(way.0.load(Relaxed), NEXT, "an old tail");
        }
        thread.join().unwrap();
    });
}

#[test]
fn a_later_number_implies_its_tail() {
    tail(Rmw::Fetch, Rmw::Fetch);
}

#[test]
#[should_panic(expected = "an old tail")]
fn control_a_number_added_without_order() {
    tail(Rmw::Plain, Rmw::Fetch);
}

#[test]
#[should_panic(expected = "an old tail")]
fn control_a_number_read_without_order() {
    tail(Rmw::Fetch, Rmw::Plain);
}
