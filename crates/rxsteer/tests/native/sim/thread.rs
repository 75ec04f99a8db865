// SPDX-License-Identifier: MIT OR Apache-2.0
//! A cpumap entry: the ring and its thread, step by step (kernel/bpf/cpumap.c,
//! `cpu_map_kthread_run()`).

use std::collections::VecDeque;

use super::gro::{Gro, Packet, Stack};
use super::shape::Kernel;

/// Frames that the thread dequeues at once (`CPUMAP_BATCH`).
const BATCH: usize = 8;

/// Frames after which the thread flushes GRO (`NAPI_POLL_WEIGHT`).
const FLUSH: usize = 64;

/// Slots that a `ptr_ring` releases together.
const RETURNED: usize = 16;

/// The next step of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The thread has signalled that it runs, and has not set its state yet.
    Fresh,
    Top,
    Recheck,
    Asleep,
    Take,
    /// The tracepoint, before or after the batch is delivered.
    Trace,
    PassUp,
    Flush,
    Ended,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Thread {
    ring: VecDeque<Packet>,
    size: usize,
    /// slots consumed but not released, and the index of the next
    owed: usize,
    place: usize,
    step: Step,
    interruptible: bool,
    on_rq: bool,
    batch: Vec<Packet>,
    /// frames dequeued since the tracepoint
    untraced: usize,
    since_flush: usize,
    gro: Gro,
    /// The thread was told to end.
    pub stopping: bool,
}

/// The values that the tracepoint `xdp_cpumap_kthread` reads.
#[derive(Clone, Copy, Debug)]
pub struct Traced {
    /// Frames in the batch.
    pub n: u32,
    /// The thread's state is `TASK_RUNNING`.
    pub running: bool,
    /// GRO holds no packets.
    pub gro_empty: bool,
}

impl Thread {
    /// A new thread, with a ring for `size` frames.
    pub fn new(size: usize) -> Self {
        Self {
            ring: VecDeque::new(),
            size,
            owed: 0,
            place: 0,
            step: Step::Fresh,
            interruptible: false,
            on_rq: true,
            batch: Vec::new(),
            untraced: 0,
            since_flush: 0,
            gro: Gro::default(),
            stopping: false,
        }
    }

    /// Puts a frame into the ring; false if it is full.
    pub fn produce(&mut self, packet: Packet) -> bool {
        let room = self.ring.len() + self.owed < self.size;
        if room {
            self.ring.push_back(packet);
        }
        room
    }

    /// `wake_up_process()`
    pub fn wake(&mut self) {
        self.interruptible = false;
        self.on_rq = true;
        if self.step == Step::Asleep {
            self.step = Step::Take;
        }
    }

    /// Frames in the ring, or dequeued since the last tracepoint.
    pub fn untraced(&self) -> usize {
        self.ring.len() + self.untraced
    }

    /// Whether the thread waits to be woken.
    pub fn asleep(&self) -> bool {
        self.step == Step::Asleep
    }

    /// Whether the thread has ended.
    pub fn ended(&self) -> bool {
        self.step == Step::Ended
    }

    /// Whether `__state` is `TASK_INTERRUPTIBLE`.
    pub fn interruptible(&self) -> bool {
        self.interruptible
    }

    /// Whether the thread is on the run queue.
    pub fn on_rq(&self) -> bool {
        self.on_rq
    }

    /// Executes one step; returns the values of the tracepoint if that was the step.
    pub fn run(&mut self, kernel: Kernel, jiffies: u64, stack: &mut Stack) -> Option<Traced> {
        let mut traced = None;
        self.step = match self.step {
            Step::Fresh => {
                self.interruptible = true;
                Step::Top
            }
            Step::Top if self.stopping && self.ring.is_empty() => Step::Ended,
            Step::Top if self.ring.is_empty() => {
                self.interruptible = true;
                Step::Recheck
            }
            Step::Top => Step::Take,
            Step::Recheck if !self.ring.is_empty() => {
                self.interruptible = false;
                Step::Take
            }
            // schedule(): a thread woken meanwhile only yields
            Step::Recheck if self.interruptible && !self.stopping => {
                self.on_rq = false;
                Step::Asleep
            }
            Step::Recheck => {
                self.interruptible = false;
                Step::Take
            }
            Step::Asleep if self.stopping => {
                self.wake();
                Step::Take
            }
            Step::Asleep => Step::Asleep,
            Step::Take => {
                let n = self.ring.len().min(BATCH);
                self.batch.extend(self.ring.drain(..n));
                self.give_back(n);
                self.untraced = n;
                match kernel.traces_after {
                    true => Step::PassUp,
                    false => Step::Trace,
                }
            }
            Step::Trace => {
                let n = std::mem::take(&mut self.untraced);
                traced = Some(Traced {
                    n: u32::try_from(n).expect("a batch"),
                    running: !self.interruptible,
                    gro_empty: self.gro.is_empty(),
                });
                match kernel.traces_after {
                    true => Step::Top,
                    false => Step::PassUp,
                }
            }
            Step::PassUp => {
                self.since_flush += self.batch.len();
                for packet in self.batch.drain(..) {
                    self.gro.receive(packet, jiffies, stack);
                }
                Step::Flush
            }
            Step::Flush => {
                let empty = self.ring.is_empty();
                if !kernel.gro {
                    self.gro.flush(false, jiffies, stack);
                    self.gro.pass_up(stack);
                } else if empty || self.since_flush >= FLUSH {
                    self.gro.flush(!empty && kernel.hz1000, jiffies, stack);
                    self.gro.pass_up(stack);
                    self.since_flush = 0;
                }
                match kernel.traces_after {
                    true => Step::Trace,
                    false => Step::Top,
                }
            }
            Step::Ended => Step::Ended,
        };
        traced
    }

    /// `__ptr_ring_discard_one()`, n times: small rings release each slot at once.
    fn give_back(&mut self, n: usize) {
        let together = if self.size < 2 * RETURNED {
            1
        } else {
            RETURNED
        };
        for _ in 0..n {
            self.owed += 1;
            self.place = (self.place + 1) % self.size;
            if self.owed >= together || self.place == 0 {
                self.owed = 0;
            }
        }
    }
}
