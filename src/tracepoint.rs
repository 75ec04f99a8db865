// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which tracepoints the running kernel has: they come and go between versions.

use anyhow::{Context, Result};
use libbpf_rs::btf::{Btf, types::Typedef};

/// Whether a BTF-typed program can attach to the tracepoint: the kernel then has a type
/// `btf_trace_<name>`.
///
/// # Errors
/// When the kernel has no BTF.
pub fn exists(name: &str) -> Result<bool> {
    let btf = Btf::from_vmlinux().context("the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)")?;
    Ok(btf
        .type_by_name::<Typedef<'_>>(&format!("btf_trace_{name}"))
        .is_some())
}
