// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices whose packets arrive in the queues of other devices. An XDP program on them runs there,
//! or sees nothing; the kernel's RPS is asked there alone.

use std::fs;
use std::path::Path;

/// Other devices in whose queues the packets of a device arrive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Lower {
    #[default]
    None,
    /// The device is a bond with these ports.
    Ports(Vec<String>),
    /// The device is a netvsc; the virtual function takes over its data while it is there.
    VirtualFunction(String),
    /// A VLAN, macvlan, ipvlan, team or VRF device: it gets the packets of these devices within
    /// `__netif_receive_skb_core()`, behind the question for their CPU.
    Handed(Vec<String>),
}

impl Lower {
    /// Of a device with this driver, described by the folder `sysfs`.
    pub(super) fn of(sysfs: &Path, driver: &str) -> Self {
        match driver {
            "bonding" => Self::Ports(ports(sysfs).unwrap_or_default()),
            "hv_netvsc" => {
                let vf = links(sysfs).pop();
                vf.map_or(Self::None, Self::VirtualFunction)
            }
            "802.1Q VLAN Support" | "macvlan" | "ipvlan" | "team" | "vrf" => {
                Self::Handed(links(sysfs))
            }
            _ => Self::None,
        }
    }
}

/// The devices below this one, by their names.
fn links(sysfs: &Path) -> Vec<String> {
    let entries = fs::read_dir(sysfs).into_iter().flatten().flatten();
    let name = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        Some(name.strip_prefix("lower_")?.to_owned())
    };
    let mut names: Vec<_> = entries.filter_map(name).collect();
    names.sort_unstable();
    names
}

/// The ports of bond `name` in the caller's network namespace; `None` if it is no bond.
pub fn bond_ports(name: &str) -> Option<Vec<String>> {
    ports(&Path::new("/sys/class/net").join(name))
}

fn ports(sysfs: &Path) -> Option<Vec<String>> {
    let list = fs::read_to_string(sysfs.join("bonding/slaves")).ok()?;
    Some(list.split_whitespace().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn lower_devices_are_found_in_sysfs() {
        let dir = tempfile::tempdir().unwrap();
        let lower = |driver| Lower::of(dir.path(), driver);
        for driver in ["bonding", "hv_netvsc", "macvlan", "veth"] {
            let none = match driver {
                "bonding" => Lower::Ports(Vec::new()),
                "macvlan" => Lower::Handed(Vec::new()),
                _ => Lower::None,
            };
            assert_eq!(lower(driver), none);
        }
        symlink("../enP1s1", dir.path().join("lower_enP1s1")).unwrap();
        symlink("../vlan7", dir.path().join("upper_vlan7")).unwrap();
        assert_eq!(
            lower("hv_netvsc"),
            Lower::VirtualFunction("enP1s1".to_owned())
        );
        assert_eq!(lower("macvlan"), Lower::Handed(vec!["enP1s1".to_owned()]));
        // Control: other devices also have devices below them.
        assert_eq!(lower("veth"), Lower::None);

        assert_eq!(ports(dir.path()), None);
        fs::create_dir(dir.path().join("bonding")).unwrap();
        let slaves = dir.path().join("bonding/slaves");
        fs::write(&slaves, "\n").unwrap();
        assert_eq!(ports(dir.path()), Some(Vec::new()));
        fs::write(&slaves, "eth0 eth1\n").unwrap();
        let both = vec!["eth0".to_owned(), "eth1".to_owned()];
        assert_eq!(lower("bonding"), Lower::Ports(both));
    }
}
