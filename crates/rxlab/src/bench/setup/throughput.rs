// SPDX-License-Identifier: MIT OR Apache-2.0
//! The throughput in RFC 2544's sense, found by growing steps and then by bisection: the highest rate
//! at which (nearly) all packets arrive.

use anyhow::Result;

use crate::bench::experiment::fit;

/// Loss up to this share of the packets offered counts as none: a wake-up that comes late may cost a
/// few.
pub const LOSSFREE: f64 = 0.001;

/// A trial that lost less than this is repeated once: that may have been chance, more is the rate.
const CHANCE: f64 = 0.01;

/// The lowest rate that is tried, packets/s.
pub const FLOOR: f64 = 20_000.0;

/// A generator that offers less than this share of a rate, though it has offered more as fast as it
/// can, goes without a CPU that something foreign has.
const STARVED: f64 = 0.5;

/// From the highest rate without loss to the lowest one with loss.
const PRECISION: f64 = 1.05;

/// The same, where the generator can't always send at the rate asked.
const GAP: f64 = 1.1;

/// What a trial at one rate found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// Packets that reached the device, per second.
    pub offered: f64,
    /// Packets that arrived meanwhile, per second.
    pub delivered: f64,
    /// Of the packets offered, the share that did not arrive, then or later.
    pub loss: f64,
}

/// What a device carries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throughput {
    /// The highest rate offered of which less than [`LOSSFREE`] was lost, packets/s.
    pub lossfree: f64,
    /// The generator could offer no rate between this one and what is too much: the device
    /// carries at least `lossfree`.
    pub generator_bound: bool,
    /// At twice that rate, or at the most that the generator offers if that is less.
    pub at_twice: Trial,
    /// At the most that the generator offers.
    pub at_most: Trial,
}

impl Trial {
    fn is_lossfree(&self) -> bool {
        self.loss < LOSSFREE
    }
}

impl Throughput {
    /// Finds it by trials, each at so many packets per second or as fast as the generator can.
    ///
    /// # Errors
    /// A trial's; [`Unfit`](crate::bench::experiment::Unfit) when packets are lost at any rate, or the generator is
    /// starved.
    pub fn find(mut trial: impl FnMut(Option<u64>) -> Result<Trial>) -> Result<Self> {
        let at_most = fair(&mut trial, None)?;
        fit!(
            at_most.offered >= FLOOR,
            "the generator was starved: it offered no more than {:.0} packets/s",
            at_most.offered
        );
        if at_most.is_lossfree() {
            return Ok(Self {
                lossfree: at_most.offered,
                generator_bound: true,
                at_twice: at_most,
                at_most,
            });
        }
        // Rates as asked; what counts is what was offered. Most ways deliver of a flood about what they
        // carry without loss: that is tried first, and from there steps that grow.
        let (mut low, mut high) = (0.0, at_most.offered);
        let (mut best, mut lossy) = (0.0_f64, at_most.offered);
        let mut rate = (at_most.delivered / PRECISION.sqrt()).clamp(FLOOR, high);
        let mut step = PRECISION;
        while low == 0.0 || high / low > PRECISION {
            let found = fair(&mut trial, Some(rate as u64))?;
            if found.is_lossfree() {
                low = rate;
                best = best.max(found.offered);
            } else {
                fit!(
                    rate > FLOOR,
                    "even of {FLOOR:.0} packets/s {:.2} % are lost",
                    100.0 * found.loss
                );
                high = rate;
                lossy = lossy.min(found.offered);
            }
            rate = match low {
                0.0 => (high / step).max(FLOOR),
                low => f64::sqrt(low * high).min(low * step),
            };
            step *= step;
        }
        let lossfree = best;
        let twice = 2.0 * lossfree;
        Ok(Self {
            lossfree,
            generator_bound: lossy > GAP * lossfree,
            at_twice: if twice < at_most.offered {
                fair(&mut trial, Some(twice as u64))?
            } else {
                at_most
            },
            at_most,
        })
    }
}

/// A trial, repeated once if chance may have spoilt it.
fn fair(trial: &mut impl FnMut(Option<u64>) -> Result<Trial>, rate: Option<u64>) -> Result<Trial> {
    let least = rate.map_or(0.0, |rate| STARVED * rate as f64);
    let mut found = trial(rate)?;
    let by_chance = !found.is_lossfree() && found.loss < CHANCE;
    if by_chance || found.offered < least {
        let again = trial(rate)?;
        if again.loss < found.loss || found.offered < least {
            found = again;
        }
    }
    fit!(
        found.offered >= least,
        "the generator was starved: it offered {:.0} of {:.0} packets/s",
        found.offered,
        least / STARVED
    );
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::experiment::Unfit;

    /// A device that carries so much, and a generator that offers so much, packets/s.
    fn device(capacity: f64, generator: f64) -> impl FnMut(Option<u64>) -> Result<Trial> {
        move |rate| {
            let offered = rate.map_or(generator, |rate| generator.min(rate as f64));
            let delivered = offered.min(capacity);
            Ok(Trial {
                offered,
                delivered,
                loss: 1.0 - delivered / offered,
            })
        }
    }

    fn near(found: f64, rate: f64) -> bool {
        (rate / PRECISION..=rate * (1.0 + 2.0 * LOSSFREE)).contains(&found)
    }

    #[test]
    fn finds_what_a_device_carries() -> Result<()> {
        for capacity in [21_000.0, 47_000.0, 600_000.0, 1_390_000.0] {
            let mut trials = 0;
            let mut device = device(capacity, 1_400_000.0);
            let found = Throughput::find(|rate| {
                trials += 1;
                device(rate)
            })?;
            assert!(near(found.lossfree, capacity), "{capacity}: {found:?}");
            assert!(!found.generator_bound, "{capacity}: {found:?}");
            assert_eq!(found.at_most.offered, 1_400_000.0);
            assert_eq!(found.at_most.delivered, capacity);
            assert_eq!(found.at_twice.delivered, capacity);
            let twice = (2.0 * found.lossfree).min(1_400_000.0);
            assert!((found.at_twice.offered - twice).abs() < 1.0, "{found:?}");
            assert!(trials < 6, "{capacity}: {trials} trials");
        }
        Ok(())
    }

    /// What is delivered of a flood tells little there.
    #[test]
    fn finds_what_a_device_carries_that_a_flood_brings_down_or_up() -> Result<()> {
        for of_flood in [10_000.0, 60_000.0, 1_200_000.0] {
            let mut trials = 0;
            let mut device = device(600_000.0, 1_400_000.0);
            let found = Throughput::find(|rate| {
                trials += 1;
                let found = device(rate)?;
                let delivered = if rate.is_none() {
                    of_flood
                } else {
                    found.delivered
                };
                Ok(Trial { delivered, ..found })
            })?;
            assert!(near(found.lossfree, 600_000.0), "{of_flood}: {found:?}");
            assert!(trials < 16, "{of_flood}: {trials} trials");
        }
        Ok(())
    }

    #[test]
    fn loss_by_chance_is_tried_again() -> Result<()> {
        // Every other trial loses half a percent more.
        let noisy = |more: f64| {
            let mut device = device(600_000.0, 1_400_000.0);
            let mut even = true;
            Throughput::find(move |rate| {
                even = !even;
                let found = device(rate)?;
                let loss = if even { found.loss + more } else { found.loss };
                Ok(Trial { loss, ..found })
            })
        };
        let found = noisy(0.005)?;
        assert!(near(found.lossfree, 600_000.0), "{found:?}");
        // The control: two percent are no chance.
        let found = noisy(0.02)?;
        assert!(!near(found.lossfree, 600_000.0), "{found:?}");
        Ok(())
    }

    #[test]
    fn a_device_that_never_loses_is_bounded_by_the_generator() -> Result<()> {
        let found = Throughput::find(device(f64::INFINITY, 1_400_000.0))?;
        assert!(found.generator_bound);
        assert_eq!(found.lossfree, 1_400_000.0);
        assert_eq!(found.at_twice, found.at_most);
        Ok(())
    }

    /// Paced, the generator offers less than the device carries; as fast as it can, more.
    #[test]
    fn a_gap_in_what_is_offered_bounds_too() -> Result<()> {
        let mut device = device(1_200_000.0, 1_400_000.0);
        let found = Throughput::find(|rate| device(rate.map(|rate| rate.min(900_000))))?;
        assert!(found.generator_bound, "{found:?}");
        assert_eq!(found.lossfree, 900_000.0);
        Ok(())
    }

    #[test]
    fn what_loses_at_any_rate_has_no_throughput() {
        let mut device = device(600_000.0, 1_400_000.0);
        let found = Throughput::find(|rate| {
            let found = device(rate)?;
            let loss = found.loss.max(0.05);
            Ok(Trial { loss, ..found })
        });
        assert!(found.is_err_and(|error| error.is::<Unfit>()));
    }

    #[test]
    fn a_starved_generator_measures_nothing() -> Result<()> {
        let refused = |found: Result<Throughput>| found.is_err_and(|error| error.is::<Unfit>());
        assert!(refused(Throughput::find(device(600_000.0, 5_000.0))));
        // `share` of what it was asked for, in every n-th trial.
        let starved = |share: f64, every: u32| {
            let mut device = device(600_000.0, 1_400_000.0);
            let mut trials = 0;
            Throughput::find(move |rate| {
                trials += 1;
                let share = if trials % every == 0 { share } else { 1.0 };
                device(rate.map(|rate| (share * rate as f64) as u64))
            })
        };
        assert!(refused(starved(0.1, 1)));
        // The control: once is chance, and a little less is what was offered.
        assert!(near(starved(0.1, 3)?.lossfree, 600_000.0));
        assert!(!starved(0.9, 1)?.generator_bound);
        Ok(())
    }
}
