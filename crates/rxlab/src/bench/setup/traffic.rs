// SPDX-License-Identifier: MIT OR Apache-2.0
//! Traffic of a generator through the steered device, and its counts.

use std::ops::AddAssign;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use rxsteer::api::status::Queue;

use crate::bench::experiment::fit;
use crate::bench::setup::mode::{Active, Mode, Way};
use crate::bench::setup::testbed::Testbed;
use crate::bench::setup::watch::Seen;
use crate::lab::frame::Frames;
use crate::lab::generator::{Generator, GeneratorConfig, RingCounts};
use crate::lab::migrator::Migrators;
use crate::lab::receiver::Receiver;

/// Flows to connected sockets. Before Linux 6.13 the kernel searches all sockets of a port
/// linearly.
pub const NR_CONNECTED: u32 = 64;

/// Share of the accepted packets that may be unaccounted for: those under way when the counters
/// were read.
const UNACCOUNTED: f64 = 0.001;

/// The last packets have arrived when none came for this time.
const QUIET: Duration = Duration::from_millis(25);

/// Time before counting starts, in all modes: flows find their CPUs, and adaptive modes settle (RFC
/// 2544, 23).
pub const SETTLING: Duration = Duration::from_millis(200);

/// A flood means that at least `REFUSED` of the packets sent were refused, or at most `DELIVERED`
/// of those accepted were delivered.
const REFUSED: f64 = 0.01;
const DELIVERED: f64 = 0.99;

/// Number and interval of the looks for the fewest packets under way. The interval is no multiple
/// of a generator's 500 us between bursts.
const LOOKS: u32 = 16;
const BETWEEN_LOOKS: Duration = Duration::from_micros(130);

/// Limit on waiting for the last packets.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The end point of packets.
pub trait Destination {
    /// Packets received so far.
    fn received(&self) -> u64;

    /// Packets dropped for lack of room so far.
    ///
    /// # Errors
    /// When the kernel has no such counter.
    fn dropped(&self) -> Result<u64>;
}

impl Destination for Receiver {
    fn received(&self) -> u64 {
        self.received()
    }

    fn dropped(&self) -> Result<u64> {
        self.dropped()
    }
}

impl Destination for Migrators {
    fn received(&self) -> u64 {
        self.received().sum()
    }

    fn dropped(&self) -> Result<u64> {
        Ok(self.report()?.dropped)
    }
}

/// Packets of a generator, up to one time or between two.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Accepted by the device.
    pub accepted: u64,
    /// Refused because the ring was full. If the generator shares a CPU with the thread that
    /// empties the ring, refusals depend on the generator, and these packets do not count as
    /// offered.
    pub refused: u64,
    /// Received, of those accepted.
    pub delivered: u64,
}

impl Counts {
    pub(in crate::bench) fn at(ring: RingCounts, delivered: u64) -> Self {
        Self {
            accepted: ring.accepted,
            refused: ring.refused,
            delivered,
        }
    }

    /// The counts with the fewest packets under way, of several looks. Packets under way at the
    /// start would later be counted as delivered and hide losses. `look` must read `delivered`
    /// first.
    ///
    /// # Errors
    /// Those of `look`.
    pub(in crate::bench) fn when_few_are_under_way(
        look: impl Fn() -> Result<Self>,
    ) -> Result<Self> {
        let mut best = look()?;
        for _ in 1..LOOKS {
            sleep(BETWEEN_LOOKS);
            let now = look()?;
            if now.under_way() <= best.under_way() {
                best = now;
            }
        }
        Ok(best)
    }

    /// Includes lost packets.
    fn under_way(self) -> u64 {
        self.accepted.saturating_sub(self.delivered)
    }

    /// Counts since `then`. Packets queued at that time may exceed later losses, so `delivered` is
    /// limited to `accepted`.
    pub(in crate::bench) fn since(self, then: Self) -> Self {
        let accepted = self.accepted - then.accepted;
        Self {
            accepted,
            refused: self.refused - then.refused,
            delivered: (self.delivered - then.delivered).min(accepted),
        }
    }
}

/// Results of one generator, or the sum of several.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// All packets.
    pub all: Counts,
    /// Packets dropped at the destination.
    pub dropped: u64,
    /// Packets after the first [`SETTLING`].
    pub settled: Counts,
    /// Packets accepted and delivered while the generator sent, after [`SETTLING`]: without those
    /// still queued when it stopped.
    pub meanwhile: Counts,
    /// Duration of `meanwhile`, s.
    pub seconds: f64,
    /// The generator has CPUs of its own: refused packets count as offered.
    pub apart: bool,
    /// CPU time of the thread that polls the queue, ns after [`SETTLING`]; None without such a
    /// thread.
    pub rx_cpu_ns: Option<u64>,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.accepted += other.accepted;
        self.refused += other.refused;
        self.delivered += other.delivered;
    }
}

impl AddAssign<&Self> for Traffic {
    fn add_assign(&mut self, other: &Self) {
        self.all += other.all;
        self.dropped += other.dropped;
        self.settled += other.settled;
        self.meanwhile += other.meanwhile;
        self.seconds += other.seconds;
        self.apart = other.apart;
        if let Some(ns) = other.rx_cpu_ns {
            *self.rx_cpu_ns.get_or_insert(0) += ns;
        }
    }
}

/// A running generator and its destination.
pub(in crate::bench) struct Sending<'a> {
    generator: Generator,
    destination: &'a dyn Destination,
    /// Packets that the destination had received and dropped before.
    before: (u64, u64),
    apart: bool,
}

impl<'a> Sending<'a> {
    /// Starts a generator, at its maximum or at `rate` frames per second.
    pub(in crate::bench) fn start(
        testbed: &Testbed,
        destination: &'a dyn Destination,
        frames: &Frames,
        rate: Option<u64>,
    ) -> Result<Self> {
        // The scheduler may give a generator that shares the CPU a whole tick at any priority,
        // while the thread that empties the ring is runnable: with a rate, that would count as
        // loss.
        let apart = testbed.masks().apart();
        let config = GeneratorConfig {
            rate,
            lossless: rate.is_some() && !apart,
            ..GeneratorConfig::flood(frames.clone())
        };
        Ok(Self {
            before: (destination.received(), destination.dropped()?),
            generator: testbed.send(&config)?,
            destination,
            apart,
        })
    }

    /// Counts so far. `delivered` is read first, so its packets are among those accepted.
    pub(in crate::bench) fn look(&self) -> Result<Counts> {
        let delivered = self.destination.received() - self.before.0;
        Ok(Counts::at(self.generator.counts()?, delivered))
    }

    /// CPU time of the host taken by the generator, ns; 0 if it has CPUs of its own.
    pub(in crate::bench) fn generator_ns(&self) -> Result<u64> {
        match self.apart {
            true => Ok(0),
            false => self.generator.cpu_ns(),
        }
    }

    /// Stops the generator and waits until all packets have arrived or are lost.
    pub(in crate::bench) fn end(self) -> Result<Traffic> {
        let sent = self.generator.stop()?;
        drain(self.destination)?;
        Ok(Traffic {
            all: Counts {
                accepted: sent.sent - sent.lost,
                refused: sent.lost,
                delivered: self.destination.received() - self.before.0,
            },
            dropped: self.destination.dropped()? - self.before.1,
            apart: self.apart,
            ..Default::default()
        })
    }
}

impl Traffic {
    /// Sends at the generator's maximum, or at `rate` frames per second, for [`SETTLING`] and then
    /// `seconds` without a pause, and waits until all packets have arrived or are lost.
    ///
    /// # Errors
    /// When the lab failed; [`Unfit`](crate::bench::experiment::Unfit) when the generator did not
    /// run.
    pub fn send(
        testbed: &Testbed,
        destination: &dyn Destination,
        frames: &Frames,
        rate: Option<u64>,
        seconds: f64,
    ) -> Result<Self> {
        let rx_cpu_ns = || testbed.nic.as_ref().map(|nic| nic.cpu_ns(0)).transpose();
        let sending = Sending::start(testbed, destination, frames, rate)?;
        sleep(SETTLING);
        let cpu_before = rx_cpu_ns()?;
        let then = Counts::when_few_are_under_way(|| sending.look())?;
        let start = Instant::now();
        sleep(Duration::from_secs_f64(seconds));
        let meanwhile = sending.look()?.since(then);
        let seconds = start.elapsed().as_secs_f64();
        let sent = sending.end()?;
        let cpu_after = rx_cpu_ns()?;
        fit!(
            meanwhile.accepted > 0,
            "the device accepted nothing: the generator did not run"
        );
        Ok(Self {
            settled: sent.all.since(then),
            meanwhile,
            seconds,
            rx_cpu_ns: cpu_after
                .zip(cpu_before)
                .map(|(after, before)| after - before),
            ..sent
        })
    }

    /// Packets accepted by the device, per second.
    pub fn accepted_pps(&self) -> f64 {
        self.meanwhile.accepted as f64 / self.seconds
    }

    /// Packets offered to the device, per second.
    pub fn offered_pps(&self) -> f64 {
        self.offered(self.meanwhile) as f64 / self.seconds
    }

    fn offered(&self, counts: Counts) -> u64 {
        match self.apart {
            true => counts.accepted + counts.refused,
            false => counts.accepted,
        }
    }

    /// Checks that the load exceeded the capacity of the host. Not checked if the generator shares
    /// a CPU with the device.
    ///
    /// # Errors
    /// [`Unfit`](crate::bench::experiment::Unfit) when the generator was the limit.
    pub fn exceeds_the_host(&self) -> Result<()> {
        let Counts {
            accepted,
            refused,
            delivered,
        } = self.meanwhile;
        let few = (refused as f64) < REFUSED * (accepted + refused) as f64;
        fit!(
            !(self.apart && few && delivered as f64 >= DELIVERED * accepted as f64),
            "the generators were the limit: of {:.0} packets/s nearly all were delivered",
            self.offered_pps()
        );
        Ok(())
    }

    /// Packets delivered while the generator sent, per second.
    pub fn delivered_pps(&self) -> f64 {
        self.meanwhile.delivered as f64 / self.seconds
    }

    /// Share of the packets offered after [`SETTLING`] that did not arrive, then or later.
    pub fn loss(&self) -> f64 {
        1.0 - self.settled.delivered as f64 / self.offered(self.settled) as f64
    }
}

/// Waits until no more packets arrive.
pub(in crate::bench) fn drain(destination: &dyn Destination) -> Result<()> {
    let start = Instant::now();
    let mut last = None;
    while start.elapsed() < TIMEOUT {
        let now = Some((destination.received(), destination.dropped()?));
        if now == last {
            break;
        }
        last = now;
        sleep(QUIET);
    }
    Ok(())
}

/// Checks that the way was in effect and that all packets are accounted for. `traffic` must contain
/// all packets since the way was switched on.
///
/// # Errors
/// [`Unfit`](crate::bench::experiment::Unfit), with the reason.
pub fn check(
    testbed: &Testbed,
    active: &Active<'_>,
    way: Way,
    traffic: &Traffic,
    seen: &Seen,
) -> Result<()> {
    testbed.verify(active, way, seen, NR_CONNECTED)?;
    let astray = seen.processed_by_generators;
    fit!(
        astray as f64 <= UNACCOUNTED * traffic.all.accepted as f64,
        "{astray} packets were processed on the generators' CPUs"
    );
    let status = active.status()?;
    let queue = status.as_ref().map(|s| &s.devices[0].queues[0]);
    let dropped = seen.softnet.values().map(|s| s.dropped).sum();
    account(way.mode, traffic, dropped, queue)
}

/// Checks that all packets are accounted for. `dropped`: at the kernel's backlogs.
fn account(mode: Mode, traffic: &Traffic, dropped: u64, queue: Option<&Queue>) -> Result<()> {
    let all = traffic.all;
    let arrived = all.delivered + traffic.dropped;
    let expected = match (mode, queue) {
        (_, Some(queue)) => {
            fit!(
                queue.received == all.accepted,
                "rxsteer received {} of {} frames",
                queue.received,
                all.accepted
            );
            queue.inline + queue.sums.delivered
        }
        // Drops at full cpumap rings have no counter.
        (Mode::Cpumap, _) => return Ok(()),
        _ => all.accepted.saturating_sub(dropped),
    };
    let missing = arrived.abs_diff(expected) as f64 / all.accepted as f64;
    fit!(
        missing < UNACCOUNTED,
        "packets are unaccounted for: {expected} should have come to the receiver, and {arrived} did"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::experiment::Unfit;
    use rxsteer::api::status::Terms;

    fn traffic(accepted: u64, delivered: u64, dropped: u64) -> Traffic {
        Traffic {
            all: Counts {
                accepted,
                delivered,
                ..Default::default()
            },
            dropped,
            ..Default::default()
        }
    }

    fn refused(result: Result<()>) -> bool {
        result.is_err_and(|error| error.is::<Unfit>())
    }

    #[test]
    fn packets_under_way_hide_no_loss() {
        let counts = |accepted, delivered| Counts {
            accepted,
            delivered,
            ..Default::default()
        };
        // 30 packets were lost before, 10 of the next 1000, and up to 60 are under way.
        let moments = [(500, 410), (600, 570), (700, 610)].map(|(a, d)| counts(a, d));
        let looks = std::cell::Cell::new(0);
        let then = Counts::when_few_are_under_way(|| {
            let moment = moments[looks.replace(looks.get() + 1).min(2)];
            Ok(moment)
        });
        let found = counts(1_600, 1_560).since(then.unwrap());
        assert_eq!((found.accepted, found.delivered), (1_000, 990));
        // Control: counting from the first look hides the loss.
        let found = counts(1_600, 1_560).since(moments[0]);
        assert_eq!((found.accepted, found.delivered), (1_100, 1_100));
    }

    #[test]
    fn a_flood_that_the_host_carries_is_the_generators() {
        let exceeds = |apart, accepted, refused, delivered| {
            let meanwhile = Counts {
                accepted,
                refused,
                delivered,
            };
            let traffic = Traffic {
                meanwhile,
                settled: meanwhile,
                seconds: 1.0,
                apart,
                ..Default::default()
            };
            (traffic.exceeds_the_host(), traffic.loss())
        };
        let (result, loss) = exceeds(true, 10_000, 50, 9_950);
        assert!(refused(result) && (loss - 100.0 / 10_050.0).abs() < 1e-9);
        // The ring or the host behind it was full; or the generator shares the CPU.
        exceeds(true, 10_000, 200, 10_000).0.unwrap();
        exceeds(true, 10_000, 0, 9_800).0.unwrap();
        let (result, loss) = exceeds(false, 10_000, 50, 10_000);
        result.unwrap();
        assert_eq!(loss, 0.0);
    }

    #[test]
    fn unaccounted_packets_are_refused() {
        let account = |traffic, dropped| account(Mode::KernelRps, &traffic, dropped, None);
        account(traffic(10_000, 7_000, 1_000), 2_000).unwrap();
        account(traffic(10_000, 6_995, 1_000), 2_000).unwrap();
        assert!(refused(account(traffic(10_000, 6_900, 1_000), 2_000)));
        // More arrivals than packets are refused, too.
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
