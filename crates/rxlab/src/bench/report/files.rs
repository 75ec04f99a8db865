// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--report`: the page and, beside it, the same as JSON.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use tempfile::Builder;

use crate::bench::report::document::Document;
use crate::bench::report::page::page;

/// Where a report is written to.
#[derive(Debug)]
pub struct Files {
    page: PathBuf,
    json: PathBuf,
}

impl Files {
    /// `page`, and the same name with `.json`. Leaves nothing behind yet.
    ///
    /// # Errors
    /// When they could not be written.
    pub fn at(page: &Path) -> Result<Self> {
        let files = Self {
            page: page.to_owned(),
            json: page.with_extension("json"),
        };
        for path in [&files.page, &files.json] {
            // What is replaced is a file, and no device or pipe by which it goes elsewhere.
            let other = fs::metadata(path).is_ok_and(|what| !what.is_file());
            ensure!(!other, "{} exists and is not a file", path.display());
        }
        tempfile::tempfile_in(folder(page)).with_context(|| cannot(page))?;
        Ok(files)
    }

    /// Writes both, each at once: a reader never sees half of one.
    ///
    /// # Errors
    /// When the disk is full, for example.
    pub fn write(&self, document: &Document) -> Result<()> {
        write(&self.json, &json(document)?)?;
        write(&self.page, &page(document))
    }
}

/// What `--json` prints; ends with a newline.
///
/// # Errors
/// None that could be provoked.
pub fn json(document: &Document) -> Result<String> {
    Ok(serde_json::to_string(document)? + "\n")
}

fn cannot(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// Of a name alone it is this one.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Writes a file at once: a reader never sees half of it.
///
/// # Errors
/// When the disk is full, for example.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let replace = || -> Result<()> {
        // As any new file, less the umask.
        let mode = Permissions::from_mode(0o666);
        let mut file = Builder::new().permissions(mode).tempfile_in(folder(path))?;
        file.write_all(text.as_bytes())?;
        file.persist(path)?;
        Ok(())
    };
    replace().with_context(|| cannot(path))
}
