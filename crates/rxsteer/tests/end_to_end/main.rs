// SPDX-License-Identifier: MIT OR Apache-2.0
//! rxsteer on real packets, on this kernel: a file for each feature. Tests make the namespaces that they
//! use and run in any order, several at once (scripts/test.sh); those that can't say why, with
//! `in_lab!(alone: WHY)`.

mod advise;
mod auto;
mod backlog;
mod bonds;
mod book;
mod busy_poll;
#[path = "../common/mod.rs"]
mod common;
mod control;
mod dashboard;
mod detach;
mod device_gone;
mod doctor;
mod drivers;
mod esp;
mod explain;
mod faults;
mod fuzz_input;
mod gaps;
mod helpers;
mod hotplug;
mod idle;
mod idle_backlogs;
mod journal;
mod lifetime;
mod loopback;
mod metrics;
mod mode;
mod napi;
mod nat;
mod no_harm;
mod overhead;
mod overload;
mod panic;
mod patterns;
mod pin;
mod poll;
mod prepare;
mod reload;
mod rfs;
mod rx_hash;
mod schema;
mod service;
mod skb_metadata;
mod soak;
mod sock_flow;
mod softirq;
mod softirq_devices;
mod starved;
mod steer;
mod symmetric;
mod tc;
mod top;
mod unsteered;
mod usage;
mod vanished;
mod vanished_skbs;
mod verifier;
