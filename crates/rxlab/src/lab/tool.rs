// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs of others: those that set up what a namespace has (rules of a firewall, keys of a tunnel),
//! servers and their clients.

use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxsteer::host::cpumask::CpuMask;

use super::netns::{Netns, confine};

/// A program that may be missing.
pub struct Tool {
    /// Its name; it may be in a folder that only root searches.
    pub program: &'static str,
    /// Debian's package that has it.
    pub package: &'static str,
    /// What the kernel may lack for it.
    pub needs: &'static str,
}

/// Firewall and NAT.
pub const NFT: Tool = Tool {
    program: "nft",
    package: "nftables",
    needs: "nf_tables and connection tracking",
};

/// WireGuard's keys and peers.
pub const WG: Tool = Tool {
    program: "wg",
    package: "wireguard-tools",
    needs: "WireGuard",
};

impl Tool {
    /// Runs it in a namespace, with `input` on stdin; returns what it printed.
    ///
    /// # Errors
    /// It is missing, or the kernel lacks a feature that it needs.
    pub fn run(&self, netns: &Netns, arguments: &[&str], input: &str) -> Result<Vec<u8>> {
        let Self { program, needs, .. } = self;
        let run = |mut command: Command| -> io::Result<Output> {
            let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = pipes.stderr(Stdio::piped()).args(arguments).spawn()?;
            // Closes stdin, so that the program ends.
            let written = child
                .stdin
                .take()
                .map(|mut s| s.write_all(input.as_bytes()));
            let output = child.wait_with_output()?;
            // It may exit before it reads all input: then its stderr has the reason.
            if output.status.success() {
                written.transpose()?;
            }
            Ok(output)
        };
        let output = match run(netns.command(program)?) {
            Err(error) if error.kind() == ErrorKind::NotFound => bail!("{}", self.missing()),
            output => output.with_context(|| format!("running {program}"))?,
        };
        ensure!(
            output.status.success(),
            "{program} {} failed, does this kernel have {needs}? {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(output.stdout)
    }

    /// Why there is no such program, and what to do.
    fn missing(&self) -> String {
        let Self {
            program, package, ..
        } = self;
        format!("{program} is missing; on Debian and Ubuntu, apt-get install {package} installs it")
    }

    /// Whether it is installed.
    ///
    /// # Errors
    /// It is missing.
    pub fn find(&self) -> Result<()> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&path).chain(ROOTS.map(Into::into));
        let mut files = folders.map(|folder| folder.join(self.program));
        ensure!(files.any(|file| file.exists()), "{}", self.missing());
        Ok(())
    }

    /// Starts it in a namespace, on these CPUs, to run until it is dropped. All processes that it starts
    /// end with it, and with this program, killed or not.
    ///
    /// # Errors
    /// It is missing.
    pub fn start<const N: usize>(
        &self,
        netns: &Netns,
        cpus: &CpuMask,
        arguments: [&str; N],
    ) -> Result<Running> {
        let in_sbin = ROOTS.map(|folder| Path::new(folder).join(self.program));
        let path = in_sbin.into_iter().find(|path| path.exists());
        let mut command = netns.command(path.unwrap_or_else(|| self.program.into()))?;
        command.args(arguments).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let (started, pid) = mpsc::channel();
        let cpus = cpus.clone();
        // A thread for each: the next process that it starts is the first one of a PID namespace, with
        // which the others end, and it ends with the thread.
        let thread = thread::Builder::new()
            .name(self.program.to_owned())
            .spawn(move || {
                let child = confine(Pid::from_raw(0), &cpus)
                    .and_then(|()| Ok(unshare(CloneFlags::CLONE_NEWPID)?))
                    .map_err(io::Error::other)
                    .and_then(|()| command.spawn());
                let child = match child {
                    Ok(child) => child,
                    Err(error) => {
                        let _ = started.send(Err(error));
                        return Err(anyhow!("it did not start"));
                    }
                };
                let _ = started.send(Ok(Pid::from_raw(child.id() as i32)));
                Ok(child.wait_with_output()?)
            })?;
        let pid = match pid.recv()? {
            Err(error) if error.kind() == ErrorKind::NotFound => bail!("{}", self.missing()),
            pid => pid.with_context(|| format!("starting {}", self.program))?,
        };
        Ok(Running {
            program: self.program,
            pid,
            thread: Some(thread),
        })
    }
}

/// Time between two signals to a program that has not ended.
const AGAIN: Duration = Duration::from_millis(5);

/// Where Debian has servers.
const ROOTS: [&str; 2] = ["/usr/sbin", "/sbin"];

/// A program that [`Tool::start`] has started. Dropping it kills it, and waits for its end.
pub struct Running {
    program: &'static str,
    pid: Pid,
    thread: Option<JoinHandle<Result<Output>>>,
}

impl Running {
    /// Whether it has not ended.
    pub fn runs(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }

    /// Sends it a signal, and waits for its end; returns what it printed.
    ///
    /// # Errors
    /// It failed.
    pub fn stop(mut self, signal: Signal) -> Result<String> {
        let program = self.program;
        let output = self.end(signal)?;
        ensure!(
            output.status.success(),
            "{program} failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    fn end(&mut self, signal: Signal) -> Result<Output> {
        let thread = self.thread.take().context("it has ended")?;
        // Again and again: the first process of a PID namespace gets no signal before it handles it.
        while !thread.is_finished() {
            match kill(self.pid, signal) {
                // It has just ended.
                Ok(()) | Err(Errno::ESRCH) => thread::sleep(AGAIN),
                error => error?,
            }
        }
        match thread.join() {
            Ok(output) => output,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.end(Signal::SIGKILL);
    }
}
