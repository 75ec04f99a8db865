// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs that set up what a namespace has: rules of a firewall, keys of a tunnel.

use std::io::{self, ErrorKind, Write};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::netns::Netns;

/// A program that may be missing.
pub struct Tool {
    program: &'static str,
    /// Debian's package that has it.
    package: &'static str,
    /// What the kernel may lack for it.
    needs: &'static str,
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
        let Self {
            program,
            package,
            needs,
        } = self;
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
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "{program} is missing; on Debian and Ubuntu, apt-get install {package} installs it"
            ),
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
}
