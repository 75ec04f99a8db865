// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering that goes on without a rxsteer: what commands say about it.

use std::path::Path;

use anyhow::{Result, anyhow};
use tracing::error;

use super::table::{align_left, table};
use super::{config, files};
use crate::api::control::NoneRuns;
use crate::api::status::Pinned;
use crate::daemon::options::Pin;
use crate::daemon::pin;
use crate::datapath::pin_folders::pin_folders;

/// Where steering may be pinned: in the folder of the network namespace, in the one that the
/// configuration names, and where pins are found. Whether the configuration could be read; a mistake in
/// it is logged.
pub(super) fn places() -> Result<(Vec<Pin>, bool)> {
    let configured = files::configured().and_then(|files| config::pin(&files));
    if let Err(e) = &configured {
        error!("a folder that the configuration names for pins is not looked at: {e:#}");
    }
    let is_read = configured.is_ok();
    let found = pin_folders().into_iter().map(Pin::Folder);
    let mut places = vec![Pin::Default];
    let mut folders = vec![pin::folder(&Pin::Default)?];
    for place in configured.ok().flatten().into_iter().chain(found) {
        let folder = pin::folder(&place)?;
        if !folders.contains(&folder) {
            folders.push(folder);
            places.push(place);
        }
    }
    Ok((places, is_read))
}

/// What is pinned there and in force.
///
/// # Errors
/// When pins can't be read.
pub(super) fn in_force() -> Result<Vec<Pinned>> {
    let (places, _) = places()?;
    let found: Vec<_> = places.iter().map(pin::in_force).collect::<Result<_>>()?;
    Ok(found.into_iter().flatten().collect())
}

/// The outcome of a command that asks a running rxsteer. If none runs and steering is pinned, the error
/// says so, with what follows for the command: `so` is a clause.
///
/// # Errors
/// Those of the outcome.
pub(super) fn or_say<T>(outcome: Result<T>, so: &str) -> Result<T> {
    outcome.map_err(|error| {
        let none_runs = error.is::<NoneRuns>();
        // If pins can't be read, the error stands as it is.
        let pinned = none_runs.then(in_force).and_then(Result::ok);
        match pinned.unwrap_or_default().first() {
            Some(pinned) => anyhow!(
                "{}: {so}; {}",
                goes_on(pinned),
                pin::ways(Path::new(&pinned.folder))
            ),
            None => error,
        }
    })
}

fn goes_on(pinned: &Pinned) -> String {
    let by = match &pinned.version {
        Some(version) => format!(" by version {version}"),
        None => String::new(),
    };
    format!(
        "no rxsteer is running in this network namespace, and steering goes on: it is pinned at {}{by}",
        pinned.folder
    )
}

/// Says what is steered, since when, and how to go on; ends with a newline.
pub(super) fn render(pinned: &Pinned) -> String {
    let mut devices = table(["device", "since"]);
    align_left(&mut devices, &[0, 1]);
    for device in &pinned.devices {
        let name = device.device.clone();
        let name = name.unwrap_or_else(|| format!("index {}", device.ifindex));
        devices.add_row([name, device.since.clone()]);
    }
    let ways = pin::ways(Path::new(&pinned.folder));
    let goes_on = goes_on(pinned);
    format!("{goes_on}\n{}\n{ways}\n", devices.trim_fmt())
}
