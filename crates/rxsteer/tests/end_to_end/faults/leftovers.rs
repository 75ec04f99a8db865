// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a schedule could leave behind on the host, for the whole machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::query::{MapInfoIter, ProgInfoIter};
use rxsteer::host::lock;
use rxsteer::host::topology::Topology;

/// Settings that concern received packets.
const SYSCTLS: &str = "/proc/sys/net/core";

/// Names of files and of links' targets in a folder; empty if it is missing.
fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| match fs::read_link(entry.path()) {
        Ok(target) => target.to_string_lossy().into_owned(),
        Err(_) => entry.file_name().to_string_lossy().into_owned(),
    });
    names.collect()
}

/// All there is now, in words.
fn present() -> Result<BTreeSet<String>> {
    let mut present = BTreeSet::new();
    for program in ProgInfoIter::default() {
        present.insert(format!("program {} {:?}", program.id, program.name));
    }
    for map in MapInfoIter::default() {
        present.insert(format!("map {} {:?}", map.id, map.name));
    }
    for folder in [lock::FOLDER, "/run/netns"] {
        // The file of locks stays.
        let names = names(folder).into_iter().filter(|name| name != lock::FILE);
        present.extend(names.map(|name| format!("{folder}/{name}")));
    }
    let online = Topology::host().online()?;
    let cpus = names("/sys/devices/system/cpu");
    let cpus = cpus
        .iter()
        .filter_map(|name| name.strip_prefix("cpu")?.parse().ok());
    let offline = cpus.filter(|&cpu: &u32| !online.contains(cpu));
    present.extend(offline.map(|cpu| format!("CPU {cpu} offline")));
    for name in names(SYSCTLS) {
        let path = format!("{SYSCTLS}/{name}");
        let value = fs::read_to_string(&path).unwrap_or_default();
        present.insert(format!("{path} is {}", value.trim()));
    }
    for process in names("/proc")
        .iter()
        .filter(|name| name.parse::<u32>().is_ok())
    {
        let comm = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        if comm.starts_with("cpumap/") {
            present.insert(format!("thread {}", comm.trim()));
        }
        // Threads may be in other namespaces than their process.
        let threads = names(format!("/proc/{process}/task")).into_iter();
        let links =
            threads.map(|thread| fs::read_link(format!("/proc/{process}/task/{thread}/ns/net")));
        let links = links
            .flatten()
            .map(|link| link.to_string_lossy().into_owned());
        let held = names(format!("/proc/{process}/fd"))
            .into_iter()
            .chain(links);
        let held = held.filter(|link| link.starts_with("net:"));
        present.extend(held.map(|link| format!("namespace {link}")));
    }
    Ok(present)
}

/// The host before a schedule.
pub struct Host(BTreeSet<String>);

impl Host {
    pub fn now() -> Result<Self> {
        present().map(Self)
    }

    /// What is there and was not. The kernel removes things some time after their end: waits so long
    /// for that.
    pub fn leftovers(&self, patience: Duration) -> Result<Vec<String>> {
        let start = Instant::now();
        loop {
            let left: Vec<String> = present()?.difference(&self.0).cloned().collect();
            if left.is_empty() || start.elapsed() > patience {
                return Ok(left);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
