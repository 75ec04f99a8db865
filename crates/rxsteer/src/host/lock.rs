// SPDX-License-Identifier: MIT OR Apache-2.0
//! Locks between the processes of this program, for what only one of them may do or change at a time.
//!
//! A user who can open a file can lock it, for ever: a file in /sys is everybody's. So these are byte ranges
//! of one file in a folder that only root, or this process's user, can enter.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, openat};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use nix::sys::stat::Mode;
use nix::unistd::geteuid;
use tracing::warn;

use super::wait::readable;

/// For this program's files while processes run; made by the first, for its user alone.
pub const FOLDER: &str = "/run/rxsteer";

/// It stays: its removal would leave two processes with a lock on two files.
pub const FILE: &str = "lock";

/// The longest wait. Settings of devices are put back in less, and the watchdog of the unit allows 30 s.
pub const LIMIT: Duration = Duration::from_secs(10);

/// The wait after which the log has why.
const PATIENCE: Duration = Duration::from_millis(500);

/// Between two tries.
const INTERVAL: Duration = Duration::from_millis(20);

/// Takes the lock with this name; what others who have it do is `holder`, a clause. It lasts until
/// the returned file is closed, in this process and in those that inherit it.
///
/// # Errors
/// After [`LIMIT`]; at once when SIGINT or SIGTERM comes, if they are blocked; when the folder can't
/// be made, or can be changed by others.
pub fn take(name: &str, holder: &str) -> Result<File> {
    let stop: SigSet = [Signal::SIGINT, Signal::SIGTERM].into_iter().collect();
    let stop = SignalFd::new(&stop).context("waiting for signals")?;
    let start = Instant::now();
    let mut told = false;
    loop {
        if let Some(lock) = try_take(name)? {
            return Ok(lock);
        }
        let (limit, waited) = (LIMIT.as_secs(), start.elapsed());
        ensure!(
            waited < LIMIT,
            "another rxsteer {holder}, for more than {limit} s: wait for its end, or stop it (`fuser \
             {FOLDER}/{FILE}` names it)"
        );
        if waited > PATIENCE && !told {
            warn!("waiting at most {limit} s: another rxsteer {holder}");
            told = true;
        }
        if readable(&[stop.as_fd()], Some(INTERVAL))?[0] {
            bail!("stopped by a signal while another rxsteer {holder}");
        }
    }
}

/// As [`take`], without waiting; `None` if another process, or another caller, has it.
///
/// # Errors
/// When the folder can't be made, or can be changed by others.
pub fn try_take(name: &str) -> Result<Option<File>> {
    let file = open()?;
    Ok(set(&file, name, libc::F_WRLCK)?.then_some(file))
}

/// A lock that others may share, but not take.
///
/// # Errors
/// As [`try_take`], or when another process has taken it.
pub fn share(name: &str) -> Result<File> {
    let file = open()?;
    ensure!(
        set(&file, name, libc::F_RDLCK)?,
        "another process has the lock `{name}`"
    );
    Ok(file)
}

/// Whether nobody else shares this lock; if so, it is taken. `file`: that of [`share`].
///
/// # Errors
/// When the kernel refuses.
pub fn is_alone(file: impl AsFd, name: &str) -> Result<bool> {
    set(file, name, libc::F_WRLCK)
}

/// Gives the lock up, before the file is closed.
///
/// # Errors
/// When the kernel refuses.
pub fn release(file: impl AsFd, name: &str) -> Result<()> {
    set(file, name, libc::F_UNLCK).map(drop)
}

fn open() -> Result<File> {
    let folder = folder()?;
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let file = openat(&folder, FILE, flags, Mode::S_IRUSR | Mode::S_IWUSR);
    Ok(File::from(
        file.with_context(|| format!("cannot open {FOLDER}/{FILE}"))?,
    ))
}

/// Whether the lock could be set.
fn set(file: impl AsFd, name: &str, kind: libc::c_int) -> Result<bool> {
    let range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: place(name),
        l_len: 1,
        l_pid: 0,
    };
    match fcntl(file, FcntlArg::F_OFD_SETLK(&range)) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(e) => Err(e).with_context(|| format!("cannot lock {FOLDER}/{FILE}")),
    }
}

/// The folder, which nobody but root and this process's user can enter.
///
/// # Errors
/// When it can't be made, or can be changed by others.
pub fn folder() -> Result<File> {
    match DirBuilder::new().mode(0o700).create(FOLDER) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(not_made(e)),
        _ => {}
    }
    let folder = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(FOLDER)
        .with_context(|| format!("cannot open {FOLDER}: run as its owner, or as root"))?;
    let facts = folder.metadata()?;
    ensure!(
        is_trusted(facts.uid()) && facts.mode() & 0o022 == 0,
        "{FOLDER} can be changed by others than root and this user: remove it"
    );
    folder
        .set_permissions(Permissions::from_mode(0o700))
        .with_context(|| format!("cannot keep others out of {FOLDER}"))?;
    Ok(folder)
}

fn not_made(e: io::Error) -> anyhow::Error {
    let remedy = match e.kind() {
        ErrorKind::ReadOnlyFilesystem | ErrorKind::NotFound => {
            "a container needs `--tmpfs /run`, a pod an emptyDir volume there, a unit \
             RuntimeDirectory=rxsteer"
        }
        _ => "run as root",
    };
    anyhow::Error::new(e).context(format!("cannot make {FOLDER}: {remedy}"))
}

/// Whether a user is root or that of this process.
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// The byte of a name: FNV-1a, which other versions compute alike, as an offset in a file.
fn place(name: &str) -> i64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    (hash >> 2) as i64
}
