// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--report`: the file that `--json` prints.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use tempfile::Builder;

use crate::bench::report::document::Document;

/// Whether a report can be written there; creates no file.
///
/// # Errors
/// When the path is no file, or the folder is not writable.
pub fn writable(path: &Path) -> Result<()> {
    // Writing replaces the file by rename: a device or pipe would be lost.
    let other = fs::metadata(path).is_ok_and(|what| !what.is_file());
    ensure!(!other, "{} exists and is not a file", path.display());
    tempfile::tempfile_in(folder(path)).with_context(|| cannot(path))?;
    Ok(())
}

/// The JSON of `--json`; ends with a newline.
///
/// # Errors
/// When serialization fails.
pub fn json(document: &Document) -> Result<String> {
    Ok(serde_json::to_string(document)? + "\n")
}

fn cannot(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// Folder of a path; the current one for a bare name.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Writes a file atomically: a reader never sees a part of it.
///
/// # Errors
/// When the disk is full, for example.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let replace = || -> Result<()> {
        // Default mode of a new file; the umask applies.
        let mode = Permissions::from_mode(0o666);
        let mut file = Builder::new().permissions(mode).tempfile_in(folder(path))?;
        file.write_all(text.as_bytes())?;
        file.persist(path)?;
        Ok(())
    };
    replace().with_context(|| cannot(path))
}
