// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plots as rows of SVG on a shared axis: each round a dot, the median a bar.
//!
//! Positions are percentages, so a plot fits any width while its text keeps its size.

use maud::{Markup, html};

use crate::bench::report::document::Spread;

/// Height of a row, pixels.
const ROW_HEIGHT: u32 = 26;

/// Intervals of an axis: as many labels as a phone can show.
const NR_STEPS: f64 = 4.0;

/// Ratio of medians above which the axis is logarithmic, since a linear one would not separate the
/// lower medians.
const LOGARITHMIC_FROM: f64 = 50.0;

/// Maps values to positions.
#[derive(Debug, PartialEq)]
pub struct Axis {
    /// At least two, ascending; the first and the last are the ends of the axis.
    ticks: Vec<f64>,
    /// Whether equal distances are equal factors.
    pub logarithmic: bool,
}

impl Axis {
    /// Axis for all rows. A linear axis includes 0.
    pub fn of<'a>(rows: impl Iterator<Item = &'a Spread> + Clone) -> Self {
        let medians = rows.clone().map(|row| row.median);
        let values = rows.flat_map(|row| &row.rounds).copied();
        let (min, max) = ends(values);
        let (low, high) = ends(medians);
        if min > 0.0 && high > low * LOGARITHMIC_FROM {
            return Self::decades(min, max);
        }
        let (min, max) = (min.min(0.0), max.max(0.0));
        let step = match max - min {
            range if range > 0.0 && range.is_finite() => round_up(range / NR_STEPS),
            _ => 1.0,
        };
        let tick = |n: i64| n as f64 * step;
        let first = (min / step).floor() as i64;
        let last = ((max / step).ceil() as i64).max(first + 1);
        Self {
            ticks: (first..=last).map(tick).collect(),
            logarithmic: false,
        }
    }

    fn decades(min: f64, max: f64) -> Self {
        let (first, last) = (min.log10().floor() as i32, max.log10().ceil() as i32);
        let every = ((last - first) as f64 / NR_STEPS).ceil() as usize;
        let decades = (first..).step_by(every);
        let before = decades.clone().take_while(|decade| *decade < last).count();
        Self {
            ticks: decades
                .take(before + 1)
                .map(|decade| 10f64.powi(decade))
                .collect(),
            logarithmic: true,
        }
    }

    /// Position, percent of the width.
    fn at(&self, value: f64) -> f64 {
        let scale = |value: f64| {
            if self.logarithmic {
                value.log10()
            } else {
                value
            }
        };
        let (first, last) = (
            scale(self.ticks[0]),
            scale(self.ticks[self.ticks.len() - 1]),
        );
        100.0 * (scale(value) - first) / (last - first)
    }

    /// Row of a mode. `subject`: the median to compare with; `text`: the text alternative.
    pub fn row(&self, spread: &Spread, subject: Option<f64>, text: &str) -> Markup {
        let rounds = spread.rounds.iter().filter(|value| value.is_finite());
        let apart = 100.0 / (rounds.clone().count() + 1) as f64;
        html! {
            svg width="100%" height=(ROW_HEIGHT) role="img" aria-label=(text) {
                @for tick in &self.ticks { (self.line("grid", *tick)) }
                @if let Some(subject) = subject { (self.line("subject", subject)) }
                // In order from top to bottom, to show drifts.
                @for (n, value) in (1..).zip(rounds) {
                    circle cx=(percent(self.at(*value))) cy=(percent(f64::from(n) * apart)) r="3" {}
                }
                (self.line("median", spread.median))
            }
        }
    }

    fn line(&self, class: &str, value: f64) -> Markup {
        let x = percent(self.at(value));
        html! {
            @if value.is_finite() { line class=(class) x1=(x) x2=(x) y1="0" y2="100%" {} }
        }
    }

    /// Labels of the axis.
    pub fn numbers(&self, unit: &str) -> Markup {
        let last = self.ticks.len() - 1;
        html! {
            svg width="100%" height="16" aria-hidden="true" {
                @for (n, tick) in self.ticks.iter().enumerate() {
                    // Keeps the outer labels within the plot.
                    @let anchor = match n { 0 => "start", n if n == last => "end", _ => "middle" };
                    text x=(percent(self.at(*tick))) y="12" text-anchor=(anchor) { (figure(*tick, unit)) }
                }
            }
        }
    }
}

fn percent(value: f64) -> String {
    format!("{value:.2}%")
}

/// Minimum and maximum; 0 without values.
fn ends(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values
        .filter(|value| value.is_finite())
        .map(|value| (value, value))
        .reduce(|(min, max), (value, _)| (min.min(value), max.max(value)))
        .unwrap_or_default()
}

/// Rounds up to 1, 2 or 5 times a power of ten.
fn round_up(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let round = [1.0, 2.0, 5.0]
        .into_iter()
        .find(|round| step <= round * power);
    round.unwrap_or(10.0) * power
}

/// Formats a value with three significant digits, and with a prefix if the unit can take one.
pub fn figure(value: f64, unit: &str) -> String {
    const PREFIXES: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let prefixed = !matches!(unit, "ns" | "us" | "ms" | "s" | "%");
    // Values that round up to 1000 take the next prefix.
    let fits = |(scale, _): &(f64, &str)| prefixed && value.abs() >= 0.9995 * scale;
    match PREFIXES.into_iter().find(fits) {
        Some((scale, prefix)) => format!("{} {prefix}", significant(value / scale)),
        None => significant(value),
    }
}

fn significant(value: f64) -> String {
    let decimals = match value.abs() {
        v if v == v.trunc() => 0,
        // Values that round up to another digit before the point have one less after it.
        v => (2 - (1.0005 * v).log10().floor() as i32).clamp(0, 6),
    };
    let text = format!("{value:.*}", decimals as usize);
    if decimals > 0 || value < 1e4 {
        return text;
    }
    let thousands = text
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(String::from_utf8_lossy);
    // Narrow no-break space.
    thousands.collect::<Vec<_>>().join("\u{202f}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(rounds: &[f64]) -> Spread {
        let (min, max) = ends(rounds.iter().copied());
        Spread {
            median: rounds[rounds.len() / 2],
            min,
            max,
            rounds: rounds.to_vec(),
        }
    }

    fn axis(rows: &[&[f64]]) -> Axis {
        let rows: Vec<Spread> = rows.iter().map(|rounds| spread(rounds)).collect();
        Axis::of(rows.iter())
    }

    #[test]
    fn an_axis_begins_at_zero_and_holds_all_rounds() {
        let axis = axis(&[&[1.0e6, 1.39e6], &[0.58e6, 0.6e6]]);
        assert_eq!(axis.ticks, [0.0, 500_000.0, 1_000_000.0, 1_500_000.0]);
        assert!(!axis.logarithmic);
        assert_eq!(
            [0.0, 750_000.0, 1.5e6].map(|v| axis.at(v)),
            [0.0, 50.0, 100.0]
        );
    }

    #[test]
    fn an_axis_has_two_ends_whatever_the_values() {
        for (rows, ticks) in [
            (&[&[0.0][..]][..], &[0.0, 1.0][..]),
            (&[], &[0.0, 1.0]),
            (&[&[-3.0, 5.0]], &[-4.0, -2.0, 0.0, 2.0, 4.0, 6.0]),
            (&[&[f64::NAN, 3.0]], &[0.0, 1.0, 2.0, 3.0]),
            (&[&[7.0]], &[0.0, 2.0, 4.0, 6.0, 8.0]),
        ] {
            assert_eq!(axis(rows).ticks, ticks, "{rows:?}");
        }
    }

    #[test]
    fn only_what_a_linear_axis_would_hide_makes_it_logarithmic() {
        let wide = axis(&[&[221.0, 250.0], &[99_000.0, 120_000.0]]);
        assert!(wide.logarithmic);
        assert_eq!(wide.ticks, [1e2, 1e3, 1e4, 1e5, 1e6]);
        assert_eq!(wide.at(1e4), 50.0);
        // Nine decades exceed the number of labels.
        let wider = axis(&[&[0.5], &[4e7]]);
        assert_eq!(wider.ticks, [1e-1, 1e2, 1e5, 1e8]);
        // A single outlier does not make the axis logarithmic; zero has no logarithm.
        assert!(!axis(&[&[200.0, 221.0, 99_000.0], &[300.0]]).logarithmic);
        assert!(!axis(&[&[0.0], &[99_000.0]]).logarithmic);
    }

    #[test]
    fn figures_have_three_digits_and_a_prefix_where_the_unit_has_none() {
        for (value, unit, text) in [
            (1_391_234.0, "packets/s", "1.39 M"),
            (579_999.0, "packets/s", "580 k"),
            (999_900.0, "packets/s", "1.00 M"),
            (12_345.6, "us", "12\u{202f}346"),
            (1_234_567.0, "us", "1\u{202f}234\u{202f}567"),
            (9.996, "us", "10.0"),
            (99.94, "%", "99.9"),
            (5.1818, "ns", "5.18"),
            (0.0123, "s", "0.0123"),
            (0.0, "1", "0"),
            (12.0, "packets", "12"),
            (-2_500.0, "1/s", "-2.50 k"),
        ] {
            assert_eq!(figure(value, unit), text);
        }
    }
}
