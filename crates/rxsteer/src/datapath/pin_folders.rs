// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where steering is pinned, whoever chose the folder: BPF file systems are searched.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tracing::debug;

use super::pins::{RECORD, is_generation, links};
use super::record::Record;
use crate::host::bpffs::{self, Folder};

/// Folders in folders, from the root of a BPF file system on. The default one has one above it.
const DEPTH: u32 = 4;

/// The folders with pins of the calling thread's network namespace. Those whose records can't be read
/// are not recognized, and those that others can change are not entered.
pub fn pin_folders() -> Vec<PathBuf> {
    let mut found = BTreeMap::new();
    for root in bpffs::mounts() {
        match Folder::find(&root) {
            Ok(folder) => folder.iter().for_each(|f| search(f, DEPTH, &mut found)),
            Err(e) => debug!("not searched for pins: {e:#}"),
        }
    }
    found.into_values().collect()
}

/// Adds what is found, by device and inode: a file system may be mounted at several places.
fn search(folder: &Folder, depth: u32, found: &mut BTreeMap<(u64, u64), PathBuf>) {
    for name in folder.names().unwrap_or_default() {
        let Ok(Some(inner)) = folder.folder(&name) else {
            continue;
        };
        if !is_generation(&name) {
            if depth > 0 {
                search(&inner, depth - 1, found);
            }
            continue;
        }
        let record = Record::open(&inner, RECORD);
        let is_here = record.is_ok_and(|record| record.is_of_this_netns().is_ok());
        // The number of a namespace that has ended is used again; its devices are gone.
        let steers = || links(&inner).is_ok_and(|links| !links.is_empty());
        if let (true, Ok(id)) = (is_here && steers(), folder.id()) {
            found.entry(id).or_insert_with(|| folder.path().to_owned());
        }
    }
}
