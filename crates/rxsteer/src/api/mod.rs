// SPDX-License-Identifier: MIT OR Apache-2.0
//! Types and client of the control socket.

pub mod busy_poll;
pub mod client;
pub mod control;
pub mod explain;
pub mod flows;
pub mod line;
pub mod server;
pub mod set;
mod socket;
pub mod status;
