// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel side: the objects, their maps, and the content of the maps.

mod backlogged;
pub mod backlogs;
pub mod bounds;
mod call;
mod config;
pub mod cpus;
mod devices;
mod drain;
pub mod flow;
pub mod hash;
mod hasher;
mod hop_keys;
mod hops;
pub mod load;
mod loaded;
pub mod maker;
mod mapped;
pub mod native;
mod netnses;
mod objects;
mod pin;
pub mod pin_folders;
pub mod pins;
pub mod policy;
mod record;
mod requests;
mod resize;
pub mod rps_map;
mod shared;
mod sockets;
pub mod tables;
pub mod trial;
mod value;
mod visit;
pub mod waits;

pub use backlogged::{Backlogged, Drain};
pub use config::{
    Config, DeviceConfig, INLINE_PORTS, InlinePorts, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES,
    SoftirqKind, draw_secret, inline_ports,
};
pub use loaded::Datapath;
pub use requests::Requests;
