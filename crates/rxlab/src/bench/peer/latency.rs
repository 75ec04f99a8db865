// SPDX-License-Identifier: MIT OR Apache-2.0
//! Latency of requests.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Times in us, with three significant digits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Latency {
    pub count: u64,
    /// Latencies beyond the histogram's range, which count as its maximum.
    pub out_of_range: u64,
    pub mean: f64,
    pub stddev: f64,
    pub min: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Latency {
    /// Statistics of a histogram of ns; None if it is empty.
    pub fn of(ns: &Histogram<u64>, out_of_range: u64) -> Option<Self> {
        let us = |ns: u64| ns as f64 / 1e3;
        (!ns.is_empty()).then(|| Self {
            count: ns.len(),
            out_of_range,
            mean: ns.mean() / 1e3,
            stddev: ns.stdev() / 1e3,
            min: us(ns.min()),
            p50: us(ns.value_at_quantile(0.5)),
            p90: us(ns.value_at_quantile(0.9)),
            p99: us(ns.value_at_quantile(0.99)),
            p999: us(ns.value_at_quantile(0.999)),
            max: us(ns.max()),
        })
    }
}
