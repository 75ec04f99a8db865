// SPDX-License-Identifier: MIT OR Apache-2.0
//! Receive steering for Linux as one eBPF system. docs/architecture.md says what each folder may
//! use.

pub mod api;
pub mod bpf;
pub mod busy_poll;
pub mod cli;
pub mod daemon;
pub mod datapath;
pub mod host;
pub mod metrics;
pub mod napi;

/// The types and constants of `bpf/types.h`.
pub use bpf::types_skel::types;
