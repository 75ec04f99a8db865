// SPDX-License-Identifier: MIT OR Apache-2.0
//! Other processes: selection by rules, and access to their sockets and epoll instances.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use nix::errno::Errno;
use procfs::process::{FDTarget, Process};

use super::rule::Rule;
use crate::host::wait::readable;

/// An open process.
pub struct Target {
    /// Process id; may be reused after the process has ended.
    pub pid: u32,
    /// Start time in clock ticks since boot; with `pid` it identifies the process.
    pub start: u64,
    /// Process name.
    pub comm: String,
    pidfd: OwnedFd,
}

/// An open file that can poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Open {
    /// A socket.
    Socket {
        /// Descriptor in the process.
        fd: RawFd,
        /// Inode of the socket.
        inode: u64,
    },
    /// An epoll instance.
    Epoll(RawFd),
}

impl Target {
    /// Opens a process.
    ///
    /// # Errors
    /// ESRCH or [`io::ErrorKind::NotFound`] when it has ended.
    pub fn open(pid: u32) -> io::Result<Self> {
        // SAFETY: the call takes numbers and returns a descriptor.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let pidfd = Errno::result(pidfd)? as RawFd;
        // SAFETY: the kernel has just opened this descriptor; nothing else owns it.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        let process = Process::new(pid as i32).map_err(io::Error::other)?;
        let stat = process.stat().map_err(io::Error::other)?;
        Ok(Self {
            pid,
            start: stat.starttime,
            comm: stat.comm,
            pidfd,
        })
    }

    /// Whether the process has ended or is a zombie.
    pub fn has_ended(&self) -> bool {
        readable(&[self.pidfd.as_fd()], Some(Duration::ZERO)).is_ok_and(|ready| ready[0])
    }

    /// Its sockets and epoll instances. Those opened or closed meanwhile may be missed.
    ///
    /// # Errors
    /// When the process has ended, or may not be traced.
    pub fn opened(&self) -> io::Result<Vec<Open>> {
        let ended = |e: io::Error| match e.kind() {
            io::ErrorKind::NotFound => io::Error::from_raw_os_error(libc::ESRCH),
            _ => e,
        };
        let mut opened = Vec::new();
        for entry in fs::read_dir(format!("/proc/{}/fd", self.pid)).map_err(ended)? {
            let path = entry.map_err(ended)?.path();
            let target = match fs::read_link(&path) {
                Ok(target) => target,
                // The descriptor was closed meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                // Listing descriptors needs fewer rights than reading their links.
                Err(e) => return Err(e),
            };
            let fd = path.file_name().and_then(|fd| fd.to_str()?.parse().ok());
            let fd = fd.ok_or_else(|| io::Error::other("no number in /proc/PID/fd"))?;
            opened.extend(Open::from_link(fd, &target));
        }
        Ok(opened)
    }

    /// The inodes of the files that an epoll instance watches.
    ///
    /// # Errors
    /// When the process has closed the instance, or has ended.
    pub fn waits_for(&self, epoll: RawFd) -> io::Result<Vec<u64>> {
        let info = fs::read_to_string(format!("/proc/{}/fdinfo/{epoll}", self.pid))?;
        // tfd: 7 events: 19 data: 7 pos:0 ino:2f sdev:9
        let inode = |line: &str| {
            let (_, inode) = line.strip_prefix("tfd:")?.split_once("ino:")?;
            u64::from_str_radix(inode.split_whitespace().next()?, 16).ok()
        };
        Ok(info.lines().filter_map(inode).collect())
    }

    /// Duplicates a descriptor of the process. The duplicate keeps the file open: drop it soon.
    /// `None` if the process has closed it since it was listed; its number may be another file's.
    ///
    /// # Errors
    /// EPERM when the process may not be traced, ESRCH when it has ended.
    pub fn borrow(&self, open: Open) -> io::Result<Option<OwnedFd>> {
        let (Open::Socket { fd, .. } | Open::Epoll(fd)) = open;
        // SAFETY: the call takes numbers and returns a descriptor.
        let ours = unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.pidfd.as_raw_fd(), fd, 0) };
        let ours = match Errno::result(ours) {
            Err(Errno::EBADF) => return Ok(None),
            ours => ours? as RawFd,
        };
        // SAFETY: as above.
        let ours = unsafe { OwnedFd::from_raw_fd(ours) };
        let now = fs::read_link(format!("/proc/self/fd/{}", ours.as_raw_fd()))?;
        Ok((Open::from_link(fd, &now) == Some(open)).then_some(ours))
    }
}

impl Open {
    /// From the target of a link in /proc/PID/fd; `None` for other files.
    fn from_link(fd: RawFd, target: &Path) -> Option<Self> {
        match FDTarget::from_str(&target.to_string_lossy()).ok()? {
            FDTarget::Socket(inode) => Some(Self::Socket { fd, inode }),
            FDTarget::AnonInode(kind) if kind == "[eventpoll]" => Some(Self::Epoll(fd)),
            _ => None,
        }
    }
}

/// The ids of all processes of this host except this one.
///
/// # Errors
/// When /proc can't be read.
pub fn all() -> io::Result<Vec<u32>> {
    let own = std::process::id();
    let pids = fs::read_dir("/proc")?.filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse().ok().filter(|pid| *pid != own)
    });
    Ok(pids.collect())
}

/// The inodes of all open sockets of processes that may be traced.
///
/// # Errors
/// When /proc can't be read.
pub fn sockets() -> io::Result<HashSet<u64>> {
    let opened = all()?
        .into_iter()
        .filter_map(|pid| Target::open(pid).ok()?.opened().ok());
    let inode = |open| match open {
        Open::Socket { inode, .. } => Some(inode),
        Open::Epoll(_) => None,
    };
    Ok(opened.flatten().filter_map(inode).collect())
}

/// The user who started the process, not one whose rights a program of his has; `None` if it has
/// ended.
pub fn uid(pid: u32) -> Option<u32> {
    let status = Process::new(pid as i32).ok()?.status().ok()?;
    Some(status.ruid)
}

/// Whether a rule may select sockets of this process, whatever its user; false if it has ended.
pub fn means(rule: &Rule, pid: u32) -> bool {
    let file = |name: &str| Path::new("/proc").join(pid.to_string()).join(name);
    let alone = rule.pid.is_none() && rule.comm.is_none() && rule.exe.is_none();
    let conditions = [
        rule.pid.is_none_or(|wanted| wanted == pid),
        rule.comm.as_ref().is_none_or(|wanted| {
            fs::read_to_string(file("comm")).is_ok_and(|comm| comm.trim_end() == wanted)
        }),
        rule.exe
            .as_ref()
            .is_none_or(|wanted| runs(&file("exe"), wanted)),
        rule.cgroup.as_ref().is_none_or(|wanted| {
            fs::read_to_string(file("cgroup")).is_ok_and(|cgroups| is_in(&cgroups, wanted))
        }),
        !(alone && rule.cgroup.is_none()) || shares_netns(&file("ns/net")),
    ];
    conditions.iter().all(|holds| *holds)
}

/// Also true if the file has been replaced on disk.
fn runs(link: &Path, wanted: &Path) -> bool {
    let Ok(exe) = fs::read_link(link) else {
        return false;
    };
    let name = exe.to_string_lossy();
    Path::new(name.strip_suffix(" (deleted)").unwrap_or(&name)) == wanted
}

fn shares_netns(link: &Path) -> bool {
    let inode = |path: &Path| fs::metadata(path).map(|netns| netns.ino());
    let own = inode(Path::new("/proc/thread-self/ns/net"));
    own.is_ok_and(|own| inode(link).is_ok_and(|theirs| theirs == own))
}

/// Whether /proc/PID/cgroup names `wanted` (v2, with or without mount point) or one below it.
fn is_in(cgroups: &str, wanted: &Path) -> bool {
    let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
    let below = mounts
        .iter()
        .find_map(|mount| wanted.strip_prefix(mount).ok());
    let wanted = Path::new("/").join(below.unwrap_or(wanted));
    cgroups
        .lines()
        .filter_map(|line| line.strip_prefix("0::"))
        .any(|cgroup| Path::new(OsStr::new(cgroup)).starts_with(&wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_another_file_now_is_not_lent() {
        let file = fs::File::open("/dev/null").unwrap();
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut slot = OwnedFd::from(socket.try_clone().unwrap());
        let target = Target::open(std::process::id()).unwrap();
        let opened = target.opened().unwrap();
        let is_slot =
            |open: &&Open| matches!(open, Open::Socket { fd, .. } if *fd == slot.as_raw_fd());
        let listed = *opened.iter().find(is_slot).unwrap();
        assert!(target.borrow(listed).unwrap().is_some());
        nix::unistd::dup2(&file, &mut slot).unwrap();
        assert!(target.borrow(listed).unwrap().is_none());
        let other = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        nix::unistd::dup2(&other, &mut slot).unwrap();
        assert!(target.borrow(listed).unwrap().is_none());
        drop(slot);
        assert!(target.borrow(listed).unwrap().is_none());
    }

    #[test]
    fn cgroups_hold_those_below_them() {
        let cgroups = "4:memory:/user.slice\n0::/system.slice/nginx.service/worker\n";
        for (wanted, inside) in [
            ("/system.slice", true),
            ("/system.slice/nginx.service", true),
            ("system.slice/nginx.service/worker", true),
            ("/sys/fs/cgroup/system.slice/nginx.service", true),
            ("/sys/fs/cgroup/unified/system.slice", true),
            ("/", true),
            ("/system.slice/nginx", false),
            ("/user.slice", false),
            ("/system.slice/nginx.service/worker/2", false),
        ] {
            assert_eq!(is_in(cgroups, Path::new(wanted)), inside, "{wanted}");
        }
    }

    #[test]
    fn a_process_is_known_by_all_that_is_asked() {
        let child = || {
            std::process::Command::new("sleep")
                .arg("60")
                .spawn()
                .unwrap()
        };
        let mut child = child();
        let pid = child.id();
        let exe = fs::canonicalize("/bin/sleep").unwrap();
        // The child may not have called exec yet.
        while !runs(&Path::new("/proc").join(pid.to_string()).join("exe"), &exe) {
            std::thread::yield_now();
        }
        let rule = Rule {
            pid: Some(pid),
            comm: Some("sleep".to_owned()),
            exe: Some(exe),
            ..Rule::default()
        };
        assert!(means(&rule, pid));
        for other in [
            Rule {
                pid: Some(pid + 1),
                ..rule.clone()
            },
            Rule {
                comm: Some("slee".to_owned()),
                ..rule.clone()
            },
            Rule {
                exe: Some("/bin/true".into()),
                ..rule.clone()
            },
            Rule {
                cgroup: Some("/none".into()),
                ..rule
            },
        ] {
            assert!(!means(&other, pid), "{other}");
        }
        assert!(!Target::open(pid).unwrap().has_ended());
        child.kill().unwrap();
        let target = Target::open(pid).unwrap();
        child.wait().unwrap();
        assert!(target.has_ended());
        assert!(Target::open(pid).is_err());
    }
}
