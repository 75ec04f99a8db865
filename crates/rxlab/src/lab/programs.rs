// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lab's own BPF programs.

use std::mem::MaybeUninit;

use anyhow::{Context, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use crate::lab_skel::{LabSkel, LabSkelBuilder, OpenLabSkel};

/// Loads the lab's object; `choose` enables programs and sets constants before.
pub(crate) fn load(
    choose: impl FnOnce(&mut OpenLabSkel) -> Result<()>,
) -> Result<LabSkel<'static>> {
    // The skeleton borrows this slot for its lifetime. Leaking the slot, one pointer, lets the
    // skeleton be moved and stored; the object itself is freed with the skeleton.
    let slot = Box::leak(Box::new(MaybeUninit::uninit()));
    let mut open = LabSkelBuilder::default().open(slot)?;
    choose(&mut open)?;
    open.load()
        .context("cannot load the lab's BPF programs: CAP_BPF and CAP_NET_ADMIN are needed")
}
