// SPDX-License-Identifier: MIT OR Apache-2.0
//! Balances all queues while rxsteer runs: reads the inputs of [`Balance`], and writes the maps.
//!
//! A tick reads each queue's counters. For queues that receive enough, it reads /proc/stat once,
//! and the backlogs of the queue's mask. A queue's flow table is read only while a CPU is saturated
//! and another one could take slots, and less often while the table has no frames that could move,
//! as beside an application that polls.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::time::{ClockId, clock_gettime};
use tracing::{debug, warn};

use super::queue;
use crate::api::flows::Location;
use crate::api::status::Terms;
use crate::daemon::balance::{Balance, CpuLoad};
use crate::datapath::Datapath;
use crate::datapath::load;
use crate::datapath::native;
use crate::datapath::rps_map::{RpsMap, SLOTS, slot_of};
use crate::host::cpu_times::cpu_times;
use crate::types::{rps_dev_flow, rx_policy};

/// Time between two ticks. /proc/stat has a resolution of 10 ms.
const TICK: Duration = Duration::from_millis(100);

/// Ticks take at most one part in this number of a CPU's time: if they take long (/proc/stat with
/// hundreds of CPUs and interrupts, large flow tables), they are less frequent.
const SPARE: u32 = 20;

/// Fewest frames in a tick for which a queue is balanced. Even at a high cost of 100 us each, fewer
/// frames take less than a tenth of a CPU.
const QUIET: u64 = 100;

/// Most ticks over which frames are counted: older frames say little about the present load.
const RECENT: u32 = 10;

/// Most ticks without a reading of a flow table, after a reading without frames that could move.
const PAUSE_MAX: u32 = 4;

/// See the module's documentation.
pub struct Balancer {
    queues: Vec<Queue>,
    moves_per_second: u32,
    on: bool,
    last: Instant,
    next: Instant,
    /// As of the last tick, if that tick read them.
    idle: Option<IdleTimes>,
}

struct Queue {
    name: String,
    cpus: Vec<u32>,
    balance: Balance,
    balanced: u64,
    received: u64,
    /// By CPU: frames for which its backlog had no room, as of the last tick.
    refused: BTreeMap<u32, u64>,
    reading: Option<Reading>,
    pause: Pause,
}

/// Ticks between two readings of a flow table.
#[derive(Clone, Copy, Default)]
struct Pause {
    last: u32,
    left: u32,
}

/// Idle times of CPUs since boot: counted exactly, unlike busy times, which are sampled (NO_HZ).
struct IdleTimes {
    at: Instant,
    ns: BTreeMap<u32, u64>,
}

/// A reading of a queue's flow table.
struct Reading {
    /// In ticks.
    age: u32,
    flows: Vec<Count>,
}

/// A flow's frames since the flow got the slot, dropped ones included; wraps.
#[derive(Clone, Copy, Default)]
struct Count {
    hash: u32,
    frames: u32,
}

impl IdleTimes {
    fn now() -> Result<Self> {
        let at = Instant::now();
        let cpus = cpu_times()?.into_iter();
        let ns = cpus.map(|times| (times.cpu, times.idle_ns)).collect();
        Ok(Self { at, ns })
    }

    /// The fraction of the time since `before` in which the CPU was not idle; `None` if it was
    /// offline.
    fn busy(&self, before: &Self, cpu: u32) -> Option<f64> {
        let idle = self.ns.get(&cpu)?.saturating_sub(*before.ns.get(&cpu)?);
        let all = (self.at - before.at).as_nanos();
        Some(1.0 - (idle as f64 / all as f64).min(1.0))
    }
}

impl Pause {
    /// Begins a pause after a reading: none if frames could move (`found`), otherwise twice the
    /// last pause, up to [`PAUSE_MAX`].
    fn begin(&mut self, found: bool) {
        self.last = match found {
            true => 0,
            false => (self.last * 2).clamp(1, PAUSE_MAX),
        };
        self.left = self.last;
    }

    /// Whether the table is not read in this tick.
    fn lasts(&mut self) -> bool {
        let lasts = self.left > 0;
        self.left = self.left.saturating_sub(1);
        lasts
    }
}

impl Count {
    fn of(flow: &rps_dev_flow) -> Self {
        Self {
            hash: flow.hash,
            frames: flow.nr_packets.wrapping_add(flow.nr_dropped),
        }
    }

    /// Frames since `before`; all frames of the flow if another flow had the slot then or in
    /// between.
    fn since(self, before: Self) -> u32 {
        let new = self.frames.wrapping_sub(before.frames);
        match self.hash == before.hash && new <= u32::MAX / 2 {
            true => new,
            false => self.frames,
        }
    }
}

impl Balancer {
    /// For the queues with these names; balances none of them yet. Moves at most `moves_per_second`
    /// slots per second and queue; 0: none.
    pub fn new(names: impl IntoIterator<Item = String>, moves_per_second: u32) -> Self {
        let queues = names.into_iter().map(|name| Queue {
            name,
            cpus: Vec::new(),
            balance: Balance::new(moves_per_second),
            balanced: 0,
            received: 0,
            refused: BTreeMap::new(),
            reading: None,
            pause: Pause::default(),
        });
        Self {
            queues: queues.collect(),
            moves_per_second,
            on: false,
            last: Instant::now(),
            next: Instant::now(),
            idle: None,
        }
    }

    /// Switches balancing on or off.
    pub fn switch(&mut self, on: bool) {
        let on = on && self.moves_per_second > 0;
        if on && !self.on {
            self.last = Instant::now();
            self.next = self.last + TICK;
            self.idle = None;
        }
        self.on = on;
    }

    /// Sets the CPUs of the queue's slots, among which slots may move.
    pub fn spread_over(&mut self, queue: u32, cpus: Vec<u32>) {
        self.queues[queue as usize].cpus = cpus;
    }

    /// Slots that have moved so far.
    pub fn balanced(&self, queue: u32) -> u64 {
        self.queues[queue as usize].balanced
    }

    /// Time until the next call of [`Self::tick`]; `None`: no call.
    pub fn wait(&self) -> Option<Duration> {
        let until_next = || self.next.saturating_duration_since(Instant::now());
        self.on.then(until_next)
    }

    /// Moves slots if a tick is due. If the inputs can't be read, logs that and switches balancing
    /// off: packets are steered without it.
    pub fn tick(&mut self, datapath: &Datapath) {
        if !self.on || Instant::now() < self.next {
            return;
        }
        if let Err(e) = self.balance(datapath) {
            warn!("{e:#}: queues are no longer balanced");
            self.on = false;
        }
    }

    fn balance(&mut self, datapath: &Datapath) -> Result<()> {
        let cost = thread_time()?;
        let tick = self.last.elapsed();
        self.last += tick;
        let mut idle = None;
        for (index, queue) in (0..).zip(&mut self.queues) {
            queue.pass(tick);
            if queue.is_quiet(datapath, index) {
                continue;
            }
            let idle = match &mut idle {
                Some(idle) => idle,
                none => none.insert(IdleTimes::now()?),
            };
            queue.balance(datapath, index, |cpu| idle.busy(self.idle.as_ref()?, cpu));
        }
        self.idle = idle;
        let cost = thread_time()?.saturating_sub(cost);
        self.next = self.last + TICK.max(cost * SPARE);
        Ok(())
    }
}

impl Queue {
    fn pass(&mut self, tick: Duration) {
        self.balance.pass(tick);
        if let Some(reading) = &mut self.reading {
            reading.age += 1;
        }
    }

    /// Whether balancing gains nothing: too few frames since the last tick, or fewer than two CPUs.
    fn is_quiet(&mut self, datapath: &Datapath, index: u32) -> bool {
        let received = datapath.rx_queue(index).nr_received;
        let before = std::mem::replace(&mut self.received, received);
        let quiet = received - before < QUIET || self.cpus.len() < 2;
        if quiet {
            self.refused.clear();
            self.reading = None;
            self.pause = Pause::default();
        }
        quiet
    }

    /// `busy` is the busy fraction of a CPU in the tick, if known.
    fn balance(&mut self, datapath: &Datapath, index: u32, busy: impl Fn(u32) -> Option<f64>) {
        let limit = datapath.config().backlog_limit;
        let mut loads = Vec::new();
        for &cpu in &self.cpus {
            let backlog = datapath.backlog(index, cpu);
            let terms = Terms::from(&backlog);
            let refused = terms.dropped + terms.limited + terms.shed;
            let before = self.refused.insert(cpu, refused);
            let crowded = native::backlog_crowded(&backlog, limit);
            let filling = crowded || before.is_some_and(|b| b < refused);
            if let Some(busy) = busy(cpu) {
                loads.push(CpuLoad { cpu, busy, filling });
            }
        }
        if !Balance::could_move(&loads) || self.pause.lasts() {
            return;
        }
        let map = datapath.rps_map(index);
        let Some(frames) = self.frames(datapath, index, &map) else {
            return;
        };
        self.pause.begin(frames.iter().any(|frames| *frames > 0));
        let moves = self.balance.moves(&loads, &map, &frames);
        if let Some((_, cpu)) = moves.first() {
            let n = moves.len();
            debug!("{}: {n} slots move to CPU {cpu}; {loads:?}", self.name);
            datapath.set_rps_map(index, &map.moved(&moves));
            self.balanced += n as u64;
        }
    }

    /// Frames since the last reading, by slot of the map, of flows that are at the slot's location
    /// because of the map. `None` at the first reading, and at the first one after a long time.
    fn frames(&mut self, datapath: &Datapath, index: u32, map: &RpsMap) -> Option<[u64; SLOTS]> {
        let counters = datapath.rx_queue(index);
        let follow = u32::from(counters.policy) & rx_policy::RX_FOLLOW.0 != 0;
        let polling = load::polling_cpu(&counters);
        let slots = datapath.tables().flow_cnt();
        let before = self.reading.take().filter(|r| r.age <= RECENT);
        let now = self.reading.insert(Reading {
            age: 0,
            flows: vec![Count::default(); slots as usize],
        });
        let mut frames = [0; SLOTS];
        let first = index * slots;
        for (slot, flow) in datapath.tables().dev_flows().range(first..first + slots) {
            if !queue::in_use(&counters, &flow) {
                continue;
            }
            let count = Count::of(&flow);
            let place = (slot - first) as usize;
            now.flows[place] = count;
            let new = match &before {
                Some(before) => count.since(before.flows.get(place).copied().unwrap_or_default()),
                None => 0,
            };
            let rps_slot = slot_of(flow.hash);
            let is_at = match Location::from_raw(flow.location) {
                Some(Location::Cpu(cpu)) => Some(cpu),
                _ => polling,
            };
            if new > 0
                && is_at == Some(map.raw().location[rps_slot].into())
                && !(follow && Location::from_raw(datapath.application(flow.hash)).is_some())
            {
                frames[rps_slot] += u64::from(new);
            }
        }
        before.map(|_| frames)
    }
}

/// The CPU time that this thread has used.
fn thread_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_goes_on_while_the_flow_has_the_slot() {
        let count = |hash, frames| Count { hash, frames };
        for (before, now, new) in [
            (count(7, 10), count(7, 15), 5),
            (count(7, 10), count(7, 10), 0),
            (count(7, u32::MAX), count(7, 4), 5),
            // Another flow had the slot in between, or before.
            (count(7, 10), count(7, 3), 3),
            (count(8, 10), count(7, 15), 15),
            (Count::default(), count(7, 15), 15),
        ] {
            assert_eq!(now.since(before), new);
        }
    }

    #[test]
    fn who_finds_nothing_pauses_for_longer_each_time() {
        let mut pause = Pause::default();
        let mut ticks = |found| {
            pause.begin(found);
            (0..100).take_while(|_| pause.lasts()).count()
        };
        let found = [false, false, false, false, true, false];
        assert_eq!(found.map(&mut ticks), [1, 2, 4, 4, 0, 1]);
    }

    #[test]
    fn what_is_not_idle_is_busy() {
        let at = Instant::now();
        let times = |ms, ns: &[(u32, u64)]| IdleTimes {
            at: at + Duration::from_millis(ms),
            ns: ns.iter().copied().collect(),
        };
        let before = times(0, &[(0, 5), (1, 10), (2, 90)]);
        let ms = 1_000_000;
        let now = times(100, &[(0, 5 + 30 * ms), (1, 10), (2, 80), (3, 0)]);
        let busy = |cpu| now.busy(&before, cpu);
        assert_eq!(busy(0), Some(0.7));
        assert_eq!(busy(1), Some(1.0));
        // Idle times may decrease slightly (proc(5)).
        assert_eq!(busy(2), Some(1.0));
        assert_eq!(busy(3), None);
        // By steps of 10 ms, idle time may exceed the time that has passed.
        let idle = times(100, &[(1, 10 + 110 * ms)]);
        assert_eq!(idle.busy(&before, 1), Some(0.0));
    }
}
