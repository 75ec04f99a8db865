// SPDX-License-Identifier: MIT OR Apache-2.0
//! Settings of the host, changed for as long as they are needed and put back whatever happens.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// Files in /proc/sys or /sys. When this is dropped, or this process killed, they hold again what
/// they held before: a child that waits for nothing else writes it.
pub struct Setting {
    paths: Vec<String>,
    guardian: Child,
}

/// Its standard input ends when the last who could write to it has: that is this process. Its
/// arguments are files, each with what it held.
const GUARD: &str = r#"
    trap "" INT TERM HUP
    read -r _
    while [ $# -gt 0 ]; do
        echo "$2" >"$1" || bad=1
        shift 2
    done
    exit ${bad:-0}"#;

impl Setting {
    /// Nothing changes yet.
    ///
    /// # Errors
    /// When the host has no such setting.
    pub fn keep(path: &str) -> Result<Self> {
        Self::keep_all(vec![path.to_owned()])
    }

    /// Several that belong together. They are those of the calling thread's namespaces.
    ///
    /// # Errors
    /// When the host lacks one.
    pub fn keep_all(paths: Vec<String>) -> Result<Self> {
        // Whoever changes the same settings waits until they are back. The guardian holds the lock, by
        // an output that it does not use.
        let first = paths.first().context("no settings to keep")?;
        let lock = File::open(first).with_context(|| format!("cannot read {first}"))?;
        lock.lock()
            .with_context(|| format!("cannot lock {first}"))?;
        let mut guardian = Command::new("sh");
        guardian.args(["-c", GUARD, "sh"]);
        for path in &paths {
            let before = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
            guardian.args([path, before.trim()]);
        }
        let guardian = guardian
            .stdin(Stdio::piped())
            .stdout(lock)
            // Away from a terminal's Ctrl-C.
            .process_group(0)
            .spawn()
            .with_context(|| format!("nobody to put {} back: is there no sh?", paths.join(", ")))?;
        Ok(Self { paths, guardian })
    }

    /// Changes all of them; returns when the kernel has done so.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set(&self, value: &str) -> Result<()> {
        self.paths.iter().try_for_each(|path| {
            fs::write(path, value).with_context(|| format!("cannot write {value} to {path}"))
        })
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        drop(self.guardian.stdin.take());
        match self.guardian.wait() {
            Ok(status) if status.success() => {}
            done => tracing::error!("not put back: {} ({done:?})", self.paths.join(", ")),
        }
    }
}
