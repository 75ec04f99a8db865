// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel RPS that is switched on for a device while it is steered.

use anyhow::{Result, bail};
use tracing::{info, warn};

use super::options::OnKernelRps;
use super::plan::Steered;

/// Looks at the devices' settings, and logs what has changed since the last look. To be called now
/// and then: no event shows that a file in `/sys` is written.
///
/// # Errors
/// Under [`OnKernelRps::Stop`], when it is on for a device.
pub(super) fn look<'a>(
    devices: impl Iterator<Item = &'a mut Steered>,
    wish: OnKernelRps,
) -> Result<()> {
    for Steered { device, mode, .. } in devices {
        // A device that is gone has no settings.
        let now = device.kernel_rps_now().unwrap_or_default();
        let before = device.kernel_rps_on(*mode);
        device.kernel_rps = now;
        let objection = device.kernel_rps_on(*mode);
        if objection == before {
            continue;
        }
        let name = &device.name;
        match (objection, wish) {
            (None, _) => info!(device = %name, "kernel RPS is off again for {name}"),
            (Some(objection), OnKernelRps::Stop) => bail!("{objection}"),
            (Some(objection), OnKernelRps::Warn) => {
                warn!(device = %name, "{objection}. Until then the flows of {name} may lose their order")
            }
        }
    }
    Ok(())
}
