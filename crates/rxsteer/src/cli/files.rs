// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the configuration of `rxsteer run` is: a main file, and drop-ins beside it; how files are read.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::sys::stat::makedev;

use crate::daemon::mistakes::Mistakes;

/// The vendor's folder and the administrator's. A file in the latter replaces the vendor's of the same
/// name, as with systemd (systemd.unit(5)).
const FOLDERS: [&str; 2] = ["/usr/lib/rxsteer", "/etc/rxsteer"];

/// In each folder.
const MAIN: &str = "rxsteer.toml";
const DROP_INS: &str = "rxsteer.d";

/// Name of the drop-in that `rxsteer mode` writes. Others that are to replace its keys come later by name.
const MODE: &str = "10-mode.toml";

/// The longest file that is read, in bytes; one with all keys has some 20,000.
const LONGEST: u64 = 4 << 20;

/// The content of a configuration file.
///
/// # Errors
/// When it can't be opened; [`Mistakes`] when it is no regular file, which could have no end, or is
/// too long.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    let shown = path.display();
    let file = OpenOptions::new()
        .read(true)
        // A FIFO would be waited for.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .with_context(|| shown.to_string())?;
    if is_null(&file)? {
        return Ok(Vec::new());
    }
    let mistake = |why: String| Err(Mistakes::from(format!("{shown}: {why}")).into());
    if !file.metadata()?.is_file() {
        return mistake("not a regular file: write the configuration to one".to_owned());
    }
    let mut content = Vec::new();
    let read = file.take(LONGEST + 1).read_to_end(&mut content);
    if read.with_context(|| shown.to_string())? as u64 > LONGEST {
        let most = LONGEST >> 20;
        return mistake(format!("longer than {most} MiB, which no configuration is"));
    }
    Ok(content)
}

/// Whether it is /dev/null: a link there leaves out a vendor's file.
fn is_null(file: &File) -> Result<bool> {
    let facts = file.metadata()?;
    Ok(facts.file_type().is_char_device() && facts.rdev() == makedev(1, 3))
}

/// The drop-in that `rxsteer mode` writes.
pub(super) fn of_mode() -> PathBuf {
    [FOLDERS[1], DROP_INS, MODE].iter().collect()
}

/// The files that exist, in the order in which they are read: the main file, then drop-ins by name.
///
/// # Errors
/// When a folder can't be listed.
pub(super) fn configured() -> Result<Vec<PathBuf>> {
    configured_in(&FOLDERS.map(Path::new))
}

/// The main files, for messages.
pub(super) fn places() -> String {
    let [vendor, own] = FOLDERS.map(|folder| format!("{folder}/{MAIN}"));
    format!("{own} or {vendor}")
}

fn configured_in(folders: &[&Path]) -> Result<Vec<PathBuf>> {
    // A link without a target is there: reading it fails with its name.
    let is_there = |path: &PathBuf| path.symlink_metadata().is_ok();
    let main = folders.iter().rev().map(|folder| folder.join(MAIN));
    let main = main.into_iter().find(is_there);
    let mut drop_ins = BTreeMap::new();
    for folder in folders.iter().map(|folder| folder.join(DROP_INS)) {
        let entries = match fs::read_dir(&folder) {
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            entries => entries.with_context(|| folder.display().to_string())?,
        };
        for entry in entries {
            let entry = entry.with_context(|| folder.display().to_string())?;
            let path = entry.path();
            if path
                .extension()
                .is_some_and(|extension| extension == "toml")
            {
                drop_ins.insert(entry.file_name(), path);
            }
        }
    }
    Ok(main.into_iter().chain(drop_ins.into_values()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_replaces_the_vendors_of_the_same_name() {
        let root = tempfile::tempdir().unwrap();
        let [vendor, own] = ["usr", "etc"].map(|name| root.path().join(name));
        let write = |folder: &Path, name: &str| {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
        };
        let found = || {
            let files = configured_in(&[&vendor, &own]).unwrap();
            let short = |path: &PathBuf| path.strip_prefix(&root).unwrap().display().to_string();
            files.iter().map(short).collect::<Vec<_>>()
        };
        assert_eq!(found(), [""; 0]);
        write(&vendor, "rxsteer.toml");
        for name in ["20-b.toml", "10-a.toml", "30-c.toml.orig"] {
            write(&vendor.join("rxsteer.d"), name);
        }
        let expected = [
            "usr/rxsteer.toml",
            "usr/rxsteer.d/10-a.toml",
            "usr/rxsteer.d/20-b.toml",
        ];
        assert_eq!(found(), expected);
        write(&own, "rxsteer.toml");
        for name in ["20-b.toml", "15-c.toml"] {
            write(&own.join("rxsteer.d"), name);
        }
        let expected = [
            "etc/rxsteer.toml",
            "usr/rxsteer.d/10-a.toml",
            "etc/rxsteer.d/15-c.toml",
            "etc/rxsteer.d/20-b.toml",
        ];
        assert_eq!(found(), expected);
    }
}
