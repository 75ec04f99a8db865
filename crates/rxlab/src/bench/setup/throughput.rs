// SPDX-License-Identifier: MIT OR Apache-2.0
//! Throughput as in RFC 2544, the highest rate at which (nearly) all packets arrive, found by
//! growing steps and bisection.

use anyhow::Result;

use crate::bench::experiment::fit;

/// Loss up to this share of the offered packets counts as none: a late wake-up may lose a few.
pub const LOSSFREE: f64 = 0.001;

/// A trial with less loss than this is repeated once: the loss may be due to chance.
const CHANCE: f64 = 0.01;

/// The lowest rate tried, packets/s.
pub const FLOOR: f64 = 20_000.0;

/// A generator that offers less than this share of a rate, though it reached it without pacing, was
/// starved: something else had its CPU.
const STARVED: f64 = 0.5;

/// Largest ratio of the lowest rate with loss to the highest one without.
const PRECISION: f64 = 1.05;

/// Largest such ratio if the generator can't always send at the requested rate.
const GAP: f64 = 1.1;

/// Result of a trial at one rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// Packets that reached the device, per second.
    pub offered: f64,
    /// Packets that arrived during the trial, per second.
    pub delivered: f64,
    /// Share of the offered packets that did not arrive, during the trial or later.
    pub loss: f64,
}

/// Result of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throughput {
    /// Highest offered rate with less loss than [`LOSSFREE`], packets/s.
    pub lossfree: f64,
    /// The generator could offer no rate between `lossfree` and one with loss: the device carries
    /// at least `lossfree`.
    pub generator_bound: bool,
    /// At twice `lossfree`, or at the generator's maximum if that is less.
    pub at_twice: Trial,
    /// At the generator's maximum.
    pub at_most: Trial,
}

impl Trial {
    fn is_lossfree(&self) -> bool {
        self.loss < LOSSFREE
    }
}

impl Throughput {
    /// Searches by trials, each at a rate in packets per second or, with None, at the generator's
    /// maximum.
    ///
    /// # Errors
    /// Errors of a trial; [`Unfit`](crate::bench::experiment::Unfit) when packets are lost at any
    /// rate, or the generator is starved.
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
        // `low` and `high` are requested rates, `best` and `lossy` offered ones. Under flood most
        // modes deliver about their lossfree rate: start there, with growing steps.
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

/// A trial, repeated once if its loss may be due to chance or the generator was starved.
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

    /// A device with a capacity and a generator with a maximum, packets/s.
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

    /// Delivery under flood is no guide to the rate here.
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
        // Every other trial loses `more` in addition.
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
        // Control: two percent are not chance.
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

    /// The generator offers less than the device carries when paced, and more when not.
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
        // Offers `share` of the requested rate, in every n-th trial.
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
        // Control: a single starved trial is repeated, and a small shortfall is accepted.
        assert!(near(starved(0.1, 3)?.lossfree, 600_000.0));
        assert!(!starved(0.9, 1)?.generator_bound);
        Ok(())
    }
}
