// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data path's decisions on a simulated kernel.

pub mod daemon;
pub mod gro;
pub mod path;
pub mod shape;
pub mod thread;
