// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters and events of the threads that generate load.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use hdrhistogram::Histogram;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::EventFd;
use socket2::Socket;

/// Range of the histogram, ns, and its significant digits.
pub(super) const LATENCY_MIN: u64 = 100;

pub(super) const LATENCY_MAX: u64 = 60_000_000_000;

pub(super) const LATENCY_DIGITS: u8 = 3;

/// Interval of the checks for lost requests and for the end of the load.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(50);

pub(super) const COUNTED: u8 = 1;

pub(super) const OVER: u8 = 2;

/// State shared by all threads.
pub(super) struct Shared {
    pub(super) phase: AtomicU8,
    /// Bytes written to streams.
    pub(super) written: AtomicU64,
    /// Signalled when a thread fails.
    pub(super) failed: EventFd,
}

impl Shared {
    pub(super) fn is_counted(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == COUNTED
    }

    pub(super) fn is_over(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == OVER
    }
}

/// Counts of one thread.
pub(super) struct Tally {
    pub(super) latency: Histogram<u64>,
    pub(super) out_of_range: u64,
    pub(super) lost: u64,
}

impl Tally {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            latency: Histogram::new_with_bounds(LATENCY_MIN, LATENCY_MAX, LATENCY_DIGITS)?,
            out_of_range: 0,
            lost: 0,
        })
    }

    pub(super) fn count(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.out_of_range += u64::from(ns > LATENCY_MAX);
        self.latency.saturating_record(ns.min(LATENCY_MAX));
    }

    pub(super) fn add(&mut self, other: &Self) -> Result<()> {
        self.latency.add(&other.latency)?;
        self.out_of_range += other.out_of_range;
        self.lost += other.lost;
        Ok(())
    }
}

/// Readiness of many sockets.
pub(super) struct Ready {
    pub(super) epoll: Epoll,
    pub(super) events: [EpollEvent; 256],
}

impl Ready {
    pub(super) fn new(sockets: &[&Socket], flags: EpollFlags) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (n, socket) in (0..).zip(sockets) {
            epoll.add(socket, EpollEvent::new(flags, n))?;
        }
        Ok(Self {
            epoll,
            events: [EpollEvent::empty(); 256],
        })
    }

    /// Indices of the ready sockets; empty after [`CHECK_INTERVAL`].
    pub(super) fn wait(&mut self) -> Result<impl Iterator<Item = usize>> {
        let timeout = EpollTimeout::from(CHECK_INTERVAL.as_millis() as u16);
        let count = match self.epoll.wait(&mut self.events, timeout) {
            Err(Errno::EINTR) => 0,
            count => count?,
        };
        Ok(self.events[..count].iter().map(|e| e.data() as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::peer::latency::Latency;

    #[test]
    fn what_is_out_of_range_is_told() {
        let mut tally = Tally::new().unwrap();
        assert_eq!(Latency::of(&tally.latency, tally.out_of_range), None);
        for ms in [1, 2, 59_000, 61_000] {
            tally.count(Duration::from_millis(ms));
        }
        let mut sum = Tally::new().unwrap();
        sum.add(&tally).unwrap();
        sum.add(&tally).unwrap();
        let latency = Latency::of(&sum.latency, sum.out_of_range).unwrap();
        assert_eq!((latency.count, latency.out_of_range), (8, 2));
        let near = |us: f64, expected: f64| (us / expected - 1.0).abs() < 1e-3;
        assert!(near(latency.min, 1e3), "{latency:?}");
        assert!(near(latency.p50, 2e3), "{latency:?}");
        assert!(near(latency.max, 60e6), "{latency:?}");
        assert!(near(latency.mean, 119_003e3 / 4.0), "{latency:?}");
    }
}
