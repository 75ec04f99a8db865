// SPDX-License-Identifier: MIT OR Apache-2.0
//! The life of the daemon, and failures around it: it is stopped, killed and started again, what it
//! asks of the kernel fails, its queue gets another NAPI instance, clocks jump.

use rxsteer::types::{backlog, rps_dev_flow, rx_queue};

use super::path::Path;
use super::shape::*;

/// What survives the daemon, and what its calls meet.
#[derive(Clone, Debug)]
pub struct Daemon {
    /// The XDP program and the tracepoints are attached.
    pub attached: bool,
    /// Number of times it was killed.
    pub life: usize,
    /// The queue's NAPI instance, from 1 on.
    pub napi: u64,
    /// Calls that will fail: creation of backlogs, their removal, a change of tables.
    pub failing_makes: u32,
    pub failing_removals: u32,
    pub failing_tables: bool,
    /// Entries of daemons that were killed, by CPU. Their threads deliver what is in their rings,
    /// and end. No counter is left for them.
    pub orphans: Vec<(u32, Entry)>,
    /// SIGTERM came: once all flows have returned INLINE, it ends.
    pub stopping: bool,
}

impl Default for Daemon {
    fn default() -> Self {
        Self {
            attached: true,
            life: 0,
            napi: 1,
            failing_makes: 0,
            failing_removals: 0,
            failing_tables: false,
            orphans: Vec::new(),
            stopping: false,
        }
    }
}

impl Path {
    pub(super) fn fail(&mut self, failure: Failure) {
        match failure {
            Failure::Makes(n) => self.daemon.failing_makes = n,
            Failure::Removals(n) => self.daemon.failing_removals = n,
            Failure::Tables => self.daemon.failing_tables = true,
            Failure::Requests => {
                for (b, entry) in self.backlogs.iter_mut().zip(&self.entries) {
                    if entry.is_none() {
                        b.wanted = 0;
                    }
                }
            }
            Failure::Kill if self.daemon.attached => {
                self.daemon.life += 1;
                self.end();
            }
            Failure::Stop if self.daemon.attached => {
                self.daemon.stopping = true;
                self.apply(Event::Return);
            }
            Failure::Start if !self.daemon.attached => self.start(),
            Failure::Kill | Failure::Stop | Failure::Start => {}
            Failure::Napi => self.replace_napi(),
            Failure::Clock(jiffies) => {
                self.jiffies += jiffies;
                self.q.load.window_start += jiffies * WINDOW_NS;
            }
        }
    }

    /// All flows have returned INLINE: what the daemon wanted that for.
    pub(super) fn returned(&mut self) {
        if self.daemon.stopping {
            self.end();
        } else if !std::mem::take(&mut self.daemon.failing_tables) {
            self.table.fill(rps_dev_flow::default());
        }
        self.q.epoch += 1;
    }

    /// The process has ended: programs are detached, and after a grace period, in which the poll
    /// flushes its bulk queues, the cpumaps' threads are told to end. Nothing counts any more.
    fn end(&mut self) {
        for cpu in 0..self.shape.nr_cpus {
            self.flush_bulk(cpu);
        }
        let entries = self.entries.iter_mut().zip(0..);
        let entries = entries.filter_map(|(entry, cpu)| Some((cpu, entry.take()?)));
        let mut orphans: Vec<_> = entries.chain(self.old.drain(..)).collect();
        for (_, entry) in &mut orphans {
            entry.thread.stopping = true;
            entry.thread.wake();
        }
        self.daemon.orphans.append(&mut orphans);
        (self.daemon.attached, self.daemon.stopping) = (false, false);
        self.returning = false;
        self.backlogs.fill(backlog::default());
        self.vanished.fill(0);
        self.flushed.fill(0);
        self.q = rx_queue::default();
    }

    fn start(&mut self) {
        self.daemon.attached = true;
        self.q.epoch = 1;
        self.q.policy = FOLLOW;
        self.table.fill(rps_dev_flow::default());
        self.sock_flows.fill(0);
        for (b, cpu) in self.backlogs.iter_mut().zip(&mut self.cpus) {
            (cpu.nr_polls, cpu.asked) = (0, false);
            *b = backlog::default();
            b.closed = cpu.offline.into();
        }
    }

    /// `ethtool -L`: the driver waits for polls to end, and GRO's packets are dropped with their
    /// NAPI instance (`flush_gro_hash()`).
    fn replace_napi(&mut self) {
        if self.polling.is_some() {
            self.apply(Event::EndPoll(End::Complete));
        }
        for cpu in 0..self.shape.nr_cpus {
            self.apply(Event::PollTraced(cpu));
        }
        self.nr_gone += self.gro.drop_all() as u64;
        self.daemon.napi += 1;
    }

    /// Whether the queue's NAPI instance is not the one in `rx_queue.napi`.
    pub(super) fn napi_is_new(&self) -> bool {
        self.q.napi != 0 && self.q.napi != self.daemon.napi
    }

    pub(super) fn run_orphans(&mut self, steps: u32) {
        let mut orphans = std::mem::take(&mut self.daemon.orphans);
        for (cpu, entry) in &mut orphans {
            for _ in 0..steps {
                let traced = entry
                    .thread
                    .run(self.shape.kernel, self.jiffies, &mut self.stack);
                if let Some(traced) = traced
                    && self.shape.fault == Some(Fault::OrphansCounted)
                {
                    self.thread_traced(*cpu, entry, traced);
                }
            }
        }
        orphans.retain(|(_, entry)| !entry.thread.ended());
        self.daemon.orphans = orphans;
    }

    /// Whether every packet received was delivered or dropped. Only at rest.
    ///
    /// # Errors
    /// The difference, in words.
    pub fn nothing_is_missing(&self) -> Result<(), String> {
        let received: u64 = self.numbers.iter().sum();
        let ended = self.stack.nr_delivered + self.nr_gone;
        match received == ended {
            true => Ok(()),
            false => Err(format!("{received} received, {ended} delivered or dropped")),
        }
    }
}
