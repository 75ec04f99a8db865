// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer doctor`: obstacles to steering on this host and on its devices, what to change so that
//! packets are received better, and the effects of the settings of NAPI instances. Changes nothing.

pub mod diagnosis;
mod facts;
pub mod napi_effects;
pub mod recommendations;
mod words;

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use self::diagnosis::diagnose;
use super::program::{end_with_the_reader, print_answer};
use crate::daemon::options::device_name;

/// Options of `rxsteer doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Network devices, for example eth0; without, all that are up, but for lo
    #[arg(value_name = "DEVICE", value_parser = device_name)]
    pub devices: Vec<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl DoctorArgs {
    /// Fails, by the exit status only, if there is an obstacle.
    pub(super) fn run(&self) -> Result<ExitCode> {
        end_with_the_reader()?;
        let diagnosis = diagnose(&self.devices)?;
        print_answer(self.json, &diagnosis, words::render)?;
        Ok(match diagnosis.in_the_way {
            false => ExitCode::SUCCESS,
            true => ExitCode::FAILURE,
        })
    }
}
