// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering that goes on without a rxsteer, for `rxsteer status` and `rxsteer detach`.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use tracing::error;

use super::table::{align_left, table};
use super::{config, files};
use crate::api::status::Pinned;
use crate::daemon::options::Pin;
use crate::daemon::pin;

/// Where steering may be pinned: in the folder of the network namespace, and in the one that the
/// configuration names. A mistake in the configuration is logged.
pub(super) fn places() -> Vec<Pin> {
    let configured = files::configured().and_then(|files| config::pin(&files));
    let configured = configured.unwrap_or_else(|e| {
        error!("a folder that the configuration names for pins is not looked at: {e:#}");
        None
    });
    let own = configured.filter(|pin| *pin != Pin::Default);
    [Pin::Default].into_iter().chain(own).collect()
}

/// What is pinned there and in force.
///
/// # Errors
/// When pins can't be read.
pub(super) fn in_force() -> Result<Vec<Pinned>> {
    let found: Vec<_> = places().iter().map(pin::in_force).collect::<Result<_>>()?;
    Ok(found.into_iter().flatten().collect())
}

/// Says what is steered, since when, and how to go on; ends with a newline.
pub(super) fn render(pinned: &Pinned) -> String {
    let by = match &pinned.version {
        Some(version) => format!(" by version {version}"),
        None => String::new(),
    };
    let mut out = format!(
        "no rxsteer is running in this network namespace, and steering goes on: it is pinned at {}{by}\n",
        pinned.folder
    );
    let mut devices = table(["device", "since"]);
    align_left(&mut devices, &[0, 1]);
    for device in &pinned.devices {
        let name = device.device.clone();
        let name = name.unwrap_or_else(|| format!("index {}", device.ifindex));
        devices.add_row([name, device.since.clone()]);
    }
    let is_default = pin::folder(&Pin::Default).is_ok_and(|f| f == Path::new(&pinned.folder));
    let folder = match is_default {
        true => String::new(),
        false => format!("={}", pinned.folder),
    };
    let _ = writeln!(
        out,
        "{}\n`rxsteer run --pin{folder}` takes it over, `rxsteer detach` ends it",
        devices.trim_fmt()
    );
    out
}
