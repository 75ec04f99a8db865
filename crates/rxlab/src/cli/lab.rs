// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requirements of a lab on the host.

use anyhow::{Context, Result, bail};
use rxsteer::host::caps;

use crate::lab::link::{Link, LinkConfig};
use crate::lab::netns::Netns;

/// Checks that the host allows a lab.
///
/// # Errors
/// The first missing requirement, in one line.
pub(super) fn needs_lab() -> Result<()> {
    if let Some(missing) = caps::missing().first() {
        bail!("{missing}");
    }
    probe().context(
        "this needs namespaces of its own with veth devices: run it outside of the container, on a kernel \
         with CONFIG_NET_NS=y and CONFIG_VETH",
    )
}

/// Makes namespaces and a veth, which end at once.
fn probe() -> Result<()> {
    let (tester, dut) = (Netns::new("tester")?, Netns::new("dut")?);
    Link::new(&tester, &dut, &LinkConfig::default()).map(drop)
}
