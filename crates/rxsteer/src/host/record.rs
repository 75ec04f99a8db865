// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is changed on the host and not put back yet, in files: for the case that a process and the
//! child that puts it back (guardian.rs) are both killed (left.rs). A file is locked while one of them lives.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde::{Deserialize, Serialize};
use tracing::debug;

use super::lock::{self, FOLDER, is_trusted};
use super::netns;

/// Of the names of the files.
const PREFIX: &str = "changed-";

/// Environment variable with the path of the child's record.
pub(super) const VARIABLE: &str = "RXSTEER_RECORD";

/// Bytes of a record that are read, at most.
const SIZE_MAX: u64 = 1 << 20;

/// The first line. The others are those that the child is told.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    /// The boot of the host: changes end with it.
    boot: String,
    /// The network namespace, by a number that is never used again until then.
    netns: u64,
    /// The hidden command that puts back; null for files with their contents (setting.rs).
    command: Option<String>,
    /// What is changed, in words.
    what: String,
}

/// A file, and its lock.
#[derive(Debug)]
pub(super) struct Record {
    file: File,
    path: PathBuf,
}

impl Record {
    /// Makes the file.
    ///
    /// # Errors
    /// When it can't be made, or when others than root and this user can change the folder.
    pub(super) fn new(command: Option<&str>, what: &str) -> Result<Self> {
        lock::folder()?;
        let mut file = tempfile::Builder::new().tempfile_in(FOLDER)?;
        file.as_file().lock()?;
        let head = Head {
            boot: boot()?,
            netns: netns::cookie()?,
            command: command.map(str::to_owned),
            what: what.to_owned(),
        };
        writeln!(file, "{}", serde_json::to_string(&head)?)?;
        let name = file.path().file_name().unwrap_or_default();
        let path = Path::new(FOLDER).join(format!("{PREFIX}{}", name.to_string_lossy()));
        // A process that finds the file under this name finds it locked.
        let file = file.persist(&path)?;
        Ok(Self { file, path })
    }

    /// Adds what the child is told. To be called before the change is made.
    ///
    /// # Errors
    /// When it can't be written.
    pub(super) fn add(&mut self, line: &[u8]) -> Result<()> {
        let written = self.file.write_all(line);
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// Nothing is changed: removes the file.
    pub(super) fn discard(&self) {
        if let Err(e) = fs::remove_file(&self.path) {
            debug!("{}: {e}", self.path.display());
        }
    }

    /// Lets the child hold the lock, and remove the file by [`done`].
    pub(super) fn give(&self, child: &mut Command) {
        child.env(VARIABLE, &self.path);
        let fd = self.file.as_raw_fd();
        let keep = move || {
            // SAFETY: the descriptor is open, since `self` outlives the start of the child.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
            Ok(())
        };
        // SAFETY: the closure makes one system call.
        unsafe { child.pre_exec(keep) };
    }
}

/// Runs in the child: all is put back.
///
/// # Errors
/// When the file can't be removed.
pub(super) fn done() -> Result<()> {
    let Some(path) = std::env::var_os(VARIABLE) else {
        return Ok(());
    };
    match fs::remove_file(&path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(e).with_context(|| format!("{}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Changes that nobody is left to put back.
#[derive(Debug)]
pub struct Left {
    head: Head,
    lines: String,
    record: Record,
}

impl Left {
    /// What is not as before, and what to do.
    pub fn words(&self) -> String {
        format!(
            "{}; the rxsteer that did this was killed, and its child process too, before all was put \
             back: the next `rxsteer run` puts it back",
            self.head.what
        )
    }

    /// The hidden command that puts back, as in [`Head`]; what it was told; the record.
    pub(super) fn into_parts(self) -> (Option<String>, String, Record) {
        (self.head.command, self.lines, self.record)
    }
}

/// Those in the network namespace of the calling thread. While the result lives, no other process finds
/// them. Records of earlier boots are removed. Empty for users who may not look.
pub fn left() -> Vec<Left> {
    let look = || {
        let (boot, netns) = (boot()?, netns::cookie()?);
        let mut left = Vec::new();
        for entry in fs::read_dir(FOLDER)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default();
            if name.to_string_lossy().starts_with(PREFIX)
                && let Ok(Some(found)) = read(path)
            {
                if found.head.boot != boot {
                    fs::remove_file(&found.record.path)?;
                } else if found.head.netns == netns {
                    left.push(found);
                }
            }
        }
        anyhow::Ok(left)
    };
    look().unwrap_or_else(|e| {
        debug!("no records of changes: {e:#}");
        Vec::new()
    })
}

/// `None` if it is in use, gone, or no record of root's or of this user's.
fn read(path: PathBuf) -> Result<Option<Left>> {
    let opened = OpenOptions::new()
        .read(true)
        .append(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(&path);
    let Ok(mut file) = opened else {
        return Ok(None);
    };
    let facts = file.metadata()?;
    if !facts.is_file() || !is_trusted(facts.uid()) || file.try_lock().is_err() {
        return Ok(None);
    }
    // The child may have removed it meanwhile.
    if !fs::symlink_metadata(&path).is_ok_and(|now| now.ino() == facts.ino()) {
        return Ok(None);
    }
    let mut text = String::new();
    (&mut file).take(SIZE_MAX).read_to_string(&mut text)?;
    let (head, lines) = text.split_once('\n').unwrap_or_default();
    let Ok(head) = serde_json::from_str(head) else {
        return Ok(None);
    };
    Ok(Some(Left {
        head,
        lines: lines.to_owned(),
        record: Record { file, path },
    }))
}

/// [`left`] in words.
pub fn words() -> Vec<String> {
    left().iter().map(Left::words).collect()
}

/// Distinguishes this boot of the host from others.
fn boot() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let id = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    Ok(id.trim().to_owned())
}
