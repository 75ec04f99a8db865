// SPDX-License-Identifier: MIT OR Apache-2.0
//! BPF maps that a process has open.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapHandle};

/// Ids of the maps of a type, as its number in the kernel.
pub fn ids(pid: u32, map_type: u32) -> Result<BTreeSet<u32>> {
    let map_type = format!("map_type:\t{map_type}");
    let mut ids = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // A descriptor may be closed before it is read.
        let info = fs::read_to_string(entry?.path()).unwrap_or_default();
        if info.lines().any(|line| line == map_type) {
            let id = info.lines().find_map(|line| line.strip_prefix("map_id:\t"));
            ids.insert(id.context("a map has an id")?.parse()?);
        }
    }
    Ok(ids)
}

/// The array with this name.
pub fn map_of(pid: u32, name: &str) -> Result<MapHandle> {
    const BPF_MAP_TYPE_ARRAY: u32 = 2;
    let maps = ids(pid, BPF_MAP_TYPE_ARRAY)?;
    let mut maps = maps
        .into_iter()
        .filter_map(|id| MapHandle::from_map_id(id).ok());
    maps.find(|map| map.name() == name)
        .with_context(|| format!("process {pid} has no map {name}"))
}
