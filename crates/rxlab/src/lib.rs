// SPDX-License-Identifier: MIT OR Apache-2.0
//! Traffic in network namespaces and measurements on it: the lab, the bench, the demo.

pub mod bench;
pub mod cli;
pub mod demo;
pub mod lab;
pub mod testing;

/// The parser in the kernel, generated from `bpf/probe.bpf.c`.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
mod probe_skel {
    include!(concat!(env!("OUT_DIR"), "/probe.skel.rs"));
}

/// The lab's programs, generated from `bpf/lab.bpf.c`.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod lab_skel {
    include!(concat!(env!("OUT_DIR"), "/lab.skel.rs"));
}
