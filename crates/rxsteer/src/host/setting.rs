// SPDX-License-Identifier: MIT OR Apache-2.0
//! Temporary changes of host settings, restored when this process ends for whatever reason.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tracing::info;

use super::guardian::{self, Guardian};
use super::record::Record;
use super::{lock, netns, tunable};

/// Files in /proc/sys or /sys. On drop or the end of this process a child restores their contents.
pub struct Setting {
    paths: Vec<String>,
    guardian: Guardian,
}

/// The guardian's script. rxlab and tests keep settings, too, and have no hidden command for it. The
/// arguments are pairs of a file and its previous contents. A file that has these is not written: where
/// it can't be, it was not changed either.
const GUARD: &str = r#"
    trap "" INT TERM HUP
    read -r _
    while [ $# -gt 0 ]; do
        [ "$(cat "$1")" = "$2" ] || echo "$2" >"$1" || { echo "not put back: $1" >&2; bad=1; }
        shift 2
    done
    [ -n "$bad" ] || [ -z "$RXSTEER_RECORD" ] || rm -f "$RXSTEER_RECORD"
    exit ${bad:-0}"#;

/// A file and its previous contents, in the record.
#[derive(Serialize, Deserialize)]
struct Kept(String, String);

/// The guardian of the files in the lines of a record.
pub(super) fn guard(lines: &str) -> Command {
    let mut guardian = Command::new("sh");
    guardian.args(["-c", GUARD, "sh"]);
    for line in lines.lines() {
        // A process that is killed may leave a partial line; that change was not made.
        if let Ok(Kept(path, before)) = serde_json::from_str(line) {
            guardian.args([path, before]);
        }
    }
    guardian
}

impl Setting {
    /// Records the contents of `path` for the restore; changes nothing yet.
    ///
    /// # Errors
    /// When the file can't be read, or as [`lock::take`].
    pub fn keep(path: &str) -> Result<Self> {
        Self::keep_all(vec![path.to_owned()])
    }

    /// Records several files that belong together, as the calling thread's namespaces show them.
    ///
    /// # Errors
    /// When a file can't be read, or as [`lock::take`].
    pub fn keep_all(paths: Vec<String>) -> Result<Self> {
        Self::kept(paths, || None)
    }

    /// The same, also for the case that the child is killed too: `who` sets them, in words.
    ///
    /// # Errors
    /// When a file can't be read or locked.
    pub fn keep_recorded(paths: Vec<String>, who: &str) -> Result<Self> {
        let what = format!("{} is set by {who}", paths.join(", "));
        Self::kept(paths, || guardian::record(None, &what))
    }

    /// The record is made when nothing but the change itself can fail.
    fn kept(paths: Vec<String>, record: impl FnOnce() -> Option<Record>) -> Result<Self> {
        // Another process that changes these settings waits until they are restored.
        let first = paths.first().context("no settings to keep")?;
        // Network namespaces have files of their own in these folders.
        let netns = match first.contains("/net/") {
            true => netns::inode()?,
            false => 0,
        };
        let holder = format!("has changed {first}, and puts it back at its end");
        let lock = lock::take(&format!("setting {netns} {first}"), &holder)?;
        let mut lines = String::new();
        for path in &paths {
            let before = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
            let kept = Kept(path.clone(), before.trim().to_owned());
            lines += &format!("{}\n", serde_json::to_string(&kept)?);
        }
        let mut record = record();
        if let Some(record) = &mut record {
            record.add(lines.as_bytes())?;
        }
        let guardian = Guardian::spawn(&mut guard(&lines), Some(lock), record)
            .with_context(|| format!("cannot put {} back: is there no sh?", paths.join(", ")))?;
        Ok(Self { paths, guardian })
    }

    /// Writes `value` to all files.
    ///
    /// # Errors
    /// When the kernel refuses the value.
    pub fn set(&self, value: &str) -> Result<()> {
        self.paths
            .iter()
            .try_for_each(|path| tunable::write(path, value))
    }

    /// Restores the contents, and logs it.
    ///
    /// # Errors
    /// When a file is not as before; standard error has which.
    pub fn put_back(mut self) -> Result<()> {
        self.guardian.end()?;
        for path in &self.paths {
            info!("{path} is as it was: {}", fs::read_to_string(path)?.trim());
        }
        Ok(())
    }
}
