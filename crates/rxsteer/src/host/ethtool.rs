// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ethtool ioctl: the driver and the features of one device.
//!
//! The socket ties the ioctl to its namespace, independent of the calling thread. The netlink
//! interface has no names for drivers' own counters, which the lab reads.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsString};
use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use serde::Serialize;

use super::ifreq::{ifreq_of, name_in, socket};

// linux/ethtool.h
const ETHTOOL_GDRVINFO: u32 = 0x03;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_SFEATURES: u32 = 0x3b;
const ETH_SS_FEATURES: u32 = 4;
const ETH_GSTRING_LEN: usize = 32;
/// Words of `struct ethtool_drvinfo`; the driver's name is in the eight after the first.
const DRVINFO: usize = 49;

/// Features of the receiving end that take VLAN tags (802.1Q and 802.1ad) out of frames.
pub const RX_VLAN: &[&str] = &["rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"];
/// Features of the sending end that leave VLAN tags beside frames.
pub const TX_VLAN: &[&str] = &["tx-vlan-hw-insert", "tx-vlan-stag-hw-insert"];
/// Features of the sending end that leave checksums to the device.
pub const TX_CHECKSUM: &[&str] = &[
    "tx-checksum-ip-generic",
    "tx-checksum-ipv4",
    "tx-checksum-ipv6",
    "tx-checksum-sctp",
];
/// Features of the sending end that leave TCP's segmentation to the device (NETIF_F_ALL_TSO).
pub const TX_SEGMENTATION: &[&str] = &[
    "tx-tcp-segmentation",
    "tx-tcp-ecn-segmentation",
    "tx-tcp-mangleid-segmentation",
    "tx-tcp6-segmentation",
];
/// The feature by which the stack merges frames of a flow before it looks at them.
pub const RX_GRO: &str = "rx-gro";
/// The feature by which the device verifies checksums of received frames.
pub const RX_CHECKSUM: &str = "rx-checksum";
/// The feature by which the device gives packets a hash.
pub const RX_HASH: &str = "rx-hashing";
/// Filters for flows in the device, which accelerated RFS needs.
pub const NTUPLE: &str = "rx-ntuple-filter";
/// Features that merge frames in the device, with which most drivers refuse XDP.
pub const RX_MERGE: &[&str] = &["rx-lro", "rx-gro-hw"];

/// The state of features of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// None of them is on.
    Off,
    /// One is on.
    On,
    /// One is on, and the driver can't turn it off.
    Fixed,
}

/// The state of a feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Feature {
    /// It is on.
    pub active: bool,
    /// It was requested: it is on, or comes on when what is in the way is gone.
    pub wanted: bool,
    /// The driver can change it.
    pub changeable: bool,
}

/// Features by their names in `ethtool -k`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Features(pub BTreeMap<String, Feature>);

impl Features {
    /// The state of those named, of those that the kernel knows.
    pub fn offload(&self, names: &[&str]) -> Offload {
        let known = names.iter().filter_map(|name| self.0.get(*name));
        let on: Vec<_> = known.filter(|feature| feature.active).collect();
        if on.is_empty() {
            Offload::Off
        } else if on.iter().all(|feature| feature.changeable) {
            Offload::On
        } else {
            Offload::Fixed
        }
    }

    /// Those of the named features that are on and can be turned off.
    pub fn on<'a>(&self, names: &[&'a str]) -> Vec<&'a str> {
        let on = |name: &&str| self.0.get(*name).is_some_and(|f| f.active && f.changeable);
        names.iter().copied().filter(on).collect()
    }
}

/// A device, in the namespace in which it was opened, also when it gets another name.
#[derive(Debug)]
pub struct Ethtool {
    socket: OwnedFd,
    ifindex: u32,
    /// The device's name when it was opened: any bytes, if a container has chosen it.
    pub name: OsString,
}

impl Ethtool {
    /// Opens the device in the calling thread's network namespace.
    ///
    /// # Errors
    /// When there is no such device, or the process can't open sockets.
    pub fn open(name: &str) -> Result<Self> {
        Self::by_index(if_nametoindex(name)?)
    }

    /// As [`Self::open`], by interface index.
    ///
    /// # Errors
    /// ENODEV without such a device.
    pub fn by_index(ifindex: u32) -> Result<Self> {
        let socket = socket()?;
        let name = name_in(&ifreq_of(&socket, ifindex)?);
        Ok(Self {
            socket,
            ifindex,
            name,
        })
    }

    /// The driver's name; virtual devices have no driver link in sysfs. Empty for devices without
    /// ethtool operations.
    ///
    /// # Errors
    /// When the query of the kernel fails.
    pub fn driver(&self) -> Result<String> {
        let mut info = [0; DRVINFO];
        info[0] = ETHTOOL_GDRVINFO;
        match self.call(&mut info) {
            Err(Errno::EOPNOTSUPP) => return Ok(String::new()),
            done => done.with_context(|| {
                format!(
                    "cannot ask the kernel for the driver of {}",
                    self.name.display()
                )
            })?,
        }
        let bytes = bytes_of(&info[1..9]);
        let driver = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
        Ok(driver.to_string_lossy().into_owned())
    }

    /// All features that the kernel knows.
    ///
    /// # Errors
    /// When the query of the kernel fails.
    pub fn features(&self) -> Result<Features> {
        let names = self.feature_names()?;
        // struct ethtool_gfeatures: cmd, size, { u32 available, requested, active, never_changed }
        let blocks = names.len().div_ceil(32);
        let mut reply = vec![0; 2 + 4 * blocks];
        reply[0] = ETHTOOL_GFEATURES;
        reply[1] = blocks as u32;
        self.call(&mut reply).with_context(|| {
            format!(
                "cannot ask the kernel for the features of {}",
                self.name.display()
            )
        })?;
        let feature = |(bit, name): (usize, String)| {
            let is_set = |word: usize| reply[2 + 4 * (bit / 32) + word] >> (bit % 32) & 1 == 1;
            let feature = Feature {
                active: is_set(2),
                wanted: is_set(1),
                changeable: is_set(0) && !is_set(3),
            };
            (name, feature)
        };
        Ok(Features(
            names.into_iter().enumerate().map(feature).collect(),
        ))
    }

    /// Requests features by name; those unknown to the kernel are ignored. The kernel also turns
    /// off features that need one of them, and on again with it.
    ///
    /// # Errors
    /// When the kernel or the driver refuses.
    pub fn set_features(&self, names: &[&str], on: bool) -> Result<()> {
        let known = self.feature_names()?;
        // struct ethtool_sfeatures: cmd, size, { u32 valid, u32 requested }[size]
        let blocks = known.len().div_ceil(32);
        let mut request = vec![0; 2 + 2 * blocks];
        request[0] = ETHTOOL_SFEATURES;
        request[1] = blocks as u32;
        for (bit, name) in known.iter().enumerate() {
            if names.contains(&name.as_str()) {
                let block = 2 + 2 * (bit / 32);
                request[block] |= 1 << (bit % 32);
                request[block + 1] |= u32::from(on) << (bit % 32);
            }
        }
        self.call(&mut request)
            .with_context(|| format!("{}: {names:?} cannot be switched", self.name.display()))
    }

    fn feature_names(&self) -> Result<Vec<String>> {
        self.strings(ETH_SS_FEATURES).with_context(|| {
            format!(
                "cannot ask the kernel for the features of {}",
                self.name.display()
            )
        })
    }

    /// Names of a string set, ETH_SS_*.
    ///
    /// # Errors
    /// EOPNOTSUPP if the device has no such set.
    pub fn strings(&self, set: u32) -> nix::Result<Vec<String>> {
        // struct ethtool_sset_info: cmd, reserved, u64 sset_mask, u32 data[]
        let mut info = [ETHTOOL_GSSET_INFO, 0, 0, 0, 0];
        let mask = (1u64 << set).to_ne_bytes();
        info[2] = u32::from_ne_bytes([mask[0], mask[1], mask[2], mask[3]]);
        info[3] = u32::from_ne_bytes([mask[4], mask[5], mask[6], mask[7]]);
        self.call(&mut info)?;
        let count = info[4] as usize;

        // struct ethtool_gstrings: cmd, string_set, len, u8 data[]
        let mut strings = vec![0u32; 3 + count * ETH_GSTRING_LEN / 4];
        strings[..3].copy_from_slice(&[ETHTOOL_GSTRINGS, set, count as u32]);
        self.call(&mut strings)?;
        let name = |name: &[u8]| {
            let name = name.split(|&b| b == 0).next().unwrap_or_default();
            String::from_utf8_lossy(name).into_owned()
        };
        let bytes = bytes_of(&strings[3..]);
        Ok(bytes.chunks_exact(ETH_GSTRING_LEN).map(name).collect())
    }

    /// `request` is an ethtool command structure with room for the answer.
    ///
    /// # Errors
    /// The kernel's.
    pub fn call(&self, request: &mut [u32]) -> nix::Result<()> {
        let mut ifreq = ifreq_of(&self.socket, self.ifindex)?;
        ifreq.ifr_ifru.ifru_data = request.as_mut_ptr().cast();
        // SAFETY: both structures outlive the call; callers size `request` for the answer.
        let ret = unsafe {
            libc::ioctl(
                self.socket.as_raw_fd(),
                libc::SIOCETHTOOL as libc::Ioctl,
                &raw mut ifreq,
            )
        };
        Errno::result(ret).map(drop)
    }
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offloads_are_off_on_or_fixed() {
        let features = |active: &[&str], changeable: &[&str]| {
            let feature = |name: &str| Feature {
                active: active.contains(&name),
                wanted: active.contains(&name),
                changeable: changeable.contains(&name),
            };
            let names = ["a", "b", "c"];
            Features(names.map(|name| (name.to_owned(), feature(name))).into())
        };
        let offload =
            |active: &[&str], hw: &[&str]| features(active, hw).offload(&["a", "b", "none"]);
        assert_eq!(offload(&[], &["a", "b"]), Offload::Off);
        assert_eq!(offload(&["c"], &["c"]), Offload::Off);
        assert_eq!(offload(&["b"], &["a", "b"]), Offload::On);
        assert_eq!(offload(&["a", "b"], &["a"]), Offload::Fixed);
        assert_eq!(features(&["a", "b"], &["a"]).on(&["a", "b", "c"]), ["a"]);
    }

    #[test]
    fn the_loopback_device_has_fixed_features() {
        let lo = Ethtool::by_index(1).unwrap();
        assert_eq!(lo.name, "lo");
        assert_eq!(lo.driver().unwrap(), "");
        let features = lo.features().unwrap();
        let loopback = features.0["loopback"];
        assert!(loopback.active && !loopback.changeable, "{features:?}");
        assert_eq!(features.offload(RX_VLAN), Offload::Off);
        assert!(Ethtool::by_index(u32::MAX).is_err());
    }
}
