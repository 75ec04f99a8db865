// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rules that select sockets and set the time they poll: options of `rxsteer poll`, and
//! `[[busy_poll]]` in the configuration.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::host::number::whole;
use crate::host::polling::Polling;

/// Sockets, and what becomes of them. All conditions that are given must hold; one at least is.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
#[group(skip)]
pub struct Rule {
    /// Sockets of this process
    #[arg(long, value_name = "PID", value_parser = whole(1_u32, i32::MAX as u32, "a process id"))]
    pub pid: Option<u32>,

    /// Sockets of processes with this name, as `ps -o comm` prints it: 15 characters at most
    #[arg(long, value_name = "NAME")]
    pub comm: Option<String>,

    /// Sockets of processes that run this file
    #[arg(long, value_name = "FILE")]
    pub exe: Option<PathBuf>,

    /// Sockets of processes in this cgroup (v2) or below it: /system.slice/nginx.service
    #[arg(long, value_name = "CGROUP")]
    pub cgroup: Option<PathBuf>,

    /// Sockets with this local port; alone, of all processes in this network namespace
    #[arg(long, value_name = "PORT", value_parser = whole(1, u16::MAX, "a port"))]
    pub port: Option<u16>,

    /// Processes of this user: a name or number; without this, of root, unless a process or cgroup is
    /// named
    ///
    /// Any user can give a process any name, run any file and use a port: such a process would get
    /// settings that need CAP_NET_ADMIN.
    #[arg(long, value_name = "USER")]
    pub user: Option<User>,

    /// Maximum time for which a waiting call polls the queue before it sleeps: 50 is recommended
    ///
    /// 0 disables busy polling that applications have set themselves.
    #[arg(long, value_name = "MICROSECONDS", value_parser = whole(0_u32, 1_000_000, "microseconds"))]
    pub usecs: u32,

    /// Defer interrupts while the application keeps polling (SO_PREFER_BUSY_POLL)
    ///
    /// The device must be set to defer them: `rxsteer napi` sets this, `rxsteer doctor` shows it.
    #[arg(long)]
    pub prefer: bool,

    /// Pause busy polling for 1 s to 64 s in processes where most waits find nothing
    #[arg(long)]
    pub adaptive: bool,
}

impl Rule {
    /// The settings for the selected sockets.
    pub fn polling(&self) -> Polling {
        Polling {
            usecs: self.usecs,
            prefer: self.prefer,
        }
    }

    /// An error in the rule, with a remedy.
    pub fn objection(&self) -> Option<String> {
        let none = [
            self.pid.is_none(),
            self.comm.is_none(),
            self.exe.is_none(),
            self.cgroup.is_none(),
            self.port.is_none(),
        ];
        if none.iter().all(|none| *none) {
            return Some("no sockets selected: give pid, comm, exe, cgroup or port".to_owned());
        }
        if let Some(comm) = self.comm.as_ref().filter(|comm| comm.len() > COMM_MAX) {
            return Some(format!(
                "the kernel keeps {COMM_MAX} characters of a process's name: {}",
                comm.chars().take(COMM_MAX).collect::<String>()
            ));
        }
        match &self.exe {
            Some(exe) if !exe.is_absolute() => {
                Some(format!("{}: give the whole path, from / on", exe.display()))
            }
            _ => None,
        }
    }

    /// The user whose processes are meant; `None`: any user.
    pub fn uid(&self) -> Option<u32> {
        match (&self.user, self.pid.is_some() || self.cgroup.is_some()) {
            (Some(user), _) => Some(user.uid),
            (None, true) => None,
            (None, false) => Some(0),
        }
    }
}

/// A user by name or number, as given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    given: String,
    uid: u32,
}

impl FromStr for User {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let uid = match given.parse() {
            Ok(uid) => uid,
            Err(_) => match nix::unistd::User::from_name(given) {
                Ok(Some(user)) => user.uid.as_raw(),
                Ok(None) => return Err(format!("there is no user {given}")),
                Err(e) => return Err(format!("user {given} can't be looked up: {e}")),
            },
        };
        let given = given.to_owned();
        Ok(Self { given, uid })
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.given)
    }
}

/// TASK_COMM_LEN - 1 (linux/sched.h).
const COMM_MAX: usize = 15;

impl fmt::Display for Rule {
    /// As on the command line, without the dashes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let conditions = [
            ("pid", self.pid.map(|pid| pid.to_string())),
            ("comm", self.comm.clone()),
            ("exe", path(&self.exe)),
            ("cgroup", path(&self.cgroup)),
            ("port", self.port.map(|port| port.to_string())),
            ("user", self.user.as_ref().map(User::to_string)),
        ];
        let given = conditions
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{name} {}", value?)));
        f.write_str(&given.collect::<Vec<_>>().join(", "))
    }
}
