// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a client prints at its end, as numbers.

use std::str::FromStr;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;

/// Connections, or sockets, of a client.
pub const NR_CLIENTS: u32 = 64;

/// What a client says, from its start to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Said {
    /// Requests that were answered.
    pub answers: u64,
    /// Answers in a second.
    pub rate: f64,
    /// Requests that the client gave up, answers that were none.
    pub lost: u64,
    /// Latency, us: median, 99th and 99.9th percentile.
    pub us: [f64; 3],
}

/// The quantiles of [`Said::us`].
const QUANTILES: [f64; 3] = [0.5, 0.99, 0.999];

/// Quantiles of latencies in us.
pub(super) fn quantiles(us: &Histogram<u64>) -> [f64; 3] {
    QUANTILES.map(|q| us.value_at_quantile(q) as f64)
}

/// The number after a label, at the start of a line.
pub(super) fn number<T: FromStr>(printed: &str, label: &str) -> Result<T> {
    let mut lines = printed.lines();
    let found = lines.find_map(|line| {
        line.trim_start()
            .strip_prefix(label)?
            .split_whitespace()
            .next()
    });
    found
        .and_then(|word| word.parse().ok())
        .with_context(|| format!("no number after `{label}`"))
}
