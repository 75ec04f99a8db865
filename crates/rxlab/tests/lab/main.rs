// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lab and the bench on this kernel: a file for each part.

mod bench;
mod client;
mod lab;
mod peer;
mod reorder;
mod report;
mod servers;
mod testbed;
mod usage;
