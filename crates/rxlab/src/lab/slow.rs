// SPDX-License-Identifier: MIT OR Apache-2.0
//! A program that takes a fixed time on any machine.

use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use libbpf_rs::ProgramInput;

use super::link::End;
use super::programs;
use super::witness::at_ingress;
use crate::lab_skel::LabSkel;

/// Makes each packet that the device hands to the stack cost this time, until the device is removed.
///
/// # Errors
/// The kernel has no clsact or no BPF classifier.
pub fn slow(end: &End, cost: Duration) -> Result<()> {
    at_ingress(end, Slow::load(cost)?.0.progs.slow.as_fd())
}

/// The program, for a call.
pub(super) struct Slow(LabSkel<'static>);

impl Slow {
    /// For calls that take this time, of 20 ms at most.
    ///
    /// # Errors
    /// The kernel refuses the program.
    pub(super) fn load(cost: Duration) -> Result<Self> {
        let load = programs::load(|open| {
            open.progs.slow.set_autoload(true);
            let constants = open.maps.rodata_data.as_mut().context("no .rodata")?;
            constants.slow_ns = cost.as_nanos() as u64;
            Ok(())
        });
        Ok(Self(load?))
    }

    /// Runs the program on this thread's CPU.
    ///
    /// # Errors
    /// The kernel can't run it.
    pub(super) fn run(&self) -> Result<()> {
        let input = ProgramInput {
            // The least that the kernel takes: an Ethernet header.
            data_in: Some(&[0; 14]),
            ..Default::default()
        };
        self.0.progs.slow.test_run(input)?;
        Ok(())
    }
}
