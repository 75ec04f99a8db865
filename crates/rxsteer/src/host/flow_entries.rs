// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's table of flows (`rps_sock_flow_entries`), which is the host's: it is as large as its users
//! need, and as before when the last of them has ended. A child process of each user sees to that, also after
//! SIGKILL.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};

use super::guardian::{self, Guardian};
use super::tunable::Tunables;
use super::{lock, netns};

/// The hidden command that runs [`put_back`].
pub const COMMAND: &str = "put-back-flow-entries";

/// Below /proc, in the initial network namespace alone.
const SETTING: &str = "sys/net/core/rps_sock_flow_entries";

/// That of kthreadd: the first process may be out of reach.
const INITIAL: &str = "/proc/2/ns/net";

/// The number of entries before the first user, in [`lock::FOLDER`].
const BEFORE: &str = "rps_sock_flow_entries";

/// Lock of whoever changes the number, and of all users.
const CHANGE: &str = "change rps_sock_flow_entries";
const USERS: &str = "users of rps_sock_flow_entries";

const HOLDER: &str = "changes rps_sock_flow_entries";

/// A user of the table. Dropping it ends the use.
#[derive(Debug)]
pub struct FlowEntries {
    least: u32,
    _guardian: Guardian,
}

impl FlowEntries {
    /// Makes the table at least this large.
    ///
    /// # Errors
    /// When the initial network namespace is out of reach, or the setting can't be written.
    pub fn hold(least: u32) -> Result<Self> {
        let _change = lock::take(CHANGE, HOLDER)?;
        let users = lock::share(USERS)?;
        let this = Self {
            least,
            _guardian: Guardian::start(COMMAND, Some(users))?,
        };
        this.enlarge()?;
        Ok(this)
    }

    /// The same, if somebody has made the table smaller. Returns whether somebody has.
    ///
    /// # Errors
    /// As [`Self::hold`].
    pub fn again(&self) -> Result<bool> {
        if read()? >= self.least {
            return Ok(false);
        }
        let _change = lock::take(CHANGE, HOLDER)?;
        self.enlarge()?;
        Ok(true)
    }

    /// The user that enlarges the table records its size: users with a /run of their own see no record of others, and
    /// put nothing back that they have not changed.
    fn enlarge(&self) -> Result<()> {
        let now = read()?;
        if now >= self.least {
            return Ok(());
        }
        let before = format!("{}/{BEFORE}", lock::FOLDER);
        // If there is one without users, these were killed with their children.
        if !Path::new(&before).exists() {
            fs::write(&before, now.to_string()).with_context(|| before.clone())?;
        }
        write(&self.least.to_string())
    }
}

/// Calls `f` in the initial network namespace.
fn initially<T: Send>(f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    netns::within(Path::new(INITIAL), f).with_context(|| {
        format!(
            "/proc/{SETTING} is a setting of the whole host, and its network namespace is out of reach \
             ({INITIAL}): start the container with the host's PID namespace, or use --mode native"
        )
    })?
}

fn read() -> Result<u32> {
    let path = format!("/proc/{SETTING}");
    let text = initially(|| fs::read_to_string(&path).with_context(|| path.clone()))?;
    text.trim().parse().with_context(|| path.clone())
}

fn write(entries: &str) -> Result<()> {
    initially(|| Tunables::proc().write(SETTING, entries))
}

/// Runs in the child: once the parent ends, puts the number back if there is no other user.
///
/// # Errors
/// When it can't be written.
pub fn put_back() -> Result<()> {
    guardian::told(|(): ()| ())?;
    let _change = lock::take(CHANGE, HOLDER)?;
    // The lock of the parent, which only this process has now.
    let alone = lock::is_alone(io::stdout(), USERS)?;
    let outcome = if alone { restore() } else { Ok(()) };
    // Before others may look.
    lock::release(io::stdout(), USERS)?;
    outcome
}

fn restore() -> Result<()> {
    let path = format!("{}/{BEFORE}", lock::FOLDER);
    let before = match fs::read_to_string(&path) {
        Ok(before) => before,
        // No user has changed it.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).context(path),
    };
    write(before.trim())?;
    fs::remove_file(&path).with_context(|| path)
}
