// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a veth carries and a wire does not: the hash of the sender's socket.

use std::os::fd::AsFd;

use anyhow::Result;
use rxsteer::host::tc::{self, Hook, TcLink};

use super::netns::Netns;
use super::programs;

/// Packets that this device sends have no hash, until the returned link is dropped.
///
/// # Errors
/// The kernel refuses the program.
pub fn without_hash(netns: &Netns, ifindex: u32) -> Result<TcLink> {
    netns.run(|| {
        let skel = programs::load(|open| {
            open.progs.wire.set_autoload(true);
            Ok(())
        })?;
        tc::attach(skel.progs.wire.as_fd(), ifindex, Hook::Egress)
    })
}
