// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer import`: a configuration from the settings of the kernel, or from files of OpenWrt and VyOS.

mod found;
mod host;
mod openwrt;
mod vyos;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use found::Found;

use super::files;

/// Options of `rxsteer import`.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// A file of OpenWrt (/etc/config/network) or VyOS (/config/config.boot, or its `set` commands);
    /// without it, the settings of this host are read: rps_cpus, rps_flow_cnt, rps_sock_flow_entries and
    /// busy_read
    pub file: Option<PathBuf>,
}

impl ImportArgs {
    pub(super) fn run(self) -> Result<ExitCode> {
        let found = match &self.file {
            None => host::found(Path::new("/"))?,
            Some(file) => {
                let text = String::from_utf8(files::read(file)?);
                let text = text.with_context(|| file.display().to_string())?;
                of_text(&text).with_context(|| file.display().to_string())?
            }
        };
        print!("{}", found.configuration());
        Ok(ExitCode::SUCCESS)
    }
}

/// What a file of another system asks for.
fn of_text(text: &str) -> Result<Found> {
    match openwrt::found(text).or_else(|| vyos::found(text)) {
        Some(found) if found.devices.is_empty() => {
            bail!("the file turns receive steering on for no device: there is nothing to import")
        }
        Some(found) => Ok(found),
        None => bail!(
            "neither a network configuration of OpenWrt (lines `option packet_steering '1'`) nor one of \
             VyOS (`offload {{ rps }}`, or `set interfaces ethernet eth0 offload rps`)"
        ),
    }
}
