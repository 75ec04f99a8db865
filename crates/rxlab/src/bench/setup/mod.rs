// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where and how it is measured: the lab or a device, the modes, the traffic, what the kernel counts meanwhile.

pub mod mode;
pub mod pace;
pub mod pair;
pub mod place;
pub mod router;
pub mod testbed;
pub mod throughput;
pub mod traffic;
pub mod watch;
