// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices about whose packets the kernel's RPS asks for a hash (`get_rps_cpu()` in net/core/dev.c): their
//! queues have a flow table, and their packets come without a hash. A child process puts back what there was,
//! also after SIGKILL.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use tracing::{error, info};

use super::ethtool::{Ethtool, RX_HASH};
use super::guardian::{self, Guardian};
use super::offloads::{self, Change};
use super::tunable::Tunables;
use super::{device, lock, netns};

/// The hidden command that runs [`put_back`].
pub const COMMAND: &str = "put-back-asked";

/// What is changed. Also the message to the child.
#[derive(Serialize, Deserialize)]
enum Changed {
    Hash(Change),
    Table(Table),
}

/// `rps_flow_cnt` of a queue, as it was.
#[derive(Serialize, Deserialize)]
struct Table {
    ifindex: u32,
    /// As `rx-0`.
    queue: String,
    before: String,
}

/// The devices of a network namespace. They are as before once this is dropped.
#[derive(Debug)]
pub struct Asked {
    guardian: Guardian,
    sys: Tunables,
    /// Of each queue's table.
    slots: String,
    /// Queues of which the child knows: interface index, and name.
    known: BTreeSet<(u32, String)>,
}

impl Asked {
    /// For devices of the calling thread's network namespace. `slots`: of each queue's table.
    ///
    /// # Errors
    /// When no child can be started, or as [`lock::take`].
    pub fn new(slots: u32) -> Result<Self> {
        let holder = "steers packets, and puts `rps_flow_cnt` back at its end";
        let lock = lock::take(&format!("asked {}", netns::inode()?), holder)?;
        let what = "rps_flow_cnt of queues and rx-hashing are set by `rxsteer run`";
        Ok(Self {
            guardian: Guardian::recorded(COMMAND, Some(lock), what)?,
            sys: Tunables::sys(),
            slots: slots.to_string(),
            known: BTreeSet::new(),
        })
    }

    /// Has the kernel ask about the packets of this device, in all of its queues. To be called again now
    /// and then: a queue may be new, and others may write these settings. Returns how many queues were not
    /// asked about.
    ///
    /// # Errors
    /// When the device is gone, or a setting can't be written.
    pub fn ask(&mut self, ifindex: u32) -> Result<u32> {
        let name = device::name_of(ifindex).context("the device is gone")?;
        let mut nr_set = 0;
        for queue in queues(&name)? {
            let path = table_of(&name, &queue);
            let Ok(before) = fs::read_to_string(format!("/sys/{path}")) else {
                continue;
            };
            if before.trim() == self.slots {
                continue;
            }
            if self.known.insert((ifindex, queue.clone())) {
                self.guardian.tell(&Changed::Table(Table {
                    ifindex,
                    queue,
                    before: before.trim().to_owned(),
                }))?;
            }
            self.sys.write(&path, &self.slots)?;
            nr_set += 1;
        }
        Ok(nr_set)
    }

    /// Turns the hash of the device off, if it gives packets one.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn without_hash(&mut self, ifindex: u32) -> Result<()> {
        let hashes = Ethtool::by_index(ifindex)?.features()?.on(&[RX_HASH]);
        let Some(feature) = hashes.first() else {
            return Ok(());
        };
        let name = device::name_of(ifindex).context("the device is gone")?;
        let change = Change::own(ifindex, &name, feature);
        info!("{change} on -> off, until the end");
        self.guardian.tell(&Changed::Hash(change.clone()))?;
        offloads::turn_off(&change)
    }

    /// Puts everything back.
    ///
    /// # Errors
    /// When something is not as before; the child has logged what.
    pub fn put_back(&mut self) -> Result<()> {
        self.guardian.end()
    }
}

/// Below /sys.
fn table_of(name: &str, queue: &str) -> String {
    format!("class/net/{name}/queues/{queue}/rps_flow_cnt")
}

/// The names of the receive queues.
fn queues(name: &str) -> Result<Vec<String>> {
    let folder = PathBuf::from(format!("/sys/class/net/{name}/queues"));
    let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    let name = |entry: fs::DirEntry| entry.file_name().into_string().ok();
    let names = entries.flatten().filter_map(name);
    Ok(names.filter(|name| name.starts_with("rx-")).collect())
}

/// Runs in the child: once the parent ends, puts the settings back, the last first. A device that is gone
/// needs nothing.
///
/// # Errors
/// When a setting can't be put back.
pub fn put_back() -> Result<()> {
    let mut changes = Vec::new();
    guardian::told(|change: Changed| changes.push(change))?;
    let mut failed = 0;
    let sys = Tunables::sys();
    for change in changes.iter().rev() {
        let outcome = match change {
            Changed::Hash(change) => offloads::restore(change),
            Changed::Table(table) => restore(table, &sys),
        };
        if let Err(e) = outcome {
            failed += 1;
            error!("not put back: {e:#}");
        }
    }
    ensure!(failed == 0, "{failed} settings are not as before");
    Ok(())
}

fn restore(table: &Table, sys: &Tunables) -> Result<()> {
    let Some(name) = device::name_of(table.ifindex) else {
        return Ok(());
    };
    let path = table_of(&name, &table.queue);
    match fs::read_to_string(format!("/sys/{path}")) {
        Ok(now) if now.trim() != table.before => sys.write(&path, &table.before),
        _ => Ok(()),
    }
}
