// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters, queues and offloads of one device.

use std::collections::BTreeMap;
use std::ops::Deref;

use anyhow::{Context, Result};
use nix::errno::Errno;
use rxsteer::host::ethtool;

// linux/ethtool.h
const ETHTOOL_GRINGPARAM: u32 = 0x10;
const ETHTOOL_SRINGPARAM: u32 = 0x11;
const ETHTOOL_GSTATS: u32 = 0x1d;
const ETHTOOL_GCHANNELS: u32 = 0x3c;
const ETHTOOL_SCHANNELS: u32 = 0x3d;
const ETH_SS_STATS: u32 = 1;

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
    device: ethtool::Ethtool,
    counters: Vec<String>,
}

impl Deref for Ethtool {
    type Target = ethtool::Ethtool;

    fn deref(&self) -> &Self::Target {
        &self.device
    }
}

impl Ethtool {
    /// Opens the device in the calling thread's network namespace.
    pub fn open(name: &str) -> Result<Self> {
        let device = ethtool::Ethtool::open(name)?;
        let counters = match device.strings(ETH_SS_STATS) {
            // Many software devices have no counters of their own.
            Err(Errno::EOPNOTSUPP) => Vec::new(),
            names => names.with_context(|| format!("{name} names no counters"))?,
        };
        Ok(Self { device, counters })
    }

    /// Switches an offload.
    pub fn set(&self, offload: Offload, on: bool) -> Result<()> {
        self.call(&mut [offload as u32, u32::from(on)])
            .with_context(|| format!("{}: {offload:?} cannot be switched", self.name.display()))
    }

    /// Sets the numbers of receive and transmit queues, as `ethtool -L`.
    pub fn set_channels(&self, rx: u32, tx: u32) -> Result<()> {
        // struct ethtool_channels: cmd, four maxima, rx, tx, other, combined
        let mut request = [ETHTOOL_SCHANNELS, 0, 0, 0, 0, rx, tx, 0, 0];
        self.call(&mut request)
            .with_context(|| format!("{}: not {rx} and {tx} queues", self.name.display()))
    }

    /// Sets the number of queues that receive and transmit, as `ethtool -L DEVICE combined N`.
    ///
    /// # Errors
    /// The driver does not change it.
    pub fn set_combined(&self, nr: u32) -> Result<()> {
        let mut request = [ETHTOOL_GCHANNELS, 0, 0, 0, 0, 0, 0, 0, 0];
        self.call(&mut request)
            .and_then(|()| {
                (request[0], request[8]) = (ETHTOOL_SCHANNELS, nr);
                self.call(&mut request)
            })
            .with_context(|| format!("{}: not {nr} queues", self.name.display()))
    }

    /// Sets the size of the receive rings, as `ethtool -G DEVICE rx N`; returns that of before.
    ///
    /// # Errors
    /// The driver does not change it.
    pub fn set_ring(&self, rx: u32) -> Result<u32> {
        // struct ethtool_ringparam: cmd, four maxima, rx, mini, jumbo, tx
        let mut request = [ETHTOOL_GRINGPARAM, 0, 0, 0, 0, 0, 0, 0, 0];
        let before = self.call(&mut request).and_then(|()| {
            let before = request[5];
            (request[0], request[5]) = (ETHTOOL_SRINGPARAM, rx);
            self.call(&mut request)?;
            Ok(before)
        });
        before.with_context(|| format!("{}: not {rx} frames", self.name.display()))
    }

    /// The driver's counters by name, as `ethtool -S` shows them.
    pub fn counters(&self) -> Result<BTreeMap<&str, u64>> {
        // struct ethtool_stats: cmd, n_stats, u64 data[]
        let mut stats = vec![0u32; 2 + 2 * self.counters.len()];
        stats[0] = ETHTOOL_GSTATS;
        stats[1] = self.counters.len() as u32;
        self.call(&mut stats)
            .with_context(|| format!("{} shows no counters", self.name.display()))?;
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
}
