// SPDX-License-Identifier: MIT OR Apache-2.0
//! Setup of measurements: the lab or a device, modes, traffic, and the kernel's counters.

pub(in crate::bench) mod confined;
pub mod local;
pub mod mode;
pub mod pace;
pub mod pair;
pub mod place;
pub mod router;
pub mod streams;
pub mod testbed;
pub mod throughput;
pub mod traffic;
pub mod watch;
