// SPDX-License-Identifier: MIT OR Apache-2.0
//! Load from another host.

mod generator;
pub mod latency;
pub mod load;
mod rr;
pub mod server;
mod tally;
