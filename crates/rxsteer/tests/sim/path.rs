// SPDX-License-Identifier: MIT OR Apache-2.0
//! The path of packets from one receive queue to the stack: NAPI polls, the decision (`steer.h`
//! itself), backlogs and their threads. All progress is made by [`Event`]s.
//!
//! Sequentially consistent: effects of memory reordering are not simulated (tests/litmus.rs).

use rxsteer::datapath::native;
use rxsteer::datapath::rps_map::SLOTS;
use rxsteer::datapath::tables::cpu_mask;
use rxsteer::types::rx_facts;
use rxsteer::types::{backlog, rps_dev_flow, rps_map, rx_queue, rx_verdict};

use super::daemon::Daemon;
use super::gro::{Gro, Kind, Packet, Stack};
use super::shape::*;
use super::thread::{Thread, Traced};

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
    map: Box<rps_map>,
    pub(super) table: Vec<rps_dev_flow>,
    pub(super) sock_flows: Vec<u32>,
    pub(super) numbers: Vec<u64>,
    facts: rx_facts,
    pub(super) jiffies: u64,
    pub(super) polling: Option<u32>,
    interrupt: u32,
    pub(super) cpus: Vec<Cpu>,
    driver: Vec<Packet>,
    bulk: Vec<Vec<Packet>>,
    pub(super) gro: Gro,
    pub(super) entries: Vec<Option<Entry>>,
    pub(super) old: Vec<(u32, Entry)>,
    nr_entries: u64,
    lose: usize,
    vanish: usize,
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
            Event::Shed if self.returning => self.map.location = [INLINE_SHED; SLOTS],
            Event::Shed => {}
            Event::Fail(failure) => self.fail(failure),
        }
    }

    // ---- the NAPI poll ------------------------------------------------------------------------

    fn receive(&mut self, flow: usize, kind: Kind) {
        let cpu = self.polling.unwrap_or(self.interrupt);
        // The limit in docs/order.md: a queue with a new NAPI instance.
        let owed = |c: &Cpu| c.owed;
        if self.polling.is_none()
            && (self.cpus[cpu as usize].owed || self.napi_is_new() && self.cpus.iter().any(owed))
        {
            return;
        }
        self.polling = Some(cpu);
        self.numbers[flow] += 1;
        let packet = Packet {
            flow,
            life: self.daemon.life,
            number: self.numbers[flow],
            kind,
        };
        if !self.daemon.attached {
            return self.pass_inline(packet);
        }
        let hash = self.shape.hashes[flow];
        let slot = self.slot(flow);
        self.find_facts(cpu, hash);
        if self.shape.fault == Some(Fault::Unflushed) {
            for b in self.backlogs.iter_mut().filter(|b| b.leaving != 0) {
                b.leaving = u64::MAX;
            }
        }
        let verdict = native::rx_steer(
            &mut self.facts,
            &mut self.q,
            &mut self.backlogs,
            &self.map,
            &mut self.table[slot],
            hash,
            cpu,
        );
        self.cpus[cpu as usize].asked |= self.facts.poll_asked != 0;
        self.reasons |= 1 << self.table[slot].reason;
        if self.shape.fault == Some(Fault::PollEnds) {
            self.cpus[cpu as usize].nr_polls += 1;
        }
        match verdict {
            rx_verdict::RX_PASS => self.pass_inline(packet),
            rx_verdict::RX_REDIRECTED => {
                let to = self.table[slot].location;
                if self.shape.fault == Some(Fault::QtailBefore) {
                    self.table[slot].last_qtail -= 1;
                }
                self.enqueue(to.into(), packet);
            }
            _ => self.nr_gone += 1,
        }
    }

    fn pass_inline(&mut self, packet: Packet) {
        self.driver.push(packet);
        if self.driver.len() >= self.shape.driver_batch {
            self.pass();
        }
    }

    /// `xdp_do_redirect()`, if the driver comes to it
    fn enqueue(&mut self, to: u32, packet: Packet) {
        // Before a thread's first batch nothing proves that it is blocked (docs/order.md).
        if self.vanish > 0 && self.backlogs[to as usize].kthread != 0 {
            self.vanish -= 1;
            self.vanished[to as usize] += 1;
            self.nr_gone += 1;
            return;
        }
        if self.bulk[to as usize].len() == BULK {
            self.flush_bulk(to);
        }
        self.bulk[to as usize].push(packet);
    }

    fn find_facts(&mut self, cpu: u32, hash: u32) {
        let has_entry = |(t, e): (usize, &Option<Entry>)| u64::from(e.is_some()) << t;
        self.facts.entries = self.entries.iter().enumerate().map(has_entry).sum();
        self.find_threads();
        self.facts.nr_polls = self.cpus[cpu as usize].nr_polls;
        self.facts.sock_flow = *self.sock_flow(hash);
        self.facts.jiffies = self.jiffies as u32;
        let empty = match self.shape.fault {
            Some(Fault::NapiGroEmpty) => true,
            Some(Fault::NapiGroHolds) => false,
            // Memory that was freed, empty as it was left.
            _ if self.napi_is_new() => true,
            _ => self.gro.is_empty(),
        };
        self.facts.gro_empty = (self.q.napi != 0 && empty).into();
        self.facts.poll_asked = 0;
    }

    fn pass(&mut self) {
        for packet in self.driver.drain(..) {
            self.gro.receive(packet, self.jiffies, &mut self.stack);
        }
    }

    fn end_poll(&mut self, end: End) {
        let Some(cpu) = self.polling.take() else {
            return;
        };
        self.pass();
        for to in 0..self.shape.nr_cpus {
            if !self.bulk[to as usize].is_empty() {
                self.flush_bulk(to);
                if let Some(entry) = &mut self.entries[to as usize] {
                    entry.thread.wake();
                }
            }
        }
        for (flushed, b) in self.flushed.iter_mut().zip(&self.backlogs) {
            *flushed = b.tail;
        }
        self.vanish = 0;
        let old = match end {
            End::Complete => Some(false),
            End::CompleteOld => Some(true),
            End::Budget => Some(self.shape.kernel.hz1000),
            End::Busy => None,
        };
        if let Some(old) = old {
            self.gro.flush(old, self.jiffies, &mut self.stack);
        }
        self.gro.pass_up(&mut self.stack);
        self.q.load.nr_polls += 1;
        self.q.load.nr_exhausted += u32::from(matches!(end, End::Budget));
        self.q.load.nr_busy_polls += u32::from(matches!(end, End::Busy));
        self.cpus[cpu as usize].owed = true;
        // Released within the poll's function; else the next poll may precede the tracepoint.
        if matches!(end, End::Budget | End::Busy) {
            self.poll_traced(cpu);
        }
    }

    /// `napi_polled()` in napi.h
    fn poll_traced(&mut self, cpu: u32) {
        let cpu = &mut self.cpus[cpu as usize];
        if std::mem::take(&mut cpu.owed) {
            cpu.nr_polls += u64::from(self.daemon.attached);
            let kept = self.shape.fault == Some(Fault::NapiKept) && self.q.napi != 0;
            if std::mem::take(&mut cpu.asked) && self.daemon.attached && !kept {
                self.q.napi = self.daemon.napi;
            }
        }
    }

    /// `queue_polled()` in napi.h, at the end of a window.
    fn end_window(&mut self, polls: u32, all: u32) {
        let l = &mut self.q.load;
        let now = l.window_start + WINDOW_NS;
        l.poll_ns = u64::from(polls) * WINDOW_NS / 1024;
        native::load_window(&mut self.q, now, all, 0);
        self.pressures |= 1 << self.q.load.pressure;
    }

    // ---- backlogs -----------------------------------------------------------------------------

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

    fn run_thread(&mut self, cpu: u32) {
        let Some(mut entry) = self.entries[cpu as usize].take() else {
            return;
        };
        self.step(cpu, &mut entry);
        self.entries[cpu as usize] = Some(entry);
    }

    fn run_old_threads(&mut self, steps: u32) {
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
    fn find_threads(&mut self) {
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

    // ---- user space ---------------------------------------------------------------------------

    fn make(&mut self) {
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

    fn check(&mut self) {
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

    // ---- observation --------------------------------------------------------------------------

    /// A flow's slot.
    pub fn slot(&self, flow: usize) -> usize {
        native::flow_slot(0, self.shape.hashes[flow], 32 - self.shape.flow_order) as usize
    }

    fn sock_flow(&mut self, hash: u32) -> &mut u32 {
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
