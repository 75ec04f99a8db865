// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether flows can follow applications by their hash.

use anyhow::{Result, bail};

use crate::datapath::hash::Hash;

/// Fails unless flows can follow applications by this hash. Sockets don't know a symmetric one, but keep
/// that of their packets with `--follow-nat`; a redirected packet has lost the device's.
///
/// # Errors
/// With what to change.
pub(super) fn can_follow(hash: Hash, follow_nat: bool) -> Result<()> {
    match (hash, follow_nat) {
        (Hash::Packet, _) | (Hash::Symmetric, true) => Ok(()),
        (Hash::Symmetric, false) => bail!(
            "flows can't follow applications by a symmetric hash, which sockets don't know: add \
             --follow-nat, leave --hash symmetric, or use --policy rps"
        ),
        (Hash::Device, _) => bail!(
            "flows can't follow applications by the device's hash, which sockets don't know: leave \
             --hash device, or use --policy rps without --follow-nat"
        ),
    }
}
