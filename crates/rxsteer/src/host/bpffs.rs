// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects pinned in a BPF file system: the kernel keeps them as long as their files, without a
//! process.
//!
//! What is opened and removed there must not be another user's choice. Each folder on the way is
//! opened by itself, without following links, and all work is relative to it; nobody but root and
//! this process's user may make files in it.

use std::ffi::{CString, OsStr};
use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat};
use nix::sys::statfs::{BPF_FS_MAGIC, fstatfs};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};
use procfs::process::Process;

/// A folder of a BPF file system that nobody but root and this process's user can change, nor any
/// above it in that file system.
#[derive(Debug)]
pub struct Folder {
    fd: OwnedFd,
    /// For messages.
    path: PathBuf,
}

/// Fails unless the folder, which may not exist yet, is in a BPF file system that only root can
/// change.
///
/// # Errors
/// With the command that mounts one, or that takes it from others.
pub fn ensure_is_in(folder: &Path) -> Result<()> {
    existing(folder)?.last(folder).map(|_folder| ())
}

/// Where BPF file systems are mounted; none if /proc does not tell.
pub fn mounts() -> Vec<PathBuf> {
    let mounts = Process::myself().and_then(|this| this.mountinfo());
    let mounts = mounts.map(|mounts| mounts.0).unwrap_or_default();
    let bpf = mounts.into_iter().filter(|mount| mount.fs_type == "bpf");
    bpf.map(|mount| mount.mount_point).collect()
}

/// The folders on the way to a path.
struct Way<'a> {
    /// Those that exist, from the root on.
    folders: Vec<Folder>,
    /// The names of the others.
    missing: Vec<&'a OsStr>,
}

fn existing(path: &Path) -> Result<Way<'_>> {
    ensure!(path.is_absolute(), "{}: not a whole path", path.display());
    let root = Path::new("/");
    let mut folders = vec![Folder {
        fd: open(root, FOLDER, Mode::empty()).context("/")?,
        path: root.to_owned(),
    }];
    let names = path.components().filter(|c| *c != Component::RootDir);
    let mut names = names.map(Component::as_os_str);
    let mut missing = Vec::new();
    for name in names.by_ref() {
        match folders.last().expect("it begins with one").enter(name)? {
            Some(folder) => folders.push(folder),
            None => {
                missing.push(name);
                break;
            }
        }
    }
    missing.extend(names);
    Ok(Way { folders, missing })
}

impl Way<'_> {
    /// The last folder, if nobody else can change it. `path` is for messages.
    fn last(mut self, path: &Path) -> Result<Folder> {
        for folder in &self.folders {
            if folder.is_in_bpffs()? {
                folder.is_safe()?;
            }
        }
        let last = self.folders.pop().expect("it begins with one");
        ensure!(
            last.is_in_bpffs()?,
            "{} is not in a BPF file system, where alone steering can be pinned: mount one by `mount \
             -t bpf -o mode=0700 bpf /sys/fs/bpf`",
            path.display()
        );
        Ok(last)
    }
}

/// A folder, but no link to one.
const FOLDER: OFlag = OFlag::O_PATH
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

impl Folder {
    /// `None` if it does not exist.
    ///
    /// # Errors
    /// When it is in no BPF file system, or can be changed by others.
    pub fn find(path: &Path) -> Result<Option<Self>> {
        let way = existing(path)?;
        match way.missing.is_empty() {
            true => way.last(path).map(Some),
            false => Ok(None),
        }
    }

    /// Finds it, or makes it, with those above it.
    ///
    /// # Errors
    /// As [`Self::find`], or when the kernel refuses.
    pub fn make(path: &Path) -> Result<Self> {
        let way = existing(path)?;
        let missing = way.missing.clone();
        let make = |folder: Self, name| folder.make_folder(name);
        missing.into_iter().try_fold(way.last(path)?, make)
    }

    /// Its path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its device and inode.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn id(&self) -> Result<(u64, u64)> {
        let facts = fstat(&self.fd).with_context(|| self.at("."))?;
        Ok((facts.st_dev, facts.st_ino))
    }

    /// The names in it, sorted.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn names(&self) -> Result<Vec<String>> {
        let entries = fs::read_dir(self.way_to("")).with_context(|| self.at("."))?;
        let name = |entry: std::io::Result<fs::DirEntry>| {
            let name = entry?.file_name().into_string();
            name.map_err(|name| foreign(&self.path.join(name)))
        };
        let mut names: Vec<String> = entries.map(name).collect::<Result<_>>()?;
        names.sort();
        Ok(names)
    }

    /// A folder in it; `None` if there is none.
    ///
    /// # Errors
    /// When it can be changed by others, or is no folder.
    pub fn folder(&self, name: &str) -> Result<Option<Self>> {
        let folder = self.enter(name.as_ref())?;
        folder.as_ref().map_or(Ok(()), Self::is_safe)?;
        Ok(folder)
    }

    /// As [`Self::folder`]; makes it if there is none.
    ///
    /// # Errors
    /// As [`Self::folder`], or when the kernel refuses.
    pub fn make_folder(&self, name: impl AsRef<OsStr>) -> Result<Self> {
        let name = name.as_ref();
        match mkdirat(&self.fd, name, Mode::S_IRWXU) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(e) => return Err(e).with_context(|| format!("making {}", self.at(name))),
        }
        let folder = self.enter(name)?;
        let folder = folder.with_context(|| format!("{} is gone", self.at(name)))?;
        folder.is_safe()?;
        Ok(folder)
    }

    /// Facts about an object in it; `None` if there is none.
    ///
    /// # Errors
    /// When it is no BPF object but a link or a folder.
    pub fn object(&self, name: &str) -> Result<Option<FileStat>> {
        let facts = match fstatat(&self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => return Ok(None),
            facts => facts.with_context(|| self.at(name))?,
        };
        // The kernel makes regular files in a BPF file system for objects alone.
        ensure!(
            kind(&facts) == SFlag::S_IFREG,
            "{} is no BPF object, and rxsteer has not made it: look what it is, and remove it",
            self.at(name)
        );
        Ok(Some(facts))
    }

    /// Pins an object (a map, a program or a link).
    ///
    /// # Errors
    /// When there is such a file, or the kernel refuses.
    pub fn pin(&self, name: &str, object: BorrowedFd<'_>) -> Result<()> {
        let way = c_string(&self.way_to(name))?;
        // SAFETY: a descriptor and a C string.
        let ret = unsafe { libbpf_sys::bpf_obj_pin(object.as_raw_fd(), way.as_ptr()) };
        ensure!(ret == 0, "pinning {}: {}", self.at(name), error(ret));
        Ok(())
    }

    /// Opens a pinned object.
    ///
    /// # Errors
    /// When there is no such object.
    pub fn open(&self, name: &str) -> Result<OwnedFd> {
        let way = c_string(&self.way_to_object(name)?)?;
        // SAFETY: a C string.
        let fd = unsafe { libbpf_sys::bpf_obj_get(way.as_ptr()) };
        ensure!(fd >= 0, "opening {}: {}", self.at(name), error(fd));
        // SAFETY: the kernel has just opened this descriptor; nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A path to a pinned object, which leads there as long as this value exists.
    ///
    /// # Errors
    /// When there is no such object.
    pub fn way_to_object(&self, name: &str) -> Result<PathBuf> {
        let found = self.object(name)?;
        found.with_context(|| format!("there is no {}", self.at(name)))?;
        Ok(self.way_to(name))
    }

    /// Unpins an object, if there is one.
    ///
    /// # Errors
    /// When it is no BPF object, or the kernel refuses.
    pub fn unpin(&self, name: &str) -> Result<()> {
        if self.object(name)?.is_none() {
            return Ok(());
        }
        let removed = unlinkat(&self.fd, name, UnlinkatFlags::NoRemoveDir);
        removed.with_context(|| format!("removing {}", self.at(name)))
    }

    /// Moves an object to another folder, or to another name in this one; what has that name is
    /// unpinned.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn rename(&self, name: &str, folder: &Self, new: &str) -> Result<()> {
        let renamed = renameat(&self.fd, name, &folder.fd, new);
        renamed.with_context(|| format!("moving {} to {}", self.at(name), folder.at(new)))
    }

    /// Removes a folder in it, if there is one, it is empty, and nothing is mounted there.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove_folder(&self, name: impl AsRef<OsStr>) -> Result<()> {
        let name = name.as_ref();
        match unlinkat(&self.fd, name, UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT | Errno::ENOTEMPTY | Errno::EBUSY) => Ok(()),
            Err(e) => Err(e).with_context(|| format!("removing {}", self.at(name))),
        }
    }

    fn enter(&self, name: &OsStr) -> Result<Option<Self>> {
        let path = self.path.join(name);
        match openat(&self.fd, name, FOLDER, Mode::empty()) {
            Ok(fd) => Ok(Some(Self { fd, path })),
            Err(Errno::ENOENT) => Ok(None),
            Err(Errno::ENOTDIR) => bail!(
                "{} is no folder: name a folder itself, as symbolic links are not followed to pins; \
                 remove it if rxsteer made its folder there",
                path.display()
            ),
            Err(e) => Err(e).with_context(|| path.display().to_string()),
        }
    }

    fn is_in_bpffs(&self) -> Result<bool> {
        let facts = fstatfs(&self.fd).with_context(|| self.at("."))?;
        Ok(facts.filesystem_type() == BPF_FS_MAGIC)
    }

    /// Fails if others can make files in it.
    fn is_safe(&self) -> Result<()> {
        let facts = fstat(&self.fd).with_context(|| self.at("."))?;
        let (owner, mode) = (facts.st_uid, facts.st_mode & 0o7777);
        let path = self.path.display();
        let why = format!(
            "{path} (owner {owner}, mode {mode:04o}) can be changed by others than root, who could \
             have rxsteer open and remove files of their choice"
        );
        ensure!(
            owner == 0 || owner == geteuid().as_raw(),
            "{why}: look what is in it, and remove it, or make it root's: `chown 0:0 {path}`"
        );
        ensure!(
            mode & 0o022 == 0,
            "{why}: `chmod 0700 {path}`; BPF file systems are to be mounted by `mount -t bpf -o \
             mode=0700`"
        );
        Ok(())
    }

    fn at(&self, name: impl AsRef<OsStr>) -> String {
        let name = Path::new(name.as_ref());
        self.path.join(name).display().to_string()
    }

    /// bpf(2) can take a folder's descriptor since Linux 6.6; this way exists in all versions.
    fn way_to(&self, name: &str) -> PathBuf {
        format!("/proc/thread-self/fd/{}/{name}", self.fd.as_raw_fd()).into()
    }
}

/// The error about what rxsteer would not have pinned.
pub fn foreign(path: &Path) -> anyhow::Error {
    anyhow::anyhow!(
        "{} is a file or folder which rxsteer has not pinned: remove it if nobody needs it, or give \
         --pin a folder of its own",
        path.display()
    )
}

fn kind(facts: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(facts.st_mode) & SFlag::S_IFMT
}

fn c_string(path: &Path) -> Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn error(ret: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(-ret)
}
