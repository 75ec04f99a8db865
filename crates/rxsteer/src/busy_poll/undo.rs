// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores sockets and epoll instances of other processes: a child process keeps the list of
//! changes, and reverts them when this process ends, also after SIGKILL.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::RawFd;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use socket2::SockRef;

use super::process::{self, Open, Target};
use crate::host::guardian;
use crate::host::polling::{self, Polling};

/// The hidden command that runs [`put_back`].
pub const COMMAND: &str = "put-back";

/// A line to the child, written before the change is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// A socket is set.
    Socket {
        /// Its inode.
        inode: u64,
        /// Its cookie.
        cookie: u64,
        /// Local port of a listening socket; accepted connections inherit its settings.
        listens: Option<u16>,
        /// Previous settings.
        before: Polling,
        /// New settings.
        now: Polling,
    },
    /// A socket had the settings already, and keeps them.
    Found {
        /// Its cookie.
        cookie: u64,
    },
    /// A socket is closed.
    Gone {
        /// Its cookie.
        cookie: u64,
    },
    /// An epoll instance is set.
    Epoll {
        /// Process id.
        pid: u32,
        /// Start time of the process.
        start: u64,
        /// Descriptor in the process.
        fd: RawFd,
        /// Previous settings.
        before: Polling,
        /// New settings.
        now: Polling,
    },
}

/// The changes that the child has read.
#[derive(Default)]
struct Changes {
    sockets: HashMap<u64, (u64, Polling, Polling)>,
    inodes: HashSet<u64>,
    found: HashSet<u64>,
    /// By port of a listening socket: previous and new settings.
    listeners: HashMap<u16, (Polling, Polling)>,
    epolls: HashMap<(u32, u64, RawFd), (Polling, Polling)>,
}

impl Changes {
    fn add(&mut self, change: Change) {
        match change {
            Change::Socket {
                inode,
                cookie,
                listens,
                before,
                now,
            } => {
                self.found.remove(&cookie);
                // The first change has the original settings.
                let first = self
                    .sockets
                    .get(&cookie)
                    .map_or(before, |(_, first, _)| *first);
                self.sockets.insert(cookie, (inode, first, now));
                self.inodes.insert(inode);
                if let Some(port) = listens {
                    self.listeners.insert(port, (first, now));
                }
            }
            Change::Found { cookie } => {
                self.found.insert(cookie);
            }
            Change::Gone { cookie } => {
                self.found.remove(&cookie);
                if let Some((inode, ..)) = self.sockets.remove(&cookie) {
                    self.inodes.remove(&inode);
                }
            }
            Change::Epoll {
                pid,
                start,
                fd,
                before,
                now,
            } => {
                let key = (pid, start, fd);
                let first = self.epolls.get(&key).map_or(before, |(first, _)| *first);
                self.epolls.insert(key, (first, now));
            }
        }
    }

    /// The original settings of a socket that still has those made here; otherwise `None`.
    fn before(&self, cookie: u64, port: Option<u16>, now: Polling) -> Option<Polling> {
        if self.found.contains(&cookie) {
            return None;
        }
        let (before, set) = match self.sockets.get(&cookie) {
            Some((_, before, set)) => (before, set),
            // Accepted since the last search.
            None => {
                let (before, set) = self.listeners.get(&port?)?;
                (before, set)
            }
        };
        (*set == now && before != set).then_some(*before)
    }

    /// Restores everything. Sockets may have been passed to other processes, so all are searched.
    fn undo(&self) -> Result<()> {
        let mut failed = 0;
        for pid in process::all()? {
            let Ok(target) = Target::open(pid) else {
                continue;
            };
            let opened = target.opened().unwrap_or_default();
            let ours = |open: &Open| match open {
                Open::Socket { inode, .. } => self.inodes.contains(inode),
                Open::Epoll(fd) => self.epolls.contains_key(&(pid, target.start, *fd)),
            };
            if !opened.iter().any(ours) {
                continue;
            }
            for open in opened {
                let done = match open {
                    Open::Socket { .. } => self.undo_socket(&target, open),
                    Open::Epoll(fd) => self.undo_epoll(&target, fd),
                };
                // ESRCH: the process has ended.
                if let Err(e) = done
                    && e.raw_os_error() != Some(libc::ESRCH)
                {
                    failed += 1;
                    tracing::error!("process {pid} ({}) still polls: {e}", target.comm);
                }
            }
        }
        ensure!(
            failed == 0,
            "{failed} sockets and epoll instances still poll"
        );
        Ok(())
    }

    fn undo_socket(&self, target: &Target, open: Open) -> io::Result<()> {
        let Some(socket) = target.borrow(open)? else {
            return Ok(());
        };
        let Some(port) = internet(&SockRef::from(&socket)) else {
            return Ok(());
        };
        let now = Polling::of_socket(&socket)?;
        match self.before(polling::cookie(&socket)?, port, now) {
            Some(before) => before.set_socket(&socket),
            None => Ok(()),
        }
    }

    fn undo_epoll(&self, target: &Target, fd: RawFd) -> io::Result<()> {
        let Some((before, set)) = self.epolls.get(&(target.pid, target.start, fd)) else {
            return Ok(());
        };
        let Some(epoll) = target.borrow(Open::Epoll(fd))? else {
            return Ok(());
        };
        match Polling::of_epoll(&epoll)? == *set {
            true => before.set_epoll(&epoll),
            false => Ok(()),
        }
    }
}

/// The local port of a TCP or UDP socket: `None` for other sockets, `Some(None)` if it is unbound.
pub fn internet(socket: &SockRef<'_>) -> Option<Option<u16>> {
    let domain = socket.domain().ok()?;
    let protocol = socket.protocol().ok()??;
    let internet = [socket2::Domain::IPV4, socket2::Domain::IPV6].contains(&domain)
        && [socket2::Protocol::TCP, socket2::Protocol::UDP].contains(&protocol);
    internet.then(|| {
        let local = socket.local_addr().ok()?.as_socket()?;
        Some(local.port()).filter(|port| *port != 0)
    })
}

/// Runs in the child: reads changes until the parent ends, then reverts them.
///
/// # Errors
/// When a socket can't be restored.
pub fn put_back() -> Result<()> {
    let mut changes = Changes::default();
    guardian::told(|change| changes.add(change))?;
    changes.undo()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFF: Polling = Polling {
        usecs: 0,
        prefer: false,
    };
    const ON: Polling = Polling {
        usecs: 50,
        prefer: true,
    };

    fn socket(cookie: u64, listens: Option<u16>, before: Polling, now: Polling) -> Change {
        Change::Socket {
            inode: 100 + cookie,
            cookie,
            listens,
            before,
            now,
        }
    }

    #[test]
    fn unchanged_sockets_get_their_first_settings_back() {
        let less = Polling { usecs: 20, ..ON };
        let mut changes = Changes::default();
        changes.add(socket(1, None, OFF, less));
        changes.add(socket(1, None, less, ON));
        changes.add(Change::Found { cookie: 2 });
        changes.add(socket(3, Some(80), OFF, ON));
        changes.add(socket(4, None, OFF, ON));
        changes.add(Change::Gone { cookie: 4 });
        for (cookie, port, now, before) in [
            (1, None, ON, Some(OFF)),
            // The application has changed its settings meanwhile.
            (1, None, less, None),
            (1, None, OFF, None),
            (2, Some(80), ON, None),
            (3, Some(80), ON, Some(OFF)),
            // An accepted connection.
            (5, Some(80), ON, Some(OFF)),
            (5, Some(80), less, None),
            (5, Some(81), ON, None),
            (5, None, ON, None),
            (4, None, ON, None),
        ] {
            assert_eq!(
                changes.before(cookie, port, now),
                before,
                "{cookie} {port:?} {now:?}"
            );
        }
        assert_eq!(changes.inodes, HashSet::from([101, 103]));
    }
}
