// SPDX-License-Identifier: MIT OR Apache-2.0
//! The core without a network: properties, models, the parser, the tables. A failure is a bug, whatever
//! else the machine does.

mod cases;
#[path = "../common/mod.rs"]
mod common;
mod fixture;
mod flow;
mod flow_etherparse;
mod flow_spread;
mod fuzz;
mod fuzz_kernel;
mod litmus;
mod model;
mod order;
mod policy;
mod sim;
mod tables;
