// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a wire sends through the steered device, and what becomes of it.

use std::ops::AddAssign;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::bed::{Bed, INTERRUPT_CPU};
use super::fit;
use super::flood::NR_CONNECTED;
use super::mode::{Active, Mode, Way};
use super::watch::Seen;
use crate::accounting::Queue;
use crate::lab::frame::Frames;
use crate::lab::jumper::Jumpers;
use crate::lab::sink::Sink;
use crate::lab::wire::{Wire, WireConfig};

/// Of the accepted packets, those that may be missing in the account: what was under way when the
/// counters were read.
const UNACCOUNTED: f64 = 0.001;

/// The last packets have gone through when none came for so long.
const QUIET: Duration = Duration::from_millis(25);

/// How long the last packets may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where the packets should arrive.
pub trait Receiver {
    /// Packets that it got so far.
    fn received(&self) -> u64;

    /// Packets that reached it so far and that it had no room for.
    ///
    /// # Errors
    /// When the kernel does not tell.
    fn dropped(&self) -> Result<u64>;
}

impl Receiver for Sink {
    fn received(&self) -> u64 {
        self.received()
    }

    fn dropped(&self) -> Result<u64> {
        self.dropped()
    }
}

impl Receiver for Jumpers {
    fn received(&self) -> u64 {
        self.received().sum()
    }

    fn dropped(&self) -> Result<u64> {
        Ok(self.report()?.dropped)
    }
}

/// What became of the packets of one wire, or of several together.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// Packets that the device took. What found its ring full is not among them: that tells of the
    /// generator, which shares a CPU with the thread that empties the ring.
    pub accepted: u64,
    /// Of these, those that the receiver got.
    pub delivered: u64,
    /// Those that it had no room for.
    pub dropped: u64,
    /// The part of it while the wire sent.
    pub meanwhile: Meanwhile,
    /// CPU time of the thread that polls the queue, ns, if one does.
    pub rx_cpu_ns: Option<u64>,
}

/// What is counted while a wire sends: without what lies in a queue when it stops.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meanwhile {
    /// For how long, s.
    pub seconds: f64,
    /// Packets that the device took.
    pub accepted: u64,
    /// Packets that the receiver got.
    pub delivered: u64,
}

impl AddAssign<&Self> for Traffic {
    fn add_assign(&mut self, other: &Self) {
        self.accepted += other.accepted;
        self.delivered += other.delivered;
        self.dropped += other.dropped;
        self.meanwhile.seconds += other.meanwhile.seconds;
        self.meanwhile.accepted += other.meanwhile.accepted;
        self.meanwhile.delivered += other.meanwhile.delivered;
        if let Some(ns) = other.rx_cpu_ns {
            *self.rx_cpu_ns.get_or_insert(0) += ns;
        }
    }
}

impl Traffic {
    /// Sends for `seconds`, as fast as the generator can or at `rate` frames per second, and waits
    /// until all of it has come or is lost.
    ///
    /// # Errors
    /// When something of the lab failed; [`Unfit`](super::Unfit) when the generator did not run.
    pub fn send(
        bed: &Bed,
        receiver: &dyn Receiver,
        frames: &Frames,
        rate: Option<u64>,
        seconds: f64,
    ) -> Result<Self> {
        // Whatever its priority, the scheduler may give the generator a whole tick while the thread
        // that empties the ring is runnable: at a rate, that would look like loss.
        let config = WireConfig {
            frames: frames.clone(),
            count: None,
            rate,
            lossless: rate.is_some(),
            window: None,
        };
        let rx_cpu_ns = || bed.nic.as_ref().map(|nic| nic.cpu_ns(0)).transpose();
        let (before, dropped_before) = (receiver.received(), receiver.dropped()?);
        let cpu_before = rx_cpu_ns()?;
        let wire = Wire::start(&bed.link, INTERRUPT_CPU, &config)?;
        let start = Instant::now();
        sleep(Duration::from_secs_f64(seconds));
        // What has been delivered by now had been accepted before.
        let meanwhile = Meanwhile {
            seconds: start.elapsed().as_secs_f64(),
            delivered: receiver.received() - before,
            accepted: wire.accepted()?,
        };
        let sent = wire.stop()?;
        settle(receiver)?;
        let cpu_after = rx_cpu_ns()?;
        fit!(
            meanwhile.accepted > 0,
            "the device accepted nothing: the generator did not run"
        );
        Ok(Self {
            accepted: sent.sent - sent.lost,
            delivered: receiver.received() - before,
            dropped: receiver.dropped()? - dropped_before,
            meanwhile,
            rx_cpu_ns: cpu_after
                .zip(cpu_before)
                .map(|(after, before)| after - before),
        })
    }

    /// Packets that the device took, per second.
    pub fn accepted_pps(&self) -> f64 {
        self.meanwhile.accepted as f64 / self.meanwhile.seconds
    }

    /// Packets that the receiver got meanwhile, per second.
    pub fn delivered_pps(&self) -> f64 {
        self.meanwhile.delivered as f64 / self.meanwhile.seconds
    }

    /// Of the packets that the device took, the share that did not arrive, then or later.
    pub fn loss(&self) -> f64 {
        1.0 - self.delivered as f64 / self.accepted as f64
    }
}

/// Waits until nothing more comes.
fn settle(receiver: &dyn Receiver) -> Result<()> {
    let start = Instant::now();
    let mut last = None;
    while start.elapsed() < PATIENCE {
        let now = Some((receiver.received(), receiver.dropped()?));
        if now == last {
            break;
        }
        last = now;
        sleep(QUIET);
    }
    Ok(())
}

/// Whether the way was in effect, and all packets are accounted for: those of `traffic`, all that
/// came since the way was switched on.
///
/// # Errors
/// [`Unfit`](super::Unfit), with the reason.
pub fn check(
    bed: &Bed,
    active: &Active<'_>,
    way: Way,
    traffic: &Traffic,
    seen: &Seen,
) -> Result<()> {
    bed.verify(active, way, seen, NR_CONNECTED)?;
    let status = active.status()?;
    let queue = status.as_ref().map(|s| &s.devices[0].queues[0]);
    let dropped = seen.softnet.values().map(|s| s.dropped).sum();
    account(way.mode, traffic, dropped, queue)
}

/// Whether all packets are accounted for. `dropped`: at the kernel's backlogs.
fn account(mode: Mode, traffic: &Traffic, dropped: u64, queue: Option<&Queue>) -> Result<()> {
    let arrived = traffic.delivered + traffic.dropped;
    let expected = match (mode, queue) {
        (_, Some(queue)) => {
            fit!(
                queue.received == traffic.accepted,
                "rxsteer received {} of {} frames",
                queue.received,
                traffic.accepted
            );
            queue.inline + queue.sums.delivered
        }
        // Its full rings are counted nowhere.
        (Mode::Cpumap, _) => return Ok(()),
        _ => traffic.accepted.saturating_sub(dropped),
    };
    let missing = arrived.abs_diff(expected) as f64 / traffic.accepted as f64;
    fit!(
        missing < UNACCOUNTED,
        "packets are unaccounted for: {expected} should have come to the receiver, and {arrived} did"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounting::Terms;
    use crate::bench::Unfit;

    fn traffic(accepted: u64, delivered: u64, dropped: u64) -> Traffic {
        Traffic {
            accepted,
            delivered,
            dropped,
            ..Default::default()
        }
    }

    fn refused(result: Result<()>) -> bool {
        result.is_err_and(|error| error.is::<Unfit>())
    }

    #[test]
    fn packets_that_nobody_has_counted_are_refused() {
        let account = |traffic, dropped| account(Mode::KernelRps, &traffic, dropped, None);
        account(traffic(10_000, 7_000, 1_000), 2_000).unwrap();
        account(traffic(10_000, 6_995, 1_000), 2_000).unwrap();
        assert!(refused(account(traffic(10_000, 6_900, 1_000), 2_000)));
        // Nor may more arrive than came.
        assert!(refused(account(traffic(10_000, 7_100, 1_000), 2_000)));
    }

    #[test]
    fn rxsteer_answers_for_every_frame() {
        let queue = Queue {
            received: 10_000,
            inline: 3_000,
            sums: Terms {
                delivered: 5_000,
                ..Default::default()
            },
            ..Default::default()
        };
        let account = |traffic| account(Mode::Rxsteer, &traffic, 0, Some(&queue));
        account(traffic(10_000, 7_000, 1_000)).unwrap();
        assert!(refused(account(traffic(10_000, 7_000, 0))));
        assert!(refused(account(traffic(10_001, 7_000, 1_000))));
    }
}
