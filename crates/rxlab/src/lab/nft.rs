// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rules of a namespace's firewall and NAT, by `nft`.

use std::io::{self, ErrorKind, Write};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::netns::Netns;

/// Runs `nft` in a namespace, with `input` on stdin; returns what it printed.
///
/// # Errors
/// There is no `nft`, or the kernel lacks a feature that the rules need.
pub fn run(netns: &Netns, arguments: &[&str], input: &str) -> Result<Vec<u8>> {
    let run = |mut nft: Command| -> io::Result<Output> {
        let pipes = nft.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = pipes.stderr(Stdio::piped()).args(arguments).spawn()?;
        // Closes stdin, so that nft ends.
        let written = child
            .stdin
            .take()
            .map(|mut s| s.write_all(input.as_bytes()));
        let output = child.wait_with_output()?;
        // nft may exit before it reads all input: then its stderr has the reason.
        if output.status.success() {
            written.transpose()?;
        }
        Ok(output)
    };
    let output = match run(netns.command("nft")?) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("nft is missing; on Debian and Ubuntu, apt-get install nftables installs it")
        }
        output => output.context("running nft")?,
    };
    ensure!(
        output.status.success(),
        "nft {} failed, does this kernel have nf_tables and connection tracking? {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(output.stdout)
}
