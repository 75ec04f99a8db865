// SPDX-License-Identifier: MIT OR Apache-2.0
//! The packet parser in the kernel, for comparison with the native build.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Result, ensure};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{OpenObject, ProgramInput};
use rxsteer::host::xdp;
use rxsteer::types::{flow_key, flow_result, flow_secret};

use crate::lab::netns::Netns;
use crate::probe_skel::{ProbeSkel, ProbeSkelBuilder, types};

/// Shortest frame that the kernel runs a program on, bytes.
pub const FRAME_MIN: usize = 14;

/// Longest frame, bytes.
pub const FRAME_MAX: usize = len_of(|probe| &probe.frame);

const fn len_of<const N: usize>(_: fn(&types::probe) -> &[u8; N]) -> usize {
    N
}

/// See the module's documentation.
pub struct Probe {
    skel: ProbeSkel<'static>,
    _attached: Option<(OwnedFd, Netns)>,
}

/// A frame's key, or why it has none, and the hash of the key, which is zeros without one.
pub type Parsed = (Result<flow_key, flow_result>, u32);

impl Probe {
    /// Loads the parser of these tunnels, and the hash with this secret.
    ///
    /// # Errors
    /// When the kernel refuses the program.
    pub fn load(tunnels: u32, secret: &flow_secret) -> Result<Self> {
        // The skeleton borrows the object for as long as it lives. It takes some kilobytes, and a
        // test loads a few.
        let object: &'static mut MaybeUninit<OpenObject> =
            Box::leak(Box::new(MaybeUninit::uninit()));
        let mut open = ProbeSkelBuilder::default().open(object)?;
        let rodata = open
            .maps
            .rodata_data
            .as_deref_mut()
            .expect("it has constants");
        rodata.flow_options.0 = tunnels;
        rodata.flow_secret.addend = secret.addend;
        rodata.flow_secret.multiplier = secret.multiplier;
        let skel = open.load()?;
        let _attached = attach(skel.progs.flow_probe.as_fd()).ok();
        Ok(Self { skel, _attached })
    }

    /// Parses frames of [`FRAME_MIN`] to [`FRAME_MAX`] bytes in the kernel, and passes the number
    /// and the result of each to `each`.
    ///
    /// # Errors
    /// When the kernel can't run the program.
    pub fn parse<F: AsRef<[u8]>>(
        &mut self,
        frames: &[F],
        mut each: impl FnMut(usize, Parsed),
    ) -> Result<()> {
        let batch = self.variables().probes.len();
        for (number, frames) in frames.chunks(batch).enumerate() {
            self.run(frames)?;
            for (at, probe) in self.variables().probes[..frames.len()].iter().enumerate() {
                each(number * batch + at, parsed(probe));
            }
        }
        Ok(())
    }

    fn variables(&self) -> &types::bss {
        let bss = self.skel.maps.bss_data.as_deref();
        bss.expect("it has variables")
    }

    fn run<F: AsRef<[u8]>>(&mut self, frames: &[F]) -> Result<()> {
        let bss = self
            .skel
            .maps
            .bss_data
            .as_deref_mut()
            .expect("it has variables");
        for (probe, frame) in bss.probes.iter_mut().zip(frames) {
            let frame = frame.as_ref();
            probe.len = frame.len() as u32;
            probe.frame[..frame.len()].copy_from_slice(frame);
            // A result that no frame has.
            probe.result.0 = u32::MAX;
        }
        bss.nr_probed = 0;
        let input = ProgramInput {
            data_in: Some(&[0; FRAME_MAX]),
            repeat: frames.len() as u32,
            ..Default::default()
        };
        self.skel.progs.flow_probe.test_run(input)?;
        let nr_probed = written(&self.variables().nr_probed);
        ensure!(
            nr_probed as usize == frames.len(),
            "the kernel took {nr_probed} of {} frames",
            frames.len()
        );
        Ok(())
    }
}

/// Attaches the program where no packet comes. Otherwise each run would wait for a grace period of
/// RCU before and after, because it would be the program's first use (bpf_prog_change_xdp()).
fn attach(program: BorrowedFd<'_>) -> Result<(OwnedFd, Netns)> {
    const LO: u32 = 1;
    let netns = Netns::new("probe")?;
    let link = netns.run(|| Ok(xdp::attach_in_stack(program, LO)?))?;
    Ok((link, netns))
}

/// What the kernel has written into a map's memory.
fn written<T: Copy>(value: &T) -> T {
    // SAFETY: a reference can be read.
    unsafe { std::ptr::read_volatile(value) }
}

fn parsed(probe: &types::probe) -> Parsed {
    // The skeleton has its own types.
    let key = written(&probe.key);
    let key = flow_key {
        saddr: key.saddr,
        daddr: key.daddr,
        ports: key.ports,
        proto: key.proto,
        outer: key.outer,
        tunnel: key.tunnel,
    };
    let result = match flow_result(written(&probe.result).0) {
        flow_result::FLOW_KEYED => Ok(key),
        other => Err(other),
    };
    (result, written(&probe.hash))
}
