// SPDX-License-Identifier: MIT OR Apache-2.0
//! A user without privileges.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use rxlab::lab::netns::Netns;

/// A shell's script, as this user.
pub fn nobody(netns: &Netns, script: &str) -> Result<Command> {
    let mut setpriv = netns.command("setpriv")?;
    setpriv.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    setpriv.args(["--bounding-set=-all", "--inh-caps=-all"]);
    setpriv.args(["sh", "-ec", script]);
    Ok(setpriv)
}

/// The user has locked files, until this is dropped.
pub struct Locked(Child);

impl Locked {
    pub fn by_nobody(netns: &Netns, paths: &[String]) -> Result<Self> {
        let lock = |(at, path): (usize, &String)| format!("exec {at}<{path}; flock {at}; ");
        let locks: String = (3..).zip(paths).map(lock).collect();
        let mut script = nobody(netns, &format!("{locks}echo; exec sleep 600"))?;
        let script = script.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut this = Self(script.spawn()?);
        let said = this.0.stdout.take().context("it is piped")?;
        // Without the locks it says nothing, and ends.
        let said = BufReader::new(said).lines().next().transpose()?;
        ensure!(said.is_some(), "{paths:?} can't be locked");
        Ok(this)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A /run that this namespace alone sees: nothing in it is other tests'.
pub fn mount_run(netns: &Netns) -> Result<()> {
    netns.run(|| {
        let none = MsFlags::empty();
        mount(Some("run"), "/run", Some("tmpfs"), none, Some("mode=0755")).context("no /run")
    })
}
