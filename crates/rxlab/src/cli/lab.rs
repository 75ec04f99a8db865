// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requirements of a lab on the host.

use anyhow::{Result, bail};
use rxsteer::host::caps::{self, Need};

/// Checks that the host allows a lab.
///
/// # Errors
/// The first missing requirement, in one line.
pub(super) fn needs_lab() -> Result<()> {
    match caps::missing(Need::Lab).first() {
        Some(missing) => bail!("{missing}"),
        None => Ok(()),
    }
}
