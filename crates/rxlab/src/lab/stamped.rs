// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets with given time stamps.

use std::mem::offset_of;

use anyhow::{Context, Result, ensure};
use libbpf_rs::ProgramInput;
use nix::unistd::Pid;

use super::link::End;
use super::netns;
use super::programs;
use crate::lab_skel::types::__sk_buff;

/// Time stamps of a packet, ns; 0: none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamps {
    /// The kernel's, since 1970.
    pub software: u64,
    /// The device's, by any clock.
    pub hardware: u64,
}

/// Gives a device copies of a frame with these stamps, as a driver with hardware time stamps does, by
/// the softnet backlog of a CPU.
///
/// # Errors
/// The kernel refuses the program; the device does not take the frame.
pub fn send(end: &End, cpu: u32, frame: &[u8], stamps: &[Stamps]) -> Result<()> {
    end.netns.run(|| {
        netns::bind(Pid::from_raw(0), cpu)?;
        let skel = programs::load(|open| {
            open.progs.stamped.set_autoload(true);
            let constants = open.maps.rodata_data.as_mut().context("no .rodata")?;
            constants.stamped_ifindex = end.ifindex;
            Ok(())
        })?;
        for stamps in stamps {
            // Bytes, since the kernel refuses padding that is not zero.
            let mut context = [0; size_of::<__sk_buff>()];
            let mut set = |at: usize, stamp: u64| {
                context[at..at + size_of::<u64>()].copy_from_slice(&stamp.to_ne_bytes());
            };
            set(offset_of!(__sk_buff, tstamp), stamps.software);
            set(offset_of!(__sk_buff, hwtstamp), stamps.hardware);
            let input = ProgramInput {
                context_in: Some(&mut context),
                data_in: Some(frame),
                ..Default::default()
            };
            let status = skel.progs.stamped.test_run(input)?.return_value as i32;
            ensure!(status == 0, "a copy of the packet: error {status}");
        }
        Ok(())
    })
}
