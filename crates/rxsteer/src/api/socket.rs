// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control socket's file, and who is believed behind it.
//!
//! A file in a folder of root's can't be made by another user, as an abstract name could. The file
//! is also the lock: one rxsteer of each role per network namespace.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::geteuid;

use crate::host::netns;

/// Made by the first rxsteer, for its user alone.
const FOLDER: &str = "/run/rxsteer";

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
        match DirBuilder::new().mode(0o700).create(FOLDER) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => {
                let remedy = match e.kind() {
                    ErrorKind::ReadOnlyFilesystem | ErrorKind::NotFound => {
                        "a container needs `--tmpfs /run`, a pod an emptyDir volume there, a unit \
                         RuntimeDirectory=rxsteer"
                    }
                    _ => "run as root",
                };
                return Err(e).with_context(|| format!("cannot make {FOLDER}: {remedy}"));
            }
            _ => {}
        }
        let folder = lock_folder()?;
        folder
            .set_permissions(Permissions::from_mode(0o700))
            .with_context(|| format!("cannot keep others out of {FOLDER}"))?;
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
        if let Ok(_lock) = lock_folder()
            && id_of(&self.path).is_ok_and(|id| id == self.id)
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the files of processes that were killed, in whatever namespace. The folder is locked: who
/// has made a file there listens by now.
fn remove_dead() -> std::io::Result<()> {
    for entry in fs::read_dir(FOLDER)? {
        let path = entry?.path();
        if UnixStream::connect(&path).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

fn id_of(path: &Path) -> std::io::Result<(u64, u64)> {
    let file = fs::symlink_metadata(path)?;
    Ok((file.dev(), file.ino()))
}

/// Locks the folder until the returned file is closed, so that one process at a time finds a path
/// free and takes it.
fn lock_folder() -> Result<File> {
    let folder = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(FOLDER)
        .with_context(|| format!("cannot open {FOLDER}: run as its owner, or as root"))?;
    let facts = folder.metadata()?;
    ensure!(
        is_believed(facts.uid()) && facts.mode() & 0o022 == 0,
        "{FOLDER} can be changed by others than root and this user: remove it"
    );
    folder
        .lock()
        .with_context(|| format!("cannot lock {FOLDER}"))?;
    Ok(folder)
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
        is_believed(uid),
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
    Ok(is_believed(uid_of_peer(stream)?))
}

fn uid_of_peer(stream: &UnixStream) -> Result<u32> {
    Ok(getsockopt(stream, PeerCredentials)?.uid())
}

fn is_believed(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}
