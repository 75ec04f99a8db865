// SPDX-License-Identifier: MIT OR Apache-2.0
//! The receive queue of a veth, a ring of 256 frames, as the counters of both ends show it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::ethtool::Ethtool;
use super::link::{End, Link};

/// A veth ring holds 256 frames (VETH_RING_SIZE) and frees consumed slots in batches of 16
/// (ptr_ring): above this fill, a burst may not fit.
const RING_ROOM: u64 = 256 - 16;

/// A ring from which nothing was dequeued for this time is empty.
const QUIET: Duration = Duration::from_millis(25);

/// Limit on waiting for a receiver that dequeues nothing, or for a free page pool id.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

/// A veth before Linux 5.7.
const UNCOUNTED: &str = "this kernel's veth doesn't count what it takes and refuses";

/// Results of sending into a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingCounts {
    /// Frames enqueued in the receiver's ring.
    pub accepted: u64,
    /// Frames refused because the ring was full.
    pub refused: u64,
}

pub(super) struct Ring {
    tester: Ethtool,
    dut: Ethtool,
    accepted: String,
    refused: String,
    dequeued: String,
    /// Several CPUs send into it. They update the sender's counters without a lock, so additions
    /// get lost; the receiver's counter has a single writer, its NAPI.
    pub(super) shared: bool,
    /// `dequeued` less `accepted` of the empty ring: at the start of the generator, or the largest
    /// difference seen since.
    offset: u64,
}

impl Ring {
    pub(super) fn new(link: &Link, queue: u32) -> Result<Self> {
        let open = |end: &End| end.netns.run(|| Ethtool::open(&end.name));
        let mut ring = Self {
            tester: open(&link.tester)?,
            dut: open(&link.dut)?,
            accepted: format!("tx_queue_{queue}_xdp_xmit"),
            refused: format!("tx_queue_{queue}_xdp_xmit_errors"),
            dequeued: format!("rx_queue_{queue}_xdp_packets"),
            shared: false,
            offset: 0,
        };
        ring.offset = ring.dequeued()?.wrapping_sub(ring.counts()?.accepted);
        Ok(ring)
    }

    /// Counts since the device was created. Frames still in a shared ring are not yet accepted.
    pub(super) fn counts(&self) -> Result<RingCounts> {
        let counters = self.tester.counters()?;
        let count = |name: &str| counters.get(name).copied().context(UNCOUNTED);
        Ok(RingCounts {
            accepted: match self.shared {
                true => self.dequeued()?,
                false => count(&self.accepted)?,
            },
            refused: count(&self.refused)?,
        })
    }

    /// Frames accepted in total, for use after the last one was sent. Waits until a shared ring is
    /// empty.
    pub(super) fn emptied(&self) -> Result<u64> {
        let start = Instant::now();
        let mut accepted = self.counts()?.accepted;
        loop {
            if self.shared {
                std::thread::sleep(QUIET);
            }
            let now = self.counts()?.accepted;
            if now == accepted || start.elapsed() > TIMEOUT {
                return Ok(now);
            }
            accepted = now;
        }
    }

    /// Frames polled out of the ring, counted at the end of each poll.
    pub(super) fn dequeued(&self) -> Result<u64> {
        let counters = self.dut.counters()?;
        let counter = counters.get(self.dequeued.as_str());
        counter.copied().context(UNCOUNTED)
    }

    /// Waits until `burst` more frames fit.
    pub(super) fn wait_for_room(&mut self, burst: u64) -> Result<()> {
        let start = Instant::now();
        let accepted = self.counts()?.accepted;
        loop {
            let dequeued = self.dequeued()?.wrapping_sub(accepted);
            let held = self.offset.wrapping_sub(dequeued) as i64;
            if held < 0 {
                // The ring held frames of another generator when this one started.
                self.offset = dequeued;
            }
            if held.max(0) as u64 + burst <= RING_ROOM {
                return Ok(());
            }
            ensure!(
                start.elapsed() < TIMEOUT,
                "the receiver takes no frames: has its device a NAPI, and is that running?"
            );
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}
