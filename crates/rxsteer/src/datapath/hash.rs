// SPDX-License-Identifier: MIT OR Apache-2.0
//! Source of the flow hash.

use clap::ValueEnum;

/// Source of the flow hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Hash {
    /// the packet's headers
    #[default]
    Packet,
    /// the packet's headers, alike for both directions of a connection: a router or a firewall has
    /// them on one CPU if their devices have the same --rps-cpus
    Symmetric,
    /// the hash computed by the device if its driver passes it on (in native mode since Linux 6.3),
    /// else the headers
    Device,
}
