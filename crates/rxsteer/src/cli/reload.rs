// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer reload`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use super::pinned;
use crate::api::client;

/// Options of `rxsteer reload`.
#[derive(Debug, Args)]
pub struct ReloadArgs {}

impl ReloadArgs {
    pub(super) fn run(self) -> Result<ExitCode> {
        let so = "its options stay as they are until a start with others takes it over";
        for line in pinned::or_say(client::reload(), so)? {
            println!("{line}");
        }
        Ok(ExitCode::SUCCESS)
    }
}
