// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a path is like, and what happens on it.

use rxsteer::types::{rps_location, rx_policy};

use super::gro::Kind;
use super::thread::Thread;

/// The queue's flows follow their applications.
pub const FOLLOW: u16 = rx_policy::RX_FOLLOW.0 as u16;

/// A turn's length in ns.
pub const TURN_NS: u64 = 10_000_000;

/// Ring slots beyond the limit.
pub const RING_SLACK: usize = 16;

/// Frames of a bulk queue (`CPU_MAP_BULK_SIZE`).
pub const BULK: usize = 8;

/// What kernels differ in.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// A cpumap's threads do GRO (6.15).
    pub gro: bool,
    /// The tracepoint of a cpumap's thread fires after the batch went up (before 6.12).
    pub traces_after: bool,
    /// HZ >= 1000: GRO's flushes under load spare the packets of the present jiffy.
    pub hz1000: bool,
}

impl Kernel {
    /// Linux 6.1, 6.12, and 6.18 with ticks of 4 ms and of 1 ms.
    pub const ALL: [Self; 4] = [
        Self::new(false, true, false),
        Self::new(false, false, false),
        Self::new(true, false, false),
        Self::new(true, false, true),
    ];

    pub const fn new(gro: bool, traces_after: bool, hz1000: bool) -> Self {
        Self {
            gro,
            traces_after,
            hz1000,
        }
    }
}

/// What the path is made of.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The kernel's variant.
    pub kernel: Kernel,
    /// CPUs, 64 at most.
    pub nr_cpus: u32,
    /// Frames a backlog may hold.
    pub limit: u32,
    /// The flows' hashes.
    pub hashes: Vec<u32>,
    /// log2 of the slots of the `dev_flow_table`, 31 at most
    pub flow_order: u32,
    /// log2 of the entries of the `sock_flow_table`
    pub sock_flow_order: u32,
    /// Packets that the driver keeps before it passes them to GRO.
    pub driver_batch: usize,
    /// The part of a queue's frames, of 1024, that makes a flow large; 0: none is.
    pub flow_limit: u32,
    /// What the path is not told truly: tests' controls.
    pub lie: Option<Lie>,
}

/// Faults of the data path, each of which must be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// The rule of order is off.
    Unguarded,
    /// The NAPI's GRO is always empty.
    NapiGroEmpty,
    /// Every frame is a poll of its own.
    PollEnds,
    /// A thread's GRO is always empty.
    ThreadGroEmpty,
    /// Every thread sleeps.
    Sleeping,
    /// User space reads a thread's state, long before it reads `taken`.
    SleepingBefore,
    /// A fresh thread's state is believed.
    FreshBelieved,
    /// `head` includes the batch that is about to go up.
    HeadAhead,
    /// A batch counts for one frame more.
    TakenMore,
    /// `last_qtail` is the tail before the frame.
    QtailBefore,
    /// Lost frames are counted twice.
    LostTwice,
    /// A new epoch begins although not all flows came home.
    EpochAbroad,
    /// An offline CPU's entry is made anew although it is not empty.
    RemovedFull,
    /// No thread ever sleeps.
    Sleepless,
    /// The NAPI's GRO is never empty.
    NapiGroHolds,
}

/// How a poll ends, and what becomes of what its GRO holds.
#[derive(Clone, Copy, Debug)]
pub enum End {
    /// All work done: everything goes up.
    Complete,
    /// All work done, `gro_flush_timeout` is set: what is older than this jiffy goes up.
    CompleteOld,
    /// The budget is used up: everything, or with HZ >= 1000 what is older.
    Budget,
    /// An application polled: nothing that is held.
    Busy,
}

/// Somebody's turn. What can't be done now is not done.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// A flow's frame is received: in the poll in progress, or a new one where interrupts go.
    Frame(usize, Kind),
    /// The poll's function returns.
    EndPoll(End),
    /// The tracepoint of a poll that has ended on this CPU.
    PollTraced(u32),
    /// Interrupts go to this CPU from now on.
    Interrupt(u32),
    /// The thread for this CPU goes so many steps.
    Thread(u32, u32),
    /// So does the one that was told to end.
    OldThread(u32),
    /// Time passes.
    Jiffy,
    /// A flow's application takes data on this CPU, or polls for it: `RPS_INLINE`.
    Application(usize, u16),
    /// The map's slots, from the first to the last, want this location.
    Map(u16, u16, u16),
    /// What flows do besides what RPS says: bits of `enum rx_policy`.
    Policy(u16),
    /// The queue's turn ends, in which so much of the polling CPU's time, of 1024 parts, went into
    /// polls, and into everything.
    Turn(u32, u32),
    /// Whether a CPU is idle; how busy it was lately, and how wanted, of 1024.
    Cpu(u32, bool, [u32; 2]),
    /// Whether applications have nothing to do before their next packet.
    Waits(bool),
    /// User space makes the backlogs that were asked for.
    Make,
    /// The ring will have no room for so many frames of the next bulk.
    Lose(usize),
    /// A CPU goes offline, or comes back.
    Online(u32, bool),
    /// User space looks whether what it waits for has drained.
    Check,
    /// User space begins to bring every flow home, for a new epoch.
    Home,
    /// It loses patience.
    Shed,
}

#[derive(Clone, Debug, Default)]
pub struct Cpu {
    pub nr_polls: u64,
    /// a poll's function has returned, and the tracepoint not fired
    pub owed: bool,
    /// the queue's program asked for the stamp since
    pub asked: bool,
    pub offline: bool,
}

#[derive(Clone, Debug)]
pub struct Entry {
    pub thread: Thread,
    pub id: u64,
    pub learnt: bool,
}

pub const INLINE: u16 = rps_location::RPS_INLINE.0 as u16;

pub const INLINE_SHED: u16 = rps_location::RPS_INLINE_SHED.0 as u16;

pub const NO_CPU: u16 = rps_location::RPS_NO_CPU.0 as u16;
