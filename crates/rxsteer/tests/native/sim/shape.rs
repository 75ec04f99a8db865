// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration of a path, and its events.

pub use rxsteer::datapath::rps_map::{INLINE, INLINE_SHED, NO_CPU};
use rxsteer::types::rx_policy;

use super::gro::Kind;
use super::thread::Thread;

/// Policy bit: flows follow their applications.
pub const FOLLOW: u16 = rx_policy::RX_FOLLOW.0 as u16;

/// Length of a window in ns.
pub const WINDOW_NS: u64 = 10_000_000;

/// Ring slots beyond the limit.
pub const RING_SLACK: usize = 16;

/// Size of a bulk queue (`CPU_MAP_BULK_SIZE`).
pub const BULK: usize = 8;

/// Differences between kernels.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// A cpumap's threads do GRO (6.15).
    pub gro: bool,
    /// The tracepoint of a cpumap's thread fires after the batch was delivered (before 6.12).
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

/// Configuration of a path.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The kernel's variant.
    pub kernel: Kernel,
    /// CPUs, 64 at most.
    pub nr_cpus: u32,
    /// Limit of frames in a backlog.
    pub limit: u32,
    /// The flows' hashes.
    pub hashes: Vec<u32>,
    /// log2 of the slots of the `dev_flow_table`, 31 at most
    pub flow_order: u32,
    /// log2 of the entries of the `sock_flow_table`
    pub sock_flow_order: u32,
    /// Packets that the driver collects before it passes them to GRO.
    pub driver_batch: usize,
    /// The share of a queue's frames, in 1/1024, from which a flow is large; 0: none is.
    pub flow_limit: u32,
    /// A fault to inject, for controls of the tests.
    pub fault: Option<Fault>,
}

/// Faults of the data path; the tests must detect each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The rule of order is off.
    Unguarded,
    /// The NAPI's GRO is always empty.
    NapiGroEmpty,
    /// Every frame is a poll of its own.
    PollEnds,
    /// A thread's GRO is always empty.
    ThreadGroEmpty,
    /// All threads count as asleep.
    Sleeping,
    /// User space reads a thread's state long before `dequeued`.
    SleepingBefore,
    /// The state of a new thread is trusted.
    FreshBelieved,
    /// `head` includes the batch that is about to be delivered.
    HeadAhead,
    /// Each batch counts one frame too many.
    TakenMore,
    /// `last_qtail` is the tail before the frame.
    QtailBefore,
    /// Lost frames are counted twice.
    LostTwice,
    /// A new epoch begins before all flows have returned to INLINE.
    EpochAbroad,
    /// The entry of an offline CPU is replaced although it is not empty.
    RemovedFull,
    /// No thread ever sleeps.
    Sleepless,
    /// The NAPI's GRO is never empty.
    NapiGroHolds,
    /// Frames of the present poll are settled, although they may be in the bulk queue.
    Unflushed,
    /// A thread in `TASK_INTERRUPTIBLE` counts as blocked.
    BlockedEarly,
    /// No thread is ever blocked.
    Unsettled,
    /// Another NAPI instance of the queue is never learnt; the first one's memory reads as empty.
    NapiKept,
    /// A daemon that is stopped detaches before all flows have returned to INLINE.
    DetachedEarly,
    /// Threads of a daemon that was killed count for the next one.
    OrphansCounted,
}

/// How a poll ends, and which packets its GRO delivers.
#[derive(Clone, Copy, Debug)]
pub enum End {
    /// All work done: all packets.
    Complete,
    /// All work done with `gro_flush_timeout`: packets older than this jiffy.
    CompleteOld,
    /// Budget used up: all packets, or with HZ >= 1000 those older than this jiffy.
    Budget,
    /// An application polled: none of the held packets.
    Busy,
}

/// A step of one component. An event that is not possible at present does nothing.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// A flow's frame is received, in the present poll or in a new one on the CPU of the interrupt.
    Frame(usize, Kind),
    /// The poll's function returns.
    EndPoll(End),
    /// The tracepoint of a poll that ended on this CPU.
    PollTraced(u32),
    /// Interrupts go to this CPU from now on.
    Interrupt(u32),
    /// The thread of a CPU executes this number of steps.
    Thread(u32, u32),
    /// The oldest thread that was told to end executes this number of steps.
    OldThread(u32),
    /// A jiffy passes.
    Jiffy,
    /// A flow's application receives data on this CPU, or polls: `RPS_INLINE`.
    Application(usize, u16),
    /// Map slots, from the first to the last, get this location.
    Map(u16, u16, u16),
    /// The policy: bits of `enum rx_policy`.
    Policy(u16),
    /// A window ends in which polls and all work took these 1024ths of the polling CPU.
    Window(u32, u32),
    /// Idle state of a CPU, its load, and the demand for it, in 1/1024.
    Cpu(u32, bool, [u32; 2]),
    /// Whether applications wait for packets.
    Waits(bool),
    /// User space creates the requested backlogs.
    Make,
    /// The ring has no room for this number of frames of the next bulk.
    Lose(usize),
    /// The driver drops this number of the poll's redirected frames before the kernel sees them.
    Vanish(usize),
    /// A CPU goes offline, or comes back.
    Online(u32, bool),
    /// User space checks whether the backlogs that it waits for are empty.
    Check,
    /// User space starts to return every flow to INLINE, for a new epoch.
    Return,
    /// User space stops waiting for this return, and for backlogs of offline CPUs: flows are shed.
    Shed,
    /// Something fails around the data path.
    Fail(Failure),
}

/// Failures around the data path (daemon.rs).
#[derive(Clone, Copy, Debug)]
pub enum Failure {
    /// The next creations of backlogs fail, this number of them: no memory, no thread.
    Makes(u32),
    /// The next removals of entries fail.
    Removals(u32),
    /// The next change of tables fails: the old ones stay, under a new epoch.
    Tables,
    /// Requests for backlogs are lost.
    Requests,
    /// `kill -9`
    Kill,
    /// SIGTERM
    Stop,
    /// The daemon starts.
    Start,
    /// The queue gets another NAPI instance.
    Napi,
    /// Time passes at once, in jiffies.
    Clock(u64),
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
