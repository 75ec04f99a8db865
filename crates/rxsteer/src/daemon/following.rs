// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether flows can follow applications by their hash.

use std::fmt::Display;

use anyhow::{Result, bail};

use crate::datapath::hash::Hash;

/// Fails unless flows can follow applications by this hash. Sockets may not know it, but keep that of
/// their packets with `--follow-nat`; in native mode a redirected packet has lost the device's.
/// `native`: a device that is not in skb mode, and its mode.
///
/// # Errors
/// With what to change.
pub(super) fn can_follow(
    hash: Hash,
    follow_nat: bool,
    native: Option<(&str, impl Display)>,
) -> Result<()> {
    match (hash, follow_nat, native) {
        (Hash::Packet, ..) | (_, true, None) | (Hash::Symmetric, true, _) => Ok(()),
        (Hash::Device, true, Some((device, mode))) => bail!(
            "{device} is steered in {mode} mode, where sockets don't see the device's hash: flows \
             follow applications by it with --mode skb; or leave --hash device"
        ),
        (Hash::Symmetric, false, _) => bail!(
            "flows can't follow applications by a symmetric hash, which sockets don't know: add \
             --follow-nat, leave --hash symmetric, or use --policy rps"
        ),
        (Hash::Device, false, _) => bail!(
            "flows can't follow applications by the device's hash, which sockets don't know: add \
             --follow-nat and --mode skb, leave --hash device, or use --policy rps"
        ),
    }
}
