// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backlogs: bulk queues, rings and threads, and the calls of user space that create and remove
//! them.

use rxsteer::datapath::native;
use rxsteer::types::backlog;

use super::path::Path;
use super::shape::*;
use super::thread::{Thread, Traced};

impl Path {
    /// `bq_flush_to_queue()`
    pub(super) fn flush_bulk(&mut self, to: u32) {
        let mut lose = std::mem::take(&mut self.lose);
        let mut lost = 0;
        for packet in self.bulk[to as usize].drain(..) {
            let ring = self.entries[to as usize].as_mut().map(|e| &mut e.thread);
            if lose > 0 {
                lose -= 1;
                lost += 1;
            } else if !ring.is_some_and(|r| r.produce(packet)) {
                lost += 1;
                self.nr_overflows += 1;
            }
        }
        self.nr_gone += lost;
        if self.shape.fault == Some(Fault::LostTwice) {
            lost *= 2;
        }
        self.backlogs[to as usize].nr_lost += lost;
    }

    pub(super) fn run_thread(&mut self, cpu: u32) {
        let Some(mut entry) = self.entries[cpu as usize].take() else {
            return;
        };
        self.step(cpu, &mut entry);
        self.entries[cpu as usize] = Some(entry);
    }

    pub(super) fn run_old_threads(&mut self, steps: u32) {
        let mut old = std::mem::take(&mut self.old);
        for (cpu, entry) in &mut old {
            for _ in 0..steps {
                self.step(*cpu, entry);
            }
        }
        old.retain(|(_, entry)| !entry.thread.ended());
        self.old = old;
    }

    fn step(&mut self, cpu: u32, entry: &mut Entry) {
        let kernel = self.shape.kernel;
        if let Some(traced) = entry.thread.run(kernel, self.jiffies, &mut self.stack)
            && traced.n > 0
        {
            self.thread_traced(cpu, entry, traced);
        }
    }

    /// `on_cpumap_kthread()` in trace.bpf.c
    pub(super) fn thread_traced(&mut self, cpu: u32, entry: &mut Entry, traced: Traced) {
        let b = &mut self.backlogs[cpu as usize];
        if !std::mem::replace(&mut entry.learnt, true) {
            b.in_loop = 0;
            b.kthread = entry.id;
        }
        if b.in_loop == 0 {
            b.in_loop = traced.running.into();
        }
        let fault = self.shape.fault;
        let n = traced.n + u32::from(fault == Some(Fault::TakenMore));
        let empty =
            !self.shape.kernel.gro || traced.gro_empty || fault == Some(Fault::ThreadGroEmpty);
        native::backlog_dequeue(b, n, empty, self.jiffies);
        if fault == Some(Fault::HeadAhead) && empty {
            b.head = b.dequeued;
        }
    }

    /// `backlog_interruptible()` and `backlog_off_rq()` in cpumap.h
    pub(super) fn find_threads(&mut self) {
        let fault = self.shape.fault;
        self.facts.interruptible = self.threads(|thread| match fault {
            Some(Fault::Sleeping) => true,
            Some(Fault::Sleepless) => false,
            _ => thread.interruptible(),
        });
        self.facts.off_rq = self.threads(|thread| match fault {
            Some(Fault::Sleeping | Fault::FreshBelieved | Fault::BlockedEarly) => true,
            Some(Fault::Unsettled) => false,
            _ => !thread.on_rq(),
        });
    }

    /// The CPUs whose backlog has a known thread of which this holds, as bits.
    fn threads(&self, holds: impl Fn(&Thread) -> bool) -> u64 {
        let threads = self.entries.iter().flatten();
        let threads: Vec<_> = threads.chain(self.old.iter().map(|(_, e)| e)).collect();
        let bit = |b: &backlog| {
            let entry = threads.iter().find(|e| e.id == b.kthread);
            entry.is_some_and(|e| holds(&e.thread))
        };
        let bits = self.backlogs.iter().enumerate();
        bits.map(|(cpu, b)| u64::from(bit(b)) << cpu).sum()
    }

    pub(super) fn make(&mut self) {
        for cpu in 0..self.shape.nr_cpus as usize {
            let missing = self.backlogs[cpu].wanted != 0 && self.entries[cpu].is_none();
            if missing && self.daemon.failing_makes > 0 {
                self.daemon.failing_makes -= 1;
                self.backlogs[cpu].wanted = 0;
            } else if missing && !self.cpus[cpu].offline {
                self.nr_entries += 1;
                self.entries[cpu] = Some(Entry {
                    thread: Thread::new(self.shape.limit as usize + RING_SLACK),
                    id: self.nr_entries,
                    learnt: false,
                });
            }
        }
    }

    fn drained(&mut self, cpu: u32) -> bool {
        if self.shape.fault != Some(Fault::SleepingBefore) {
            self.find_threads();
        }
        native::backlog_asleep(&mut self.facts, &mut self.backlogs, cpu)
    }

    pub(super) fn check(&mut self) {
        let fault = self.shape.fault;
        for cpu in 0..self.shape.nr_cpus {
            if self.backlogs[cpu as usize].closed != 0
                && (self.drained(cpu) || fault == Some(Fault::RemovedFull))
            {
                self.remove(cpu as usize);
            }
        }
        if self.returning
            && ((0..self.shape.nr_cpus).all(|cpu| self.drained(cpu))
                || fault == Some(Fault::EpochAbroad)
                || fault == Some(Fault::DetachedEarly) && self.daemon.stopping)
        {
            self.returning = false;
            self.returned();
        }
        self.find_threads();
        self.find_vanished();
    }

    /// `Datapath::find_vanished`
    fn find_vanished(&mut self) {
        for (cpu, &flushed) in (0..).zip(&self.flushed) {
            native::backlog_settle(&mut self.facts, &mut self.backlogs, cpu, flushed);
        }
    }

    /// `Datapath::remove_cpu`, `backlog_forget()`
    fn remove(&mut self, cpu: usize) {
        if self.daemon.failing_removals > 0 {
            self.daemon.failing_removals -= 1;
            return;
        }
        let b = &mut self.backlogs[cpu];
        if let Some(mut entry) = self.entries[cpu].take() {
            entry.learnt = false;
            entry.thread.stopping = true;
            entry.thread.wake();
            self.old.push((cpu as u32, entry));
        }
        (b.kthread, b.in_loop, b.old_dequeued, b.wanted) = (0, 0, 0, 0);
        b.closed = self.cpus[cpu].offline.into();
    }
}
