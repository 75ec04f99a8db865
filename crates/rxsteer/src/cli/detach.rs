// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer detach`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;

use super::pinned;
use crate::daemon::options::Pin;
use crate::daemon::pin::{Detached, detach};
use crate::host::privileges;

/// Time in which flows return to their polling CPUs.
const PATIENCE: Duration = Duration::from_secs(2);

/// Options of `rxsteer detach`.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// The folder, if `run --pin=FOLDER` named one; without it, that of the network namespace, that of
    /// the configuration, and those that are found in BPF file systems
    #[arg(long, value_name = "FOLDER")]
    pin: Option<Pin>,

    /// Detach also if flows can't be returned in order, or the pins are damaged or of an unknown
    /// version
    ///
    /// Packets may then overtake those of their flow that are still queued.
    #[arg(long)]
    force: bool,
}

impl DetachArgs {
    /// Ends pinned steering.
    ///
    /// # Errors
    /// With the reason and the remedy.
    pub fn run(self) -> Result<ExitCode> {
        privileges::keep_needed()?;
        let (places, is_complete) = match self.pin {
            Some(pin) => (vec![pin], true),
            None => pinned::places()?,
        };
        let mut outcome = Ok(ExitCode::SUCCESS);
        for pin in places {
            match detach(&pin, self.force, PATIENCE) {
                Ok(detached) => println!("{}", words(&detached)),
                Err(e) => outcome = outcome.and(Err(e)),
            }
        }
        if !is_complete {
            let why = "steering may go on in the folder that the configuration names: correct the \
                       configuration, or name the folder: `rxsteer detach --pin=FOLDER`";
            outcome = outcome.and(Err(anyhow!(why)));
        }
        outcome
    }
}

fn words(detached: &Detached) -> String {
    let folder = detached.folder.display();
    let devices = match detached.nr_devices {
        None => return format!("nothing is pinned at {folder}"),
        Some(0) => return format!("removed what was left at {folder}; no device was steered"),
        Some(1) => "1 device".to_owned(),
        Some(n) => format!("{n} devices"),
    };
    match &detached.disorder {
        None => format!("{devices} detached, every flow in order; {folder} is removed"),
        Some(why) => format!(
            "{devices} detached; {folder} is removed. Packets that come now may overtake those of \
             their flow that were queued for other CPUs: {why}"
        ),
    }
}
