// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bonds are steered on their ports, where their packets arrive. Ports may be added later.

use tracing::info;

use crate::host::lower::bond_ports;

/// The devices to steer for these names: the ports of bonds, and all other devices themselves. A
/// bond without ports remains, to be refused.
pub(super) fn with_ports(names: &[String]) -> Vec<String> {
    let ports = |name: &String| ports_of(name).unwrap_or_else(|| vec![name.clone()]);
    names.iter().flat_map(ports).collect()
}

/// Logs which of these are steered on their ports.
pub(super) fn say(names: &[String]) {
    for (name, ports) in names
        .iter()
        .filter_map(|name| Some((name, ports_of(name)?)))
    {
        info!(
            "{name}: its packets arrive on its ports, which are steered instead: {}",
            ports.join(", ")
        );
    }
}

fn ports_of(name: &str) -> Option<Vec<String>> {
    bond_ports(name).filter(|ports| !ports.is_empty())
}

/// The ports of the bonds among these names, now.
pub(super) fn ports(names: &[String]) -> impl Iterator<Item = String> {
    names.iter().filter_map(|name| bond_ports(name)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_devices_are_steered_themselves() {
        let names = ["lo".to_owned(), "rxsteer-none".to_owned()];
        assert_eq!(with_ports(&names), names);
        assert_eq!(ports(&names).count(), 0);
    }
}
