// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gives skbs the hash of their flow (`bpf/hash.bpf.c`), by which sockets behind NAT find it.

use std::os::fd::AsFd;

use anyhow::{Context, Result};
use libbpf_rs::skel::{OpenSkel, Skel};

use super::shared::{lend_maps, set_constants};
use super::tables::Tables;
use crate::bpf::hash_skel::{HashSkel, HashSkelBuilder};
use crate::bpf::open;
use crate::bpf::trace_skel::TraceSkel;
use crate::host::tc::{self, Hook, TcLink};
use crate::types::rx_config;

/// The program, one for all devices.
pub(super) struct Hasher(HashSkel<'static>);

impl Hasher {
    /// `base`: the constants of all objects.
    ///
    /// # Errors
    /// When the kernel refuses the program.
    pub(super) fn load(trace: &TraceSkel<'_>, tables: &Tables, base: &rx_config) -> Result<Self> {
        let mut open = open(HashSkelBuilder::default())?;
        set_constants(open.open_object_mut(), base)?;
        lend_maps(open.open_object_mut(), trace.object(), tables)?;
        let skel = open.load();
        Ok(Self(
            skel.context("the kernel refused the program that hashes")?,
        ))
    }

    /// Attaches the program to a device of the calling thread's network namespace.
    ///
    /// # Errors
    /// As [`tc::attach`].
    pub(super) fn attach(&self, ifindex: u32) -> Result<TcLink> {
        tc::attach(self.0.progs.rxsteer_hash.as_fd(), ifindex, Hook::Ingress)
    }
}
