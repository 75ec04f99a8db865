// SPDX-License-Identifier: MIT OR Apache-2.0
//! Receive steering for Linux as one eBPF system.

/// The data path's skeleton, generated from `bpf/rx.bpf.c`, with its types taken from BTF.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod rx {
    include!(concat!(env!("OUT_DIR"), "/rx.skel.rs"));
}

/// The lab's skeleton, generated from `bpf/lab.bpf.c`.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod lab_skel {
    include!(concat!(env!("OUT_DIR"), "/lab.skel.rs"));
}

pub mod lab;
