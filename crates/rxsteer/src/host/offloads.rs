// SPDX-License-Identifier: MIT OR Apache-2.0
//! Offloads that are off while this process runs. A child process turns them on again at the end,
//! also after SIGKILL.

use std::fmt;
use std::fs::{self, File};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tracing::{error, info, warn};

use super::device::Device;
use super::ethtool::{Ethtool, Offload, RX_MERGE, RX_VLAN, TX_CHECKSUM, TX_VLAN};
use super::gone::is_gone;
use super::guardian::{self, Guardian};
use super::{lock, netns, peer};

/// The hidden command that runs [`put_back`].
pub const COMMAND: &str = "put-back-offloads";

/// Time in which a driver may take an offload back. Some refuse it until their XDP program is gone,
/// which the kernel removes some time after a kill.
const PATIENCE: Duration = Duration::from_secs(5);

/// An end of a device's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum End {
    Own,
    /// Of a veth.
    Other,
}

/// An offload that is on, and is turned off. Also the message to the child.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Of the device, also for its other end: that is found anew at the end, so that nothing holds
    /// its network namespace meanwhile.
    ifindex: u32,
    end: End,
    /// The name of the end.
    name: String,
    feature: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = match self.end {
            End::Own => "",
            End::Other => " (the other end)",
        };
        write!(f, "{}{end}: {}", self.name, self.feature)
    }
}

impl Change {
    /// A feature of the device itself.
    pub(super) fn own(ifindex: u32, name: &str, feature: &str) -> Self {
        Self {
            ifindex,
            end: End::Own,
            name: name.to_owned(),
            feature: feature.to_owned(),
        }
    }
}

impl Device {
    /// What can be turned off of that which stands against native mode.
    ///
    /// # Errors
    /// When a query of the kernel fails.
    pub fn preparation(&self) -> Result<Vec<Change>> {
        let own = (End::Own, [RX_VLAN, RX_MERGE].concat());
        let other = (End::Other, [TX_VLAN, TX_CHECKSUM].concat());
        let (end, names) = match self.driver.as_str() {
            "veth" => other,
            _ => own,
        };
        let Some(ethtool) = open(self.ifindex, end)? else {
            return Ok(Vec::new());
        };
        let on = ethtool.features()?.on(&names);
        let change = |feature: &str| Change {
            ifindex: self.ifindex,
            end,
            name: ethtool.name.to_string_lossy().into_owned(),
            feature: feature.to_owned(),
        };
        Ok(on.into_iter().map(change).collect())
    }

    /// The device as it is after [`Self::preparation`].
    pub fn prepared(&self) -> Self {
        let off = |offload: Offload| match offload {
            Offload::On => Offload::Off,
            other => other,
        };
        let mut prepared = self.clone();
        match &mut prepared.peer {
            Some(peer) => {
                peer.tags = off(peer.tags);
                peer.checksums = off(peer.checksums);
            }
            None if self.driver == "veth" => {}
            None => prepared.rx_vlan_offload = off(self.rx_vlan_offload),
        }
        prepared.rx_merge = off(self.rx_merge);
        prepared
    }
}

/// Waits until no process is about to put back offloads of this device of the caller's network
/// namespace, and keeps others from it; `None` if there is no such device.
///
/// # Errors
/// As [`lock::take`].
pub fn lock(name: &str) -> Result<Option<File>> {
    let ifindex = format!("/sys/class/net/{name}/ifindex");
    let Ok(ifindex) = fs::read_to_string(ifindex) else {
        return Ok(None);
    };
    let lock = format!("offloads {} {}", netns::inode()?, ifindex.trim());
    let holder = format!("has changed {name}, and puts it back at its end");
    lock::take(&lock, &holder).map(Some)
}

/// Offloads that are off until this is dropped.
#[derive(Debug)]
pub struct TurnedOff(Guardian);

impl TurnedOff {
    /// Turns the offloads of one device off, in this order, and logs it.
    ///
    /// # Errors
    /// When the kernel refuses; then all are as before.
    pub fn new(changes: &[Change], lock: File) -> Result<Self> {
        let names: Vec<_> = changes.iter().map(ToString::to_string).collect();
        let what = format!("turned off by `run --prepare`: {}", names.join("; "));
        let mut guardian = Guardian::recorded(COMMAND, Some(lock), &what)?;
        for change in changes {
            info!("{change} on -> off, until the end");
            guardian.tell(change)?;
            turn_off(change)?;
        }
        Ok(Self(guardian))
    }

    /// Turns them on again, the last first.
    ///
    /// # Errors
    /// When one is not as before; the log says which.
    pub fn put_back(mut self) -> Result<()> {
        self.0.end()
    }
}

pub(super) fn turn_off(change: &Change) -> Result<()> {
    let Some(ethtool) = open(change.ifindex, change.end)? else {
        bail!("{} is gone", change.name);
    };
    let feature = change.feature.as_str();
    let before = ethtool.features()?;
    ethtool.set_features(&[feature], false)?;
    let now = ethtool.features()?;
    ensure!(!now.0[feature].active, "{change} could not be turned off");
    let went = before
        .0
        .iter()
        .filter(|(name, was)| was.active && !now.0[*name].active && *name != feature);
    let went: Vec<&str> = went.map(|(name, _)| name.as_str()).collect();
    if !went.is_empty() {
        info!(
            "{}: the kernel turned off what needs it: {}",
            change.name,
            went.join(", ")
        );
    }
    Ok(())
}

/// The end of a device; `None` if it can't be reached.
fn open(ifindex: u32, end: End) -> Result<Option<Ethtool>> {
    match end {
        End::Own => Ethtool::by_index(ifindex).map(Some),
        End::Other => Ok(peer::open(ifindex)?.map(|(ethtool, _)| ethtool)),
    }
}

/// Runs in the child: once the parent ends, turns the offloads on again, the last first, unless
/// another program has done so.
///
/// # Errors
/// When one can't be turned on.
pub fn put_back() -> Result<()> {
    let mut changes: Vec<Change> = Vec::new();
    guardian::told(|change| changes.push(change))?;
    let mut failed = 0;
    for change in changes.iter().rev() {
        if let Err(e) = restore(change) {
            failed += 1;
            error!("{change} not put back: {e:#}");
        }
    }
    ensure!(failed == 0, "{failed} settings are not as before");
    Ok(())
}

pub(super) fn restore(change: &Change) -> Result<()> {
    let ethtool = match open(change.ifindex, change.end) {
        Ok(Some(ethtool)) => ethtool,
        Ok(None) => bail!("no path leads to its network namespace any more"),
        Err(e) if is_gone(&e) => return Ok(()),
        Err(e) => return Err(e),
    };
    let feature = change.feature.as_str();
    if ethtool.features()?.0[feature].wanted {
        warn!("{change} is on already: another program has turned it on");
        return Ok(());
    }
    let start = Instant::now();
    loop {
        let set = ethtool.set_features(&[feature], true);
        if ethtool.features()?.0[feature].active {
            info!("{change} off -> on");
            return Ok(());
        }
        if start.elapsed() > PATIENCE {
            set?;
            bail!("the driver does not turn it on");
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::objection::tests::{card, veth};
    use crate::host::peer::Peer;

    #[test]
    fn what_can_be_turned_off_is_off_afterwards() {
        let device = Device {
            rx_vlan_offload: Offload::On,
            rx_merge: Offload::On,
            ..card()
        };
        let prepared = device.prepared();
        assert_eq!(prepared.rx_vlan_offload, Offload::Off);
        assert_eq!(prepared.rx_merge, Offload::Off);
        assert_eq!(prepared.objection_to_native(), None);
        let fixed = Device {
            rx_vlan_offload: Offload::Fixed,
            ..card()
        };
        assert!(fixed.prepared().objection_to_native().is_some());
    }

    #[test]
    fn a_veth_is_prepared_at_its_other_end() {
        let out_of_reach = Device {
            rx_vlan_offload: Offload::On,
            ..veth()
        };
        assert!(out_of_reach.prepared().objection_to_native().is_some());
        let peer = Peer {
            name: "eth0".into(),
            netns: None,
            tags: Offload::On,
            checksums: Offload::On,
            segments: Offload::On,
        };
        let device = Device {
            peer: Some(peer),
            ..out_of_reach
        };
        assert!(device.objection_to_native().is_some());
        assert_eq!(device.prepared().objection_to_native(), None);
    }

    #[test]
    fn a_device_that_is_gone_needs_nothing_put_back() {
        for end in [End::Own, End::Other] {
            let change = Change {
                ifindex: 0x7fff_ffff,
                end,
                name: "rxsteer-none".into(),
                feature: "rx-lro".into(),
            };
            restore(&change).unwrap();
        }
    }
}
