// SPDX-License-Identifier: MIT OR Apache-2.0
//! Load from another host.

pub mod latency;
pub mod load;
pub mod server;
