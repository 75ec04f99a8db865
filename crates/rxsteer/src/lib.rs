// SPDX-License-Identifier: MIT OR Apache-2.0
//! Receive steering for Linux as one eBPF system. docs/architecture.md says what each folder may use.

pub mod api;
pub mod busy_poll;
pub mod cli;
pub mod daemon;
pub mod datapath;
pub mod host;
pub mod napi;

/// The data path's skeleton, generated from `bpf/rx.bpf.c`, with its types taken from BTF.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod rx {
    include!(concat!(env!("OUT_DIR"), "/rx.skel.rs"));
}

/// The skeleton of what counts polls, generated from `bpf/poll.bpf.c`.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod poll_skel {
    include!(concat!(env!("OUT_DIR"), "/poll.skel.rs"));
}

/// The types of what `native/native.c` asks, generated from `bpf/native/native.bpf.c`.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod native_skel {
    include!(concat!(env!("OUT_DIR"), "/native.skel.rs"));
}
