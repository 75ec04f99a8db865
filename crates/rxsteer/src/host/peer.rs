// SPDX-License-Identifier: MIT OR Apache-2.0
//! The other end of a veth, wherever it is: most often in a container's network namespace.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, anyhow};
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::SockProtocol;

use super::ethtool::{Ethtool, Offload, TX_CHECKSUM, TX_SEGMENTATION, TX_VLAN};
use super::gone::is_gone;
use super::netlink::{exchange, link, number, put_attr};
use super::shell::quoted;

// linux/net_namespace.h
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
/// Bytes of `struct rtgenmsg`, padded.
const RTGENMSG: usize = 4;

/// What the other end of a veth sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name in its namespace: any bytes, as a container has chosen them.
    pub name: OsString,
    /// A path of its namespace; `None` if that is the caller's.
    pub netns: Option<PathBuf>,
    /// It leaves VLAN tags beside frames.
    pub tags: Offload,
    /// It leaves out checksums.
    pub checksums: Offload,
    /// It leaves segments of TCP together.
    pub segments: Offload,
}

impl Peer {
    /// Of veth `ifindex` in the caller's network namespace; `None` if no path leads to the peer's, or
    /// if it ends meanwhile.
    ///
    /// # Errors
    /// When a query of the kernel fails.
    pub fn of(ifindex: u32) -> Result<Option<Self>> {
        match Self::read(ifindex) {
            Err(e) if is_gone(&e) => Ok(None),
            peer => peer,
        }
    }

    fn read(ifindex: u32) -> Result<Option<Self>> {
        let Some((ethtool, netns)) = open(ifindex)? else {
            return Ok(None);
        };
        let features = ethtool.features()?;
        Ok(Some(Self {
            tags: features.offload(TX_VLAN),
            checksums: features.offload(TX_CHECKSUM),
            segments: features.offload(TX_SEGMENTATION),
            name: ethtool.name,
            netns,
        }))
    }

    /// The command for a shell that sets `features` of the peer, where it is.
    pub fn ethtool(&self, features: &str) -> String {
        let prefix = match &self.netns {
            Some(path) => format!("nsenter --net={} ", quoted(path)),
            None => String::new(),
        };
        format!("{prefix}ethtool -K {} {features}", quoted(&self.name))
    }
}

/// Opens the other end of veth `ifindex`; with the path of its namespace if it is in another one.
///
/// # Errors
/// When the veth or its other end does not exist, or a query of the kernel fails.
pub(super) fn open(ifindex: u32) -> Result<Option<(Ethtool, Option<PathBuf>)>> {
    at(ifindex, Ethtool::by_index)
}

/// Calls `f` with the interface index of the other end of veth `ifindex`, in its network namespace; with the
/// path of that if it is another one than the caller's. `None` if no path leads there.
///
/// # Errors
/// When the veth does not exist, a query of the kernel fails, or as `f`.
pub fn at<T: Send>(
    ifindex: u32,
    f: impl FnOnce(u32) -> Result<T> + Send,
) -> Result<Option<(T, Option<PathBuf>)>> {
    let link = link(ifindex)?;
    let attr = |kind| number(&link, kind);
    let Some(peer) = attr(libc::IFLA_LINK).and_then(|peer| u32::try_from(peer).ok()) else {
        return Ok(None);
    };
    // Absent if the peer is in this namespace.
    let Some(nsid) = attr(libc::IFLA_LINK_NETNSID) else {
        return Ok(Some((f(peer)?, None)));
    };
    for (_, path) in namespaces() {
        // Processes end meanwhile.
        let Ok(file) = File::open(&path) else {
            continue;
        };
        if nsid_of(&file)? != Some(nsid) {
            continue;
        }
        let inside = || {
            // Without privileges there is no way in.
            let entered = setns(&file, CloneFlags::CLONE_NEWNET).is_ok();
            entered.then(|| f(peer)).transpose()
        };
        let done = thread::scope(|scope| {
            let thread = thread::Builder::new().spawn_scoped(scope, inside);
            let thread = thread.context("no thread for a network namespace")?;
            let panicked = |_| anyhow!("the thread in a network namespace panicked");
            thread.join().map_err(panicked)?
        });
        return Ok(done?.map(|done| (done, Some(path))));
    }
    Ok(None)
}

/// The caller's number of another network namespace, if it has one.
pub(super) fn nsid_of(netns: &File) -> Result<Option<u64>> {
    let mut request = vec![0; RTGENMSG];
    put_attr(&mut request, NETNSA_FD, &netns.as_raw_fd().to_ne_bytes());
    let replies = match exchange(SockProtocol::NetlinkRoute, libc::RTM_GETNSID, 0, &request) {
        // EINVAL: it was unmounted before it was opened, and the path is that of a plain file now.
        Err(e) if e.kind() == ErrorKind::InvalidInput => return Ok(None),
        replies => {
            replies.context("cannot ask the kernel for the number of a network namespace")?
        }
    };
    let reply = replies.first().context("the kernel gives no number")?;
    Ok(number(
        reply.get(RTGENMSG..).unwrap_or_default(),
        NETNSA_NSID,
    ))
}

/// A path of each network namespace that is mounted somewhere or has a process, by inode.
pub(super) fn namespaces() -> BTreeMap<u64, PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounted = mounts.lines().filter_map(mounted_netns);
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let of_process = |process: &Path| {
        let name = process.file_name()?.to_str()?;
        name.parse::<u32>().ok()?;
        Some(process.join("ns/net"))
    };
    let of_processes = processes.filter_map(|process| of_process(&process.path()));
    let mut found = BTreeMap::new();
    // A mounted namespace stays when its processes end.
    for path in mounted.chain(of_processes) {
        if let Ok(metadata) = fs::metadata(&path) {
            found.entry(metadata.ino()).or_insert(path);
        }
    }
    found
}

/// The path of a network namespace that this line of mountinfo mounts (`ip netns add`).
fn mounted_netns(line: &str) -> Option<PathBuf> {
    let mut fields = line.split(' ').skip(3);
    let (root, path) = (fields.next()?, fields.next()?);
    // Paths with spaces are escaped, and not looked at.
    root.starts_with("net:[").then(|| PathBuf::from(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounted_namespaces_are_found() {
        let netns = "420 392 0:4 net:[4026532412] /run/netns/blue rw shared:218 - nsfs nsfs rw";
        assert_eq!(mounted_netns(netns), Some("/run/netns/blue".into()));
        let other = "31 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw";
        assert_eq!(mounted_netns(other), None);
        let mnt = "420 392 0:4 mnt:[4026532412] /run/ns rw shared:218 - nsfs nsfs rw";
        assert_eq!(mounted_netns(mnt), None);
    }

    #[test]
    fn the_own_namespace_has_a_process() {
        let own = fs::metadata("/proc/self/ns/net").unwrap().ino();
        assert!(namespaces().contains_key(&own));
    }
}
