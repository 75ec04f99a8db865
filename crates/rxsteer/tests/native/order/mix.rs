// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random events: packets, and everything that moves flows.

use proptest::prelude::*;
pub use rxsteer::datapath::rps_map::INLINE;
use rxsteer::types::rx_policy;

use crate::sim::gro::Kind;
use crate::sim::path::Path;
use crate::sim::shape::{End, Event, Kernel, Shape};

pub const FOLLOW: u16 = rx_policy::RX_FOLLOW.0 as u16;

/// Flows that collide in the tables in every way: one slot, neighbouring slots of one eighth of the
/// map, one entry of the sock_flow_table, or nothing in common.
pub const HASHES: [u32; 8] = [
    0x0000_0010,
    0x0000_5018,
    0x0040_0020,
    0x0040_0120,
    0x4000_0001,
    0x8000_0002,
    0xc000_0010,
    0xffff_fff8,
];

pub fn shapes() -> impl Strategy<Value = Shape> {
    let limit = prop_oneof![Just(1), Just(4), Just(12), Just(16), Just(40)];
    let batch = prop_oneof![Just(1), Just(16)];
    let flow_limit = prop_oneof![Just(0), Just(123)];
    (
        0..Kernel::ALL.len(),
        2u32..5,
        limit,
        0u32..12,
        0u32..6,
        batch,
        flow_limit,
    )
        .prop_map(
            |(kernel, nr_cpus, limit, flow_order, sock_flow_order, driver_batch, flow_limit)| {
                Shape {
                    kernel: Kernel::ALL[kernel],
                    nr_cpus,
                    limit,
                    hashes: HASHES.to_vec(),
                    flow_order,
                    sock_flow_order,
                    driver_batch,
                    flow_limit,
                    fault: None,
                }
            },
        )
}

/// Random events as numbers, which proptest generates and shrinks fastest.
pub fn events(max: usize) -> impl Strategy<Value = Vec<u32>> {
    proptest::collection::vec(any::<u32>(), 0..max)
}

pub fn kind(number: u32) -> Kind {
    [Kind::Merge, Kind::Merge, Kind::Push, Kind::Normal][number as usize % 4]
}

pub fn end(number: u32) -> End {
    [End::Complete, End::CompleteOld, End::Budget, End::Busy][number as usize % 4]
}

/// Distribution of events: one that makes some frequent makes others rare.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// number of flows that send
    pub flows: usize,
    /// most frames of a burst, and most steps of a thread
    pub burst: u32,
    pub steps: u32,
    /// events of 256 that change what flows want; the same for events of user space
    pub stir: u32,
    /// flows are at their wanted locations at the start
    pub warm: bool,
    /// policies depend on the load, which changes
    pub load: bool,
}

pub fn mixes() -> impl Strategy<Value = Mix> {
    let flows = prop_oneof![Just(2), Just(HASHES.len())];
    let burst = prop_oneof![Just(1), Just(4), Just(24)];
    let steps = prop_oneof![Just(1), Just(6), Just(40)];
    let stir = prop_oneof![Just(8), Just(64)];
    ((flows, burst, steps, stir), any::<bool>(), any::<bool>()).prop_map(
        |((flows, burst, steps, stir), warm, load)| Mix {
            flows,
            burst,
            steps,
            stir,
            warm,
            load,
        },
    )
}

/// Upper bound of policies, which are sets of three bits.
pub const POLICIES: u16 = (FOLLOW | (rx_policy::RX_IDLE.0 | rx_policy::RX_ADAPT.0) as u16) + 1;

/// Location of an application: a CPU, or INLINE if it polls.
pub fn application(number: u32, nr_cpus: u32) -> u16 {
    match number % (nr_cpus + 1) {
        cpu if cpu == nr_cpus => INLINE,
        cpu => cpu as u16,
    }
}

/// The event of a number, and its repetitions.
pub fn event(number: u32, nr_cpus: u32, mix: Mix) -> (Event, u32) {
    let [which, a, b, c] = number.to_le_bytes().map(u32::from);
    let (cpu, flow) = (a % nr_cpus, a as usize % mix.flows);
    let once = |event| (event, 1);
    if which < mix.stir {
        return once(match c % if mix.load { 24 } else { 16 } {
            0..4 => Event::Application(flow, application(b, nr_cpus)),
            4..6 => {
                let (first, last) = [(0, 1023), (0, 0), (0, 255), (256, 1023)][b as usize % 4];
                let location = if a < 48 { INLINE } else { cpu as u16 };
                Event::Map(first, last, location)
            }
            6 if mix.load => Event::Policy(b as u16 % POLICIES),
            6 => Event::Policy(if b % 3 > 0 { FOLLOW } else { 0 }),
            7..9 => Event::Make,
            9 if b % 2 > 0 => Event::Vanish(1 + b as usize % 5),
            9 => Event::Lose(1 + b as usize % 3),
            10 => Event::Online(cpu, b % 3 > 0),
            11 if b < 64 => Event::Return,
            11 if b < 128 => Event::Shed,
            11..14 => Event::Check,
            // 0, more than a relaxed CPU has, and all of the time.
            16..20 => Event::Window(a % 3 * 512, b % 3 * 512),
            20..22 => Event::Cpu(cpu, b % 2 > 0, [b % 5, c % 5].map(|n| n * 256)),
            22 => Event::Waits(b % 2 > 0),
            _ => Event::Interrupt(cpu),
        });
    }
    match which % 16 {
        0..6 => (Event::Frame(flow, kind(b)), 1 + c % mix.burst),
        6..8 => once(Event::EndPoll(end(b))),
        8..10 => once(Event::PollTraced(cpu)),
        10 if b < 32 => once(Event::OldThread(1 + c % 8)),
        10 if b < 96 => once(Event::Jiffy),
        _ => once(Event::Thread(cpu, 1 + c % mix.steps)),
    }
}

/// A path with flows that want different CPUs, some by RPS and some by RFS.
pub fn begun(shape: &Shape) -> Path {
    let mut path = Path::new(shape.clone());
    for slot in 0..4u16 {
        let cpu = slot % shape.nr_cpus as u16;
        path.apply(Event::Map(slot * 256, slot * 256 + 255, cpu));
    }
    path.apply(Event::Policy(FOLLOW));
    path
}

/// A poll that receives these flows' frames; then every component runs until none has work.
pub fn round(path: &mut Path, shape: &Shape, frames: &[usize]) {
    for &flow in frames {
        path.apply(Event::Frame(flow, Kind::Merge));
    }
    path.apply(Event::EndPoll(End::Complete));
    for cpu in 0..shape.nr_cpus {
        path.apply(Event::PollTraced(cpu));
    }
    path.apply(Event::Make);
    rest(path, shape);
}

/// Threads run until they sleep.
pub fn rest(path: &mut Path, shape: &Shape) {
    for cpu in 0..shape.nr_cpus {
        while path.thread(cpu).is_some_and(|t| !t.asleep()) {
            path.apply(Event::Thread(cpu, 1));
        }
    }
    path.apply(Event::OldThread(1000));
}

/// Runs the events; returns the first error, if any.
pub fn run(shape: &Shape, mix: Mix, events: &[u32]) -> Result<Path, String> {
    let mut path = begun(shape);
    for _ in 0..if mix.warm { 4 } else { 0 } {
        round(&mut path, shape, &[0, 1, 2, 3, 4, 5, 6, 7]);
    }
    for (i, &number) in events.iter().enumerate() {
        let (event, times) = event(number, shape.nr_cpus, mix);
        for _ in 0..times {
            path.apply(event);
        }
        if path.stack.nr_overtaken > 0 {
            return Err(format!("overtaken at event {i}, {event:?}"));
        }
        if shape.fault.is_none() {
            path.balance()?;
            if path.nr_overflows > 0 {
                return Err(format!("a ring had no room at event {i}, {event:?}"));
            }
        }
    }
    Ok(path)
}
