// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets that cost the delivering CPU a fixed time, whatever the machine.

use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};

use super::link::End;
use super::witness::at_ingress;
use super::xdp;

/// Makes each packet that the device hands to the stack cost this time, until the device is removed.
///
/// # Errors
/// The kernel has no clsact or no BPF classifier.
pub fn slow(end: &End, cost: Duration) -> Result<()> {
    let skel = xdp::load(|open| {
        open.progs.slow.set_autoload(true);
        let constants = open.maps.rodata_data.as_mut().context("no .rodata")?;
        constants.slow_ns = cost.as_nanos() as u64;
        Ok(())
    })?;
    at_ingress(end, skel.progs.slow.as_fd())
}
