// SPDX-License-Identifier: MIT OR Apache-2.0
//! What several files of tests share.

pub mod descriptors;
pub mod maps;
pub mod mounts;
pub mod pinned;
pub mod process;
pub mod scrape;
pub mod terminal;
pub mod threads;
pub mod transfer;
pub mod user;
pub mod waiting;
pub mod watch;
