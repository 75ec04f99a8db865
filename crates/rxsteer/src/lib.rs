// SPDX-License-Identifier: MIT OR Apache-2.0
//! Receive steering for Linux as one eBPF system.

pub mod accounting;
pub mod backlogs;
pub mod balance;
pub mod balancer;
pub mod busy_poll;
pub mod caps;
pub mod cli;
pub mod config;
pub mod control;
pub mod cpu_times;
pub mod cpumask;
pub mod cpus;
pub mod datapath;
pub mod device;
pub mod doctor;
pub mod endpoints;
pub mod explain;
pub mod flow;
pub mod flows;
pub mod guardian;
pub mod hotplug;
pub mod kthread;
pub mod load;
pub mod napi;
pub mod napi_settings;
pub mod native;
pub mod netdev;
pub mod policy;
pub mod program;
pub mod rps_map;
pub mod run;
pub mod setting;
pub mod sockets;
pub mod status;
pub mod table;
pub mod tables;
pub mod topology;
pub mod xdp;

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

/// The types of what `native.c` asks, generated from `bpf/native.bpf.c`.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod native_skel {
    include!(concat!(env!("OUT_DIR"), "/native.skel.rs"));
}
