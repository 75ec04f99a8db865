// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a lab needs of the host.

use anyhow::{Result, bail};
use rxsteer::host::caps::{self, Need};

/// Says in one line what the host lacks for a lab, if it lacks something.
pub(super) fn needs_lab() -> Result<()> {
    match caps::missing(Need::Lab).first() {
        Some(missing) => bail!("{missing}"),
        None => Ok(()),
    }
}
