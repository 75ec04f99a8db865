// SPDX-License-Identifier: MIT OR Apache-2.0
//! What several test programs share.

pub mod key;
pub mod mutate;
