// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control socket's file, and who is believed behind it.
//!
//! A file in a folder of root's can't be made by another user, as an abstract name could. The file
//! is also the lock: one rxsteer of each role per network namespace.

use std::fs::{self, File, Permissions};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use crate::host::lock::{self, FOLDER, is_trusted};
use crate::host::netns;

/// The path of a role's socket in the network namespace of the calling thread.
///
/// # Errors
/// When /proc does not show the namespace.
pub(super) fn path(role: &str) -> Result<PathBuf> {
    Ok(Path::new(FOLDER).join(format!("{role}-{}.sock", netns::inode()?)))
}

/// A listening control socket. Its file is removed on drop.
pub(super) struct Bound {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file.
    id: (u64, u64),
}

impl Bound {
    /// `None` if another process listens at this path.
    ///
    /// # Errors
    /// When the folder can't be made, or can be changed by others.
    pub(super) fn new(path: PathBuf) -> Result<Option<Self>> {
        let _lock = lock_sockets()?;
        remove_dead().with_context(|| format!("cannot tidy {FOLDER}"))?;
        match UnixStream::connect(&path) {
            Ok(_) => return Ok(None),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e).with_context(|| format!("{}", path.display())),
        }
        let bound = || {
            let listener = UnixListener::bind(&path)?;
            listener.set_nonblocking(true)?;
            fs::set_permissions(&path, Permissions::from_mode(0o600))?;
            Ok::<_, std::io::Error>((listener, id_of(&path)?))
        };
        let (listener, id) =
            bound().with_context(|| format!("no control socket at {}", path.display()))?;
        Ok(Some(Self { listener, path, id }))
    }

    pub(super) fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl AsFd for Bound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // Under the lock the file can't become another's between the question and its removal.
        if let Ok(_lock) = lock_sockets()
            && id_of(&self.path).is_ok_and(|id| id == self.id)
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the sockets of processes that were killed, in whatever namespace. Sockets are locked: who
/// has made one there listens by now.
fn remove_dead() -> std::io::Result<()> {
    for entry in fs::read_dir(FOLDER)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_socket()
            && UnixStream::connect(&path).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused)
        {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

fn id_of(path: &Path) -> std::io::Result<(u64, u64)> {
    let file = fs::symlink_metadata(path)?;
    Ok((file.dev(), file.ino()))
}

/// One process at a time finds a path free and takes it, until the returned file is closed.
fn lock_sockets() -> Result<File> {
    lock::take("sockets", "starts or ends")
}

/// Connects; `None` if nobody listens.
///
/// # Errors
/// When this user may not ask, or the one who listens is neither root nor this user.
pub(super) fn connect(path: &Path) -> Result<Option<UnixStream>> {
    let stream = match UnixStream::connect(path) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(e) if e.kind() == ErrorKind::PermissionDenied => {
            bail!("only root and the user of the running rxsteer may ask: use sudo")
        }
        stream => stream.with_context(|| format!("{}", path.display()))?,
    };
    let uid = uid_of_peer(&stream)?;
    ensure!(
        is_trusted(uid),
        "{} belongs to the user {uid}, whose answers are not believed: ask as that user",
        path.display()
    );
    Ok(Some(stream))
}

/// Whether the other end is root or the user of this process.
///
/// # Errors
/// When the kernel does not tell.
pub(super) fn peer_is_believed(stream: &UnixStream) -> Result<bool> {
    Ok(is_trusted(uid_of_peer(stream)?))
}

fn uid_of_peer(stream: &UnixStream) -> Result<u32> {
    Ok(getsockopt(stream, PeerCredentials)?.uid())
}
