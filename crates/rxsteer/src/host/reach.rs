// SPDX-License-Identifier: MIT OR Apache-2.0
//! The network namespaces that packets of the steered devices reach. A device that is linked to another
//! namespace (a veth's end, a macvlan, a tunnel) leads there. Only who administers both namespaces can
//! make such a link, so that a namespace with copied addresses has none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::sys::socket::SockProtocol;

use super::netlink::{attr, exchange, number};
use super::netns::{OWN, cookie, within};
use super::peer::{namespaces, nsid_of};

/// Bytes of `struct ifinfomsg`.
const IFINFOMSG: usize = 16;
/// linux/if_link.h: the kind of a device.
const IFLA_INFO_KIND: u16 = 1;
/// A number that no namespace has (NETNSA_NSID_NOT_ASSIGNED), as it is read.
const NO_NSID: u64 = u32::MAX as u64;
/// Namespaces between a socket and the device that are looked at.
const FAR: usize = 64;

/// See the module's documentation.
pub struct Reach<'a> {
    own: File,
    /// The indices of the steered devices.
    steered: &'a [u32],
    all: OnceLock<BTreeMap<u64, PathBuf>>,
    /// Those of `all`, by cookie.
    cookies: OnceLock<BTreeMap<u64, PathBuf>>,
}

/// A device that leads to another namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Door {
    /// The number of that namespace in the device's.
    nsid: u64,
    /// The device at the other end, or below.
    link: Option<u64>,
    /// It has two ends: what it sends comes from the other one.
    pair: bool,
}

impl<'a> Reach<'a> {
    /// From the namespace of the calling thread, where the devices with these indices are steered.
    ///
    /// # Errors
    /// When /proc does not show the namespace.
    pub fn new(steered: &'a [u32]) -> std::io::Result<Self> {
        Ok(Self {
            own: File::open(OWN)?,
            steered,
            all: OnceLock::new(),
            cookies: OnceLock::new(),
        })
    }

    /// A path of the namespace with this cookie, where thread `tid` may be.
    pub fn find(&self, tid: u32, netns: u64) -> Option<PathBuf> {
        let cookie_of = |path: &Path| within(path, || cookie().ok()).flatten();
        let of_thread = PathBuf::from(format!("/proc/{tid}/ns/net"));
        if cookie_of(&of_thread) == Some(netns) {
            return Some(of_thread);
        }
        let cookies = self.cookies.get_or_init(|| {
            let all = self.all().values();
            let numbered = all.filter_map(|path| Some((cookie_of(path)?, path.clone())));
            numbered.collect()
        });
        cookies.get(&netns).cloned()
    }

    fn all(&self) -> &BTreeMap<u64, PathBuf> {
        self.all.get_or_init(namespaces)
    }

    /// Whether packets of the steered devices reach the namespace with this path, directly or through
    /// others.
    pub fn reaches(&self, path: &Path) -> bool {
        let mut seen = BTreeSet::from([path.to_owned()]);
        let mut next = vec![path.to_owned()];
        while let Some(path) = next.pop() {
            let doors = within(&path, || {
                let doors = doors();
                let home = nsid(&self.own);
                (doors.iter().any(|door| self.leads_home(door, home)), doors)
            });
            let Some((reached, doors)) = doors else {
                continue;
            };
            if reached {
                return true;
            }
            if doors.is_empty() || seen.len() > FAR {
                continue;
            }
            let others = within(&path, || {
                let leads = |path: &&PathBuf| {
                    let nsid = File::open(path).ok().and_then(|file| nsid(&file));
                    nsid.is_some_and(|nsid| doors.iter().any(|door| door.nsid == nsid))
                };
                self.all()
                    .values()
                    .filter(leads)
                    .cloned()
                    .collect::<Vec<_>>()
            });
            for other in others.into_iter().flatten() {
                if seen.insert(other.clone()) {
                    next.push(other);
                }
            }
        }
        false
    }

    /// Whether packets of a steered device leave by this door, which leads to the devices' namespace if
    /// that has the number `home`. At the other end of a steered veth are its senders: what that veth
    /// receives does not leave by it.
    fn leads_home(&self, door: &Door, home: Option<u64>) -> bool {
        let is = |steered: &u32| door.pair && door.link == Some(u64::from(*steered));
        Some(door.nsid) == home && !self.steered.iter().all(is)
    }
}

/// The doors of the calling thread's namespace.
fn doors() -> Vec<Door> {
    let (kind, dump) = (libc::RTM_GETLINK, libc::NLM_F_DUMP as u16);
    let links = exchange(SockProtocol::NetlinkRoute, kind, dump, &[0; IFINFOMSG]);
    let links = links.unwrap_or_default();
    let attrs = links.iter().filter_map(|link| link.get(IFINFOMSG..));
    attrs.filter_map(door).collect()
}

/// By the attributes of a device.
fn door(attrs: &[u8]) -> Option<Door> {
    let kind = attr(attrs, libc::IFLA_LINKINFO).and_then(|info| attr(info, IFLA_INFO_KIND));
    let kind = kind.unwrap_or_default();
    Some(Door {
        nsid: number(attrs, libc::IFLA_LINK_NETNSID)?,
        link: number(attrs, libc::IFLA_LINK),
        pair: [&b"veth\0"[..], b"netkit\0"].contains(&kind),
    })
}

/// The calling thread's number of a namespace.
fn nsid(netns: &File) -> Option<u64> {
    let nsid = nsid_of(netns).ok().flatten();
    nsid.filter(|nsid| *nsid != NO_NSID)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steered_veth_leads_to_its_senders() {
        let reach = |steered| Reach::new(steered).unwrap();
        let veth = Door {
            nsid: 7,
            link: Some(3),
            pair: true,
        };
        assert!(!reach(&[3]).leads_home(&veth, Some(7)));
        // What another device receives may leave by it.
        assert!(reach(&[3, 4]).leads_home(&veth, Some(7)));
        assert!(reach(&[4]).leads_home(&veth, Some(7)));
        // A macvlan on the steered device.
        let macvlan = Door {
            pair: false,
            ..veth.clone()
        };
        assert!(reach(&[3]).leads_home(&macvlan, Some(7)));
        // To another namespace, and without a number of the devices'.
        assert!(!reach(&[4]).leads_home(&veth, Some(8)));
        assert!(!reach(&[4]).leads_home(&veth, None));
    }
}
