// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer reload`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::api::client;

/// Options of `rxsteer reload`.
#[derive(Debug, Args)]
pub struct ReloadArgs {}

impl ReloadArgs {
    pub(super) fn run(self) -> Result<ExitCode> {
        for line in client::reload()? {
            println!("{line}");
        }
        Ok(ExitCode::SUCCESS)
    }
}
