// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data path's decisions on a simulated kernel.

mod backlogs;
pub mod daemon;
pub mod gro;
pub mod path;
mod poll;
pub mod shape;
pub mod thread;
