// SPDX-License-Identifier: MIT OR Apache-2.0
//! The counters of `rxsteer status` for Prometheus, over HTTP.

pub mod exposition;
pub mod server;
