// SPDX-License-Identifier: MIT OR Apache-2.0
//! A simulated host with flows.

use proptest::prelude::*;
use proptest::sample::subsequence;
use rxsteer::datapath::native;
pub use rxsteer::datapath::rps_map::INLINE;
use rxsteer::datapath::rps_map::SLOTS;
use rxsteer::datapath::tables::cpu_mask;
use rxsteer::types::{
    backlog, cpu, rps_dev_flow, rps_map, rx_policy, rx_pressure, rx_queue, rx_reason, rx_verdict,
};
use rxsteer::types::{rx_facts, rx_trial};

pub const FOLLOW: u16 = rx_policy::RX_FOLLOW.0 as u16;

pub const IDLE: u16 = rx_policy::RX_IDLE.0 as u16;

pub const ADAPT: u16 = rx_policy::RX_ADAPT.0 as u16;

pub const RELAXED: u16 = rx_pressure::RX_RELAXED.0 as u16;

pub const FULL: u16 = rx_pressure::RX_FULL.0 as u16;

pub const SATURATED: u16 = rx_pressure::RX_SATURATED.0 as u16;

pub const POLLED: u16 = rx_pressure::RX_POLLED.0 as u16;

pub const IDLE_CPU: u8 = rx_reason::RX_IDLE_CPU.0 as u8;

/// Policies that depend on the load.
pub const LOADED: [u16; 5] = [
    IDLE | FOLLOW,
    ADAPT | FOLLOW,
    ADAPT | IDLE | FOLLOW,
    ADAPT,
    ADAPT | IDLE,
];

pub const NR_CPUS: u32 = 8;

/// Polls of a window.
pub const POLLS: u32 = 8;

/// A CPU's time.
pub const WHOLE: u32 = 1024;

pub const WINDOW_NS: u64 = 10_000_000;

/// The half-life of the scheduler's averages.
pub const HALF_LIFE_NS: u64 = 32_000_000;

/// Limit of frames in a backlog.
pub const LIMIT: u64 = 400;

/// An eighth of a queue's frames, in 1/1024.
pub const FLOW_LIMIT: u32 = 123;

pub struct World {
    pub facts: rx_facts,
    pub q: rx_queue,
    pub trial: rx_trial,
    pub backlogs: Vec<backlog>,
    pub map: Box<rps_map>,
    pub flows: Vec<rps_dev_flow>,
    /// entries of the sock_flow_table
    pub applications: Vec<u32>,
    /// CPUs with a backlog filled to three quarters of the limit, which counts as crowded
    pub crowded: u64,
    pub polling: u32,
    /// polls of a window by an application
    pub busy_polls: u32,
    /// windows in which the polling CPU was saturated, or polled by an application, since it was
    /// last relaxed
    saturated: Vec<u32>,
}

impl World {
    /// CPU 0 polls; all CPUs are busy, have room, and have seen no packet.
    pub fn new(policy: u16, nr_flows: usize) -> Self {
        let backlog = backlog {
            head: u64::MAX,
            ..Default::default()
        };
        let mut world = Self {
            facts: rx_facts {
                entries: u64::MAX,
                limit: LIMIT,
                nr_cpus: NR_CPUS,
                cpu_mask: cpu_mask(NR_CPUS),
                ..Default::default()
            },
            q: rx_queue {
                ifindex: 1,
                epoch: 1,
                policy,
                polls_delivered: u64::MAX,
                ..Default::default()
            },
            trial: rx_trial::default(),
            backlogs: vec![backlog; NR_CPUS as usize],
            map: Box::new(rps_map {
                location: [INLINE; SLOTS],
            }),
            flows: vec![rps_dev_flow::default(); nr_flows],
            applications: vec![0; nr_flows],
            crowded: 0,
            polling: 0,
            busy_polls: 0,
            saturated: Vec::new(),
        };
        world
            .facts
            .cpus
            .iter_mut()
            .for_each(|cpu| cpu.capacity = WHOLE as u16);
        let everyone = Vec::from_iter(0..NR_CPUS as u16);
        world.near(&vec![everyone; NR_CPUS as usize]);
        world
    }

    /// Sets the CPUs among which an idle one is searched, by CPU.
    pub fn near(&mut self, near: &[Vec<u16>]) {
        for (cpu, near) in self.facts.cpus.iter_mut().zip(near) {
            cpu.near[..near.len()].copy_from_slice(near);
            cpu.nr_near = near.len() as u16;
        }
    }

    pub fn hash(flow: usize) -> u32 {
        (flow as u32).wrapping_mul(0x9e37_79b1)
    }

    /// Sets the CPU of a flow's application, or INLINE if it polls.
    pub fn application(&mut self, flow: usize, location: u32) {
        self.applications[flow] =
            native::sock_flow_entry(Self::hash(flow), location as u16, self.facts.cpu_mask);
    }

    /// A poll with one frame.
    pub fn frame(&mut self, flow: usize) -> rx_verdict {
        self.facts.nr_polls += 1;
        self.next_frame(flow)
    }

    /// Another frame of the poll.
    pub fn next_frame(&mut self, flow: usize) -> rx_verdict {
        let cpu = self.polling;
        self.facts.sock_flow = self.applications[flow];
        let verdict = native::rx_steer(
            &mut self.facts,
            &mut self.q,
            &mut self.backlogs,
            &self.map,
            &mut self.flows[flow],
            Self::hash(flow),
            cpu,
        );
        self.serve();
        verdict
    }

    /// Fills each backlog according to `crowded`.
    pub fn serve(&mut self) {
        for (cpu, b) in self.backlogs.iter_mut().enumerate() {
            let waiting = LIMIT * 3 / 4 * (self.crowded >> cpu & 1);
            b.tail = b.tail.max(waiting);
            b.dequeued = b.tail - waiting;
        }
    }

    /// Ends a window in which polls and all work took these 1024ths of the polling CPU.
    pub fn window(&mut self, polls: u32, all: u32) {
        let now = self.q.load.window_start + WINDOW_NS;
        self.q.load.poll_ns = u64::from(polls) * WINDOW_NS / u64::from(WHOLE);
        (self.q.load.nr_polls, self.q.load.nr_busy_polls) = (POLLS, self.busy_polls);
        self.q.load.nr_exhausted = POLLS - self.busy_polls;
        let ends = self.q.load.window;
        native::load_window(&mut self.q, &mut self.trial, 0, now, all, 0);
        match self.q.load.pressure {
            RELAXED => self.saturated.clear(),
            FULL => {}
            _ => self.saturated.push(ends),
        }
    }

    /// Whether the CPU was saturated when the flow last had packets, or is so now.
    fn may_leave(&self, flow: &rps_dev_flow) -> bool {
        let now = self.q.load.window;
        if flow.window == now {
            return flow.may_leave != 0;
        }
        let mut saturated = self.saturated.iter().filter(|&&w| now - w <= 32);
        saturated.any(|&w| w == flow.window || w + 1 == now)
    }

    pub fn bit(bits: &mut u64, cpu: u32, set: bool) {
        *bits = *bits & !(1 << cpu) | u64::from(set) << cpu;
    }

    pub fn is_idle(&self, cpu: u16) -> bool {
        self.facts.idle >> cpu & 1 == 1
    }

    /// Whether packets can be processed on this CPU by redirect.
    pub fn is_elsewhere(&self, cpu: u16) -> bool {
        u32::from(cpu) != self.polling && self.backlogs[usize::from(cpu)].closed == 0
    }

    /// A CPU as a location.
    pub fn location(&self, cpu: u16) -> u16 {
        match u32::from(cpu) == self.polling {
            true => INLINE,
            false => cpu,
        }
    }

    /// The cost in ns per window of a flow that sends a frame.
    pub fn cost(&self, flow: &rps_dev_flow) -> u64 {
        let inline_ns = match self.q.load.inline_ns {
            0 => 2000 * 16,
            known => known,
        };
        (u64::from(flow.load) + 1) * u64::from(inline_ns) / 16
    }

    /// This cost, which the polling CPU measured, as a share of a CPU's time, in 1/1024.
    pub fn share(&self, flow: &rps_dev_flow, cpu: u16) -> u32 {
        let [here, there] =
            [self.polling as usize, cpu.into()].map(|cpu| u64::from(self.facts.cpus[cpu].capacity));
        let share = self.cost(flow) * u64::from(WHOLE) * here / (WINDOW_NS * there);
        share.min(u64::from(WHOLE)) as u32
    }

    /// The present time in half-lives of the scheduler's averages.
    fn half_lives(&self) -> u32 {
        (self.q.load.window_start / HALF_LIFE_NS) as u32
    }

    /// Shares of the CPUs' time given to flows lately. Those given by a queue whose window began
    /// later than this one's count in full.
    pub fn given(&self) -> Vec<u32> {
        let given = |cpu: &cpu| {
            let age = i64::from(self.half_lives()) - i64::from(cpu.given_at);
            let half_lives = u32::try_from(age).unwrap_or(0);
            cpu.given.checked_shr(half_lives).unwrap_or(0)
        };
        let cpus = &self.facts.cpus[..NR_CPUS as usize];
        cpus.iter().map(given).collect()
    }

    /// Whether the CPU has a crowded backlog, or too many tasks.
    pub fn is_crowded(&self, cpu: u16) -> bool {
        self.crowded >> cpu & 1 > 0 || self.facts.demand[usize::from(cpu)] > 8 * WHOLE
    }

    /// Whether the CPU has room for the flow, with these shares given before.
    pub fn has_room(&self, flow: &rps_dev_flow, cpu: u16, given: &[u32]) -> bool {
        let (busy, given) = (self.facts.busy[usize::from(cpu)], given[usize::from(cpu)]);
        let needed = busy + given + self.share(flow, cpu);
        let seldom = busy < WHOLE * 63 / 64 && given < WHOLE / 32;
        let too_much = self.is_alone(flow) && needed > WHOLE * 9 / 8;
        !self.is_crowded(cpu) && !too_much && (needed <= WHOLE * 7 / 8 || seldom)
    }

    /// Whether the flow had 63/64 of the frames of the last window.
    fn is_alone(&self, flow: &rps_dev_flow) -> bool {
        u64::from(flow.load) * 64 >= u64::from(self.q.load.received) * 63
    }

    /// The nearest idle CPU with room for the flow; the polling CPU is idle while it has room.
    pub fn idle_near(&self, flow: &rps_dev_flow, cpu: u16, given: &[u32]) -> Option<u16> {
        let center = &self.facts.cpus[usize::from(cpu)];
        let mut near = center.near[..center.nr_near as usize].iter().copied();
        let near = near.find(|&near| {
            if u32::from(near) == self.polling {
                return self.q.load.pressure == RELAXED;
            }
            self.is_elsewhere(near) && self.is_idle(near) && self.has_room(flow, near, given)
        });
        near.map(|near| self.location(near))
    }

    /// Changes the load from a number: everything except flows and tables.
    pub fn load(&mut self, number: u32) {
        let [a, b, c, d] = number.to_le_bytes().map(u32::from);
        // The program reads the load once per window.
        self.backlogs.iter_mut().for_each(|b| b.looked = 0);
        let cpu = a % NR_CPUS;
        let share = b % 5 * 256;
        match c % 11 {
            0 | 1 => Self::bit(&mut self.facts.idle, cpu, b % 2 > 0),
            2 => self.facts.busy[cpu as usize] = share,
            3 => self.facts.demand[cpu as usize] = share * 4,
            4 => Self::bit(&mut self.crowded, cpu, b % 4 == 0),
            5 => self.facts.consumer_waits = b % 2,
            // Up to 2 ms a frame, so that few frames make a CPU busy.
            6 => self.q.load.inline_ns = b % 5 * 8_000_000,
            7 => self.busy_polls = b % (POLLS + 1),
            8 => self.facts.cpus[cpu as usize].capacity = [WHOLE, 446, 1][b as usize % 3] as u16,
            // Another queue's packets follow; its window began up to 128 ms earlier or later.
            9 => {
                let start = &mut self.q.load.window_start;
                *start = start.saturating_add_signed((i64::from(b) - 128) * 1_000_000);
            }
            _ => self.window(b % 3 * 512, d % 3 * 512),
        }
        self.serve();
    }

    /// Changes the CPUs of applications, the map, and the state of CPUs from a number.
    pub fn stir(&mut self, number: u32) {
        let [a, b, c, _] = number.to_le_bytes().map(u32::from);
        let cpu = a % NR_CPUS;
        match c % 4 {
            0 => {
                let location = if a < 32 { INLINE.into() } else { cpu };
                self.application(b as usize % self.flows.len(), location);
            }
            1 => {
                let first = b as usize * SLOTS / 256;
                let location = if a < 32 { INLINE } else { cpu as u16 };
                self.map.location[first..].fill(location);
            }
            2 if cpu != self.polling => self.backlogs[cpu as usize].closed = u64::from(b % 2),
            3 if b < 64 => {
                self.polling = cpu;
                self.backlogs[cpu as usize].closed = 0;
            }
            _ => {}
        }
    }

    /// A wrong decision of a flow, in words; `before` is the state before its frame.
    pub fn mistake(&self, before: &Before, flow: &rps_dev_flow) -> Option<&'static str> {
        let was = &before.flow;
        let begins = was.epoch != self.q.epoch;
        let wanted = self.location(was.wanted);
        let follows = was.wanted == was.base && wanted != INLINE && flow.wanted == flow.base;
        let leaves = (begins || wanted == INLINE) && flow.location != INLINE && !follows;
        let chosen = flow.reason == IDLE_CPU
            && (was.reason, wanted) != (IDLE_CPU, self.location(flow.wanted));
        let adapts = self.q.policy & ADAPT != 0;
        let now = self.location(flow.wanted);
        let goes = now != INLINE && now != wanted && !follows;
        let given = &before.given;
        let mut cpus = self.facts.cpus.iter().zip(&before.given_at);
        let goes_back = cpus.any(|(cpu, at)| cpu.given_at < *at);
        if flow.location != INLINE && !self.is_elsewhere(flow.location) {
            Some("a CPU that is offline, or polls")
        } else if chosen && self.idle_near(flow, flow.base, given) != Some(flow.wanted) {
            Some("not the nearest idle CPU with room")
        } else if adapts && self.q.load.pressure == RELAXED && flow.location != INLINE {
            Some("elsewhere, although there is room")
        } else if adapts && leaves && !before.may_leave {
            Some("left INLINE, where the CPU was not saturated")
        } else if adapts && leaves && flow.base == INLINE && before.followed {
            Some("left its application, which is on the polling CPU or polls")
        } else if adapts && goes && !self.has_room(flow, flow.wanted, given) {
            Some("went to a CPU without room")
        } else if goes_back {
            Some("the time in which a CPU was given to flows went back")
        } else {
            None
        }
    }

    /// The state on which the decision of a flow depends.
    pub fn before(&self, flow: usize) -> Before {
        let at = native::sock_flow_location(
            self.applications[flow],
            Self::hash(flow),
            self.facts.cpu_mask,
        );
        Before {
            flow: self.flows[flow],
            followed: self.q.policy & FOLLOW != 0
                && (at == INLINE || u32::from(at) == self.polling),
            may_leave: self.may_leave(&self.flows[flow]),
            given: self.given(),
            given_at: self.facts.cpus.map(|cpu| cpu.given_at),
        }
    }
}

/// See [`World::before`].
#[derive(Debug)]
pub struct Before {
    flow: rps_dev_flow,
    /// The application polls the queue, or is on the CPU that does.
    followed: bool,
    may_leave: bool,
    given: Vec<u32>,
    given_at: [u32; 64],
}

pub fn loaded() -> impl Strategy<Value = u16> {
    proptest::sample::select(&LOADED)
}

/// For each CPU, a random subset of the CPUs in random order.
pub fn near() -> impl Strategy<Value = Vec<Vec<u16>>> {
    let cpus = Vec::from_iter(0..NR_CPUS as u16);
    let some = subsequence(cpus, 0..=NR_CPUS as usize).prop_shuffle();
    proptest::collection::vec(some, NR_CPUS as usize)
}

/// Random steps as numbers, which proptest generates and shrinks fastest.
pub fn numbers(max: usize) -> impl Strategy<Value = Vec<u32>> {
    proptest::collection::vec(any::<u32>(), 0..max)
}

pub const NR_FLOWS: usize = 6;

/// A step of [`run`].
pub enum Step {
    Frame(usize),
    Load,
    Stir,
}

pub fn step(number: u32) -> Step {
    match number >> 24 {
        0..160 => Step::Frame(number as usize % NR_FLOWS),
        160..232 => Step::Load,
        _ => Step::Stir,
    }
}

/// Runs the steps; returns the first wrong decision, if any.
pub fn run(policy: u16, near: &[Vec<u16>], numbers: &[u32]) -> Result<(), String> {
    let mut world = World::new(policy, NR_FLOWS);
    world.near(near);
    for (i, &number) in numbers.iter().enumerate() {
        match step(number) {
            Step::Load => world.load(number),
            Step::Stir => world.stir(number),
            Step::Frame(flow) => {
                let before = world.before(flow);
                world.frame(flow);
                if let Some(mistake) = world.mistake(&before, &world.flows[flow]) {
                    let load = world.q.load;
                    return Err(format!(
                        "{mistake}, at {i}: {before:?}, {:?}, {load:?}",
                        world.flows[flow]
                    ));
                }
            }
        }
    }
    Ok(())
}
