// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ethtool ioctl: per-queue counters and offloads of one device.
//!
//! The netlink interface has no names for drivers' own counters, such as veth's per-queue ones. The
//! socket ties the ioctl to its namespace, independent of the calling thread.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

// linux/sockios.h, linux/ethtool.h
const SIOCETHTOOL: libc::Ioctl = 0x8946;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSTATS: u32 = 0x1d;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_SFEATURES: u32 = 0x3b;
const ETHTOOL_SCHANNELS: u32 = 0x3d;
const ETH_SS_STATS: u32 = 1;
const ETH_SS_FEATURES: u32 = 4;
const ETH_GSTRING_LEN: usize = 32;

/// An offload, by the ethtool command that sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Offload {
    /// Checksums of sent packets. When off, they are computed in software, as on a wire.
    TxChecksum = 0x17,
    /// Generic receive offload; also gives a veth its NAPI without an XDP program.
    Gro = 0x2c,
}

/// A device, in the namespace in which it was opened.
pub struct Ethtool {
    socket: OwnedFd,
    name: String,
    counters: Vec<String>,
}

impl Ethtool {
    /// Opens the device in the calling thread's network namespace.
    pub fn open(name: &str) -> Result<Self> {
        let socket = socket(
            AddressFamily::Inet,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        let mut ethtool = Self {
            socket,
            name: name.to_string(),
            counters: Vec::new(),
        };
        ethtool.counters = match ethtool.strings(ETH_SS_STATS) {
            // Many software devices have no counters of their own.
            Err(error) if error.downcast_ref() == Some(&Errno::EOPNOTSUPP) => Vec::new(),
            names => names.with_context(|| format!("{name} names no counters"))?,
        };
        Ok(ethtool)
    }

    /// Switches an offload.
    pub fn set(&self, offload: Offload, on: bool) -> Result<()> {
        self.call(&mut [offload as u32, u32::from(on)])
            .with_context(|| format!("{}: {offload:?} cannot be switched", self.name))
    }

    /// Switches features by their names in `ethtool -k` (`rx-vlan-hw-parse`); names unknown to the
    /// kernel are ignored.
    pub fn set_features(&self, names: &[&str], on: bool) -> Result<()> {
        let known = self.strings(ETH_SS_FEATURES)?;
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
            .with_context(|| format!("{}: {names:?} cannot be switched", self.name))
    }

    /// Sets the numbers of receive and transmit queues, as `ethtool -L`.
    pub fn set_channels(&self, rx: u32, tx: u32) -> Result<()> {
        // struct ethtool_channels: cmd, four maxima, rx, tx, other, combined
        let mut request = [ETHTOOL_SCHANNELS, 0, 0, 0, 0, rx, tx, 0, 0];
        self.call(&mut request)
            .with_context(|| format!("{}: not {rx} and {tx} queues", self.name))
    }

    /// The driver's counters by name, as `ethtool -S` shows them.
    pub fn counters(&self) -> Result<BTreeMap<&str, u64>> {
        // struct ethtool_stats: cmd, n_stats, u64 data[]
        let mut stats = vec![0u32; 2 + 2 * self.counters.len()];
        stats[0] = ETHTOOL_GSTATS;
        stats[1] = self.counters.len() as u32;
        self.call(&mut stats)
            .with_context(|| format!("{} shows no counters", self.name))?;
        let values = stats[2..].chunks_exact(2).map(|half| {
            let [a, b, c, d] = half[0].to_ne_bytes();
            let [e, f, g, h] = half[1].to_ne_bytes();
            u64::from_ne_bytes([a, b, c, d, e, f, g, h])
        });
        Ok(self
            .counters
            .iter()
            .map(String::as_str)
            .zip(values)
            .collect())
    }

    /// Names of a string set, ETH_SS_*.
    fn strings(&self, set: u32) -> Result<Vec<String>> {
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
        let bytes: Vec<u8> = strings[3..].iter().flat_map(|w| w.to_ne_bytes()).collect();
        Ok(bytes
            .chunks_exact(ETH_GSTRING_LEN)
            .map(|name| {
                let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
                String::from_utf8_lossy(&name[..end]).into_owned()
            })
            .collect())
    }

    /// `request` is an ethtool command structure with room for the answer.
    fn call(&self, request: &mut [u32]) -> Result<()> {
        // SAFETY: an ifreq of zeros is valid.
        let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in ifreq.ifr_name.iter_mut().zip(self.name.bytes()) {
            *to = from as libc::c_char;
        }
        ifreq.ifr_ifru.ifru_data = request.as_mut_ptr().cast();
        // SAFETY: both structures outlive the call; callers size `request` for the answer.
        let ret = unsafe { libc::ioctl(self.socket.as_raw_fd(), SIOCETHTOOL, &raw mut ifreq) };
        Errno::result(ret)?;
        Ok(())
    }
}
