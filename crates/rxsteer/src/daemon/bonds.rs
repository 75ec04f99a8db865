// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bonds are steered on their ports, where their packets arrive. Ports may be added later.

use tracing::{info, warn};

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

/// The bonds that the options name.
pub(super) struct Bonds {
    /// Names of bonds, and the ports that were reported as not steered.
    bonds: Vec<(String, Vec<String>)>,
    /// Names of the steered devices.
    steered: Vec<String>,
}

impl Bonds {
    pub(super) fn of(names: &[String], steered: Vec<String>) -> Self {
        let bonds = names.iter().filter(|name| bond_ports(name).is_some());
        Self {
            bonds: bonds.map(|name| (name.clone(), Vec::new())).collect(),
            steered,
        }
    }

    /// Warns of ports that are not steered, once. To be called now and then.
    pub(super) fn look(&mut self) {
        for words in self.unsteered(bond_ports) {
            warn!("{words}");
        }
    }

    /// Reports each change of the ports that are not steered, in words.
    fn unsteered(&mut self, ports: impl Fn(&str) -> Option<Vec<String>>) -> Vec<String> {
        let mut words = Vec::new();
        for (bond, reported) in &mut self.bonds {
            let mut others = ports(bond).unwrap_or_default();
            others.retain(|port| !self.steered.contains(port));
            if others != *reported && !others.is_empty() {
                words.push(format!(
                    "{bond} has ports that are not steered: {}; restart rxsteer to steer them",
                    others.join(", ")
                ));
            }
            *reported = others;
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_ports_are_reported_once() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let mut bonds = Bonds {
            bonds: vec![("bond0".to_owned(), Vec::new())],
            steered: names(&["eth0", "eth1"]),
        };
        let mut look = |ports: &[&str]| {
            bonds
                .unsteered(|bond| (bond == "bond0").then(|| names(ports)))
                .len()
        };
        assert_eq!(look(&["eth0", "eth1"]), 0);
        assert_eq!(look(&["eth0", "eth1", "eth2"]), 1);
        assert_eq!(look(&["eth0", "eth1", "eth2"]), 0);
        assert_eq!(look(&["eth0", "eth2", "eth3"]), 1);
        // Controls: ports that have left, and the same port again.
        assert_eq!(look(&["eth1"]), 0);
        assert_eq!(look(&["eth1", "eth2"]), 1);
    }

    #[test]
    fn other_devices_are_steered_themselves() {
        let names = ["lo".to_owned(), "rxsteer-none".to_owned()];
        assert_eq!(with_ports(&names), names);
        assert!(Bonds::of(&names, Vec::new()).bonds.is_empty());
    }
}
