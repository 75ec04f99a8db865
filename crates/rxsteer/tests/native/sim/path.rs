// SPDX-License-Identifier: MIT OR Apache-2.0
//! The path of packets from one receive queue to the stack: NAPI polls (poll.rs), the decision
//! (`steer.h` itself), backlogs and their threads (backlogs.rs). All progress is made by [`Event`]s.
//!
//! Sequentially consistent: effects of memory reordering are not simulated (tests/native/litmus.rs).

use rxsteer::datapath::native;
use rxsteer::datapath::rps_map::SLOTS;
use rxsteer::datapath::tables::cpu_mask;
use rxsteer::types::{backlog, backlog_closed, rps_dev_flow, rps_map, rx_facts, rx_queue};

use super::daemon::Daemon;
use super::gro::{Gro, Packet, Stack};
use super::shape::*;
use super::thread::Thread;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Path {
    pub(super) shape: Shape,
    /// The process, and what it meets.
    pub daemon: Daemon,
    /// The queue's counters.
    pub q: rx_queue,
    /// The backlogs', by CPU.
    pub backlogs: Vec<backlog>,
    /// The network stack.
    pub stack: Stack,
    /// Frames for which a ring had no room, without an [`Event::Lose`].
    pub nr_overflows: u64,
    /// Packets dropped on the way to the stack.
    pub nr_gone: u64,
    /// Reasons for wanted locations: a bit for each `enum rx_reason`.
    pub reasons: u32,
    /// States at the end of windows: a bit for each `enum rx_pressure`.
    pub pressures: u32,
    pub(super) map: Box<rps_map>,
    pub(super) table: Vec<rps_dev_flow>,
    pub(super) sock_flows: Vec<u32>,
    pub(super) numbers: Vec<u64>,
    pub(super) facts: rx_facts,
    pub(super) jiffies: u64,
    pub(super) polling: Option<u32>,
    pub(super) interrupt: u32,
    pub(super) cpus: Vec<Cpu>,
    pub(super) driver: Vec<Packet>,
    pub(super) bulk: Vec<Vec<Packet>>,
    pub(super) gro: Gro,
    pub(super) entries: Vec<Option<Entry>>,
    pub(super) old: Vec<(u32, Entry)>,
    pub(super) nr_entries: u64,
    pub(super) lose: usize,
    pub(super) vanish: usize,
    pub(super) vanished: Vec<u64>,
    pub(super) flushed: Vec<u64>,
    pub(super) returning: bool,
}

impl Path {
    /// The state at attach: no packets yet, every flow wants INLINE.
    pub fn new(shape: Shape) -> Self {
        let n = shape.nr_cpus as usize;
        let mut facts = rx_facts {
            limit: shape.limit.into(),
            nr_cpus: shape.nr_cpus,
            cpu_mask: cpu_mask(shape.nr_cpus),
            unguarded: (shape.fault == Some(Fault::Unguarded)).into(),
            flow_limit: shape.flow_limit,
            ..Default::default()
        };
        for (i, cpu) in facts.cpus[..n].iter_mut().enumerate() {
            cpu.capacity = 1024;
            let others = (1..n).map(|distance| (i + distance) % n);
            for (near, other) in cpu.near.iter_mut().zip(others) {
                *near = other as u16;
                cpu.nr_near += 1;
            }
        }
        Self {
            q: rx_queue {
                ifindex: 1,
                epoch: 1,
                ..Default::default()
            },
            backlogs: vec![backlog::default(); n],
            stack: Stack::default(),
            nr_overflows: 0,
            nr_gone: 0,
            reasons: 0,
            pressures: 0,
            map: Box::new(rps_map {
                location: [INLINE; SLOTS],
            }),
            table: vec![rps_dev_flow::default(); 1 << shape.flow_order],
            sock_flows: vec![0; 1 << shape.sock_flow_order],
            numbers: vec![0; shape.hashes.len()],
            facts,
            jiffies: 1,
            polling: None,
            interrupt: 0,
            cpus: vec![Cpu::default(); n],
            driver: Vec::new(),
            bulk: vec![Vec::new(); n],
            gro: Gro::default(),
            entries: vec![None; n],
            old: Vec::new(),
            nr_entries: 0,
            lose: 0,
            vanish: 0,
            vanished: vec![0; n],
            flushed: vec![0; n],
            returning: false,
            daemon: Daemon::default(),
            shape,
        }
    }

    /// Executes an event.
    pub fn apply(&mut self, event: Event) {
        match event {
            Event::Frame(flow, kind) => self.receive(flow, kind),
            Event::EndPoll(end) => self.end_poll(end),
            Event::PollTraced(cpu) => self.poll_traced(cpu),
            Event::Interrupt(cpu) => self.interrupt = cpu,
            Event::Thread(cpu, steps) => {
                for _ in 0..steps {
                    self.run_thread(cpu);
                }
            }
            Event::OldThread(steps) => {
                self.run_old_threads(steps);
                self.run_orphans(steps);
            }
            Event::Jiffy => self.jiffies += 1,
            Event::Application(flow, location) => {
                let hash = self.shape.hashes[flow];
                *self.sock_flow(hash) =
                    native::sock_flow_entry(hash, location, self.facts.cpu_mask);
            }
            Event::Map(..) | Event::Policy(_) if self.returning => {}
            Event::Map(first, last, location) => {
                for slot in first..=last {
                    self.map.location[usize::from(slot)] = location;
                }
            }
            Event::Policy(policy) => self.q.policy = policy,
            Event::Window(polls, all) => self.end_window(polls, all),
            Event::Cpu(cpu, idle, [busy, demand]) => {
                self.facts.idle = self.facts.idle & !(1 << cpu) | u64::from(idle) << cpu;
                self.facts.busy[cpu as usize] = busy;
                self.facts.demand[cpu as usize] = demand;
            }
            Event::Waits(waits) => self.facts.consumer_waits = waits.into(),
            Event::Make => self.make(),
            Event::Lose(n) => self.lose = n,
            Event::Vanish(n) => self.vanish = n,
            Event::Online(cpu, online) => {
                self.cpus[cpu as usize].offline = !online;
                // A closed backlog is reopened once it is empty.
                if !online {
                    self.backlogs[cpu as usize].closed = 1;
                }
            }
            Event::Check => self.check(),
            Event::Return if !self.daemon.attached => {}
            Event::Return => {
                self.returning = true;
                self.q.policy = 0;
                self.map.location = [INLINE; SLOTS];
            }
            Event::Shed => self.shed(),
            Event::Fail(failure) => self.fail(failure),
        }
    }

    fn shed(&mut self) {
        if self.returning {
            self.map.location = [INLINE_SHED; SLOTS];
        }
        for b in self.backlogs.iter_mut().filter(|b| b.closed != 0) {
            b.closed |= u64::from(backlog_closed::BACKLOG_SHED.0);
        }
    }

    /// A flow's slot.
    pub fn slot(&self, flow: usize) -> usize {
        native::flow_slot(0, self.shape.hashes[flow], 32 - self.shape.flow_order) as usize
    }

    pub(super) fn sock_flow(&mut self, hash: u32) -> &mut u32 {
        let mask = self.sock_flows.len() - 1;
        &mut self.sock_flows[hash as usize & mask]
    }

    /// Where a flow is.
    pub fn location(&self, flow: usize) -> u16 {
        let slot = &self.table[self.slot(flow)];
        match slot.epoch == self.q.epoch {
            true => slot.location,
            false => NO_CPU,
        }
    }

    /// The location that a flow wants by the tables alone, with interrupts as they are: according
    /// to the documentation, not computed by steer.h.
    pub fn wanted(&mut self, flow: usize) -> u16 {
        let hash = self.shape.hashes[flow];
        let entry = *self.sock_flow(hash);
        let mask = self.facts.cpu_mask;
        let of_flow = (entry ^ hash) & !(2 * mask + 1) == 0; // but the bit of unconnected sockets
        let application = match self.q.policy & FOLLOW != 0 && of_flow {
            true if entry & mask == mask => return INLINE,
            true => (entry & mask).checked_sub(1),
            false => None,
        };
        let rps = self.map.location[hash as usize >> 22];
        let rps = (rps < INLINE_SHED).then_some(u32::from(rps));
        let usable = |cpu: &u32| *cpu == self.interrupt || self.open(*cpu);
        match application.filter(usable).or(rps.filter(usable)) {
            Some(cpu) if cpu != self.interrupt => cpu as u16,
            _ => INLINE,
        }
    }

    fn open(&self, cpu: u32) -> bool {
        self.backlogs
            .get(cpu as usize)
            .is_some_and(|b| b.closed == 0)
    }

    /// The thread for a CPU, if there is one.
    pub fn thread(&self, cpu: u32) -> Option<&Thread> {
        self.entries[cpu as usize].as_ref().map(|e| &e.thread)
    }

    /// Frames queued for a CPU's thread.
    pub fn waiting(&self, cpu: u32) -> usize {
        self.bulk[cpu as usize].len() + self.thread(cpu).map_or(0, Thread::untraced)
    }

    /// Whether user space is returning flows to INLINE.
    pub fn returning(&self) -> bool {
        self.returning
    }

    /// Checks both sums (docs/backlog.md): every frame is in exactly one place.
    ///
    /// # Errors
    /// The difference, in words.
    pub fn balance(&self) -> Result<(), String> {
        let sum = |b: &backlog| b.tail + b.nr_dropped + b.nr_shed + b.nr_limited;
        let inline = self.q.nr_inline;
        let accounted = inline + self.backlogs.iter().map(sum).sum::<u64>();
        if self.q.nr_received != accounted {
            return Err(format!(
                "{} received, {accounted} accounted for",
                self.q.nr_received
            ));
        }
        for (cpu, b) in self.backlogs.iter().enumerate() {
            let old = self.old.iter().filter(|(c, _)| *c as usize == cpu);
            let threads = self.entries[cpu].iter().chain(old.map(|(_, e)| e));
            let waiting =
                threads.map(|e| e.thread.untraced()).sum::<usize>() + self.bulk[cpu].len();
            let vanished = self.vanished[cpu];
            if b.tail != b.dequeued + b.nr_lost + vanished + waiting as u64
                || b.nr_vanished > vanished
            {
                return Err(format!(
                    "CPU {cpu}: {waiting} waiting, {vanished} vanished, {b:?}"
                ));
            }
        }
        Ok(())
    }
}
