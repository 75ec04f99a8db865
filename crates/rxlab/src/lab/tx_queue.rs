// SPDX-License-Identifier: MIT OR Apache-2.0
//! A transmit queue in which packets wait, as on a network card that sends slower than it is given.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::link::End;

/// Bits per second of the slow queue.
const RATE: u32 = 4_000_000;

/// Bytes of the slow queue, about 50 ms at its rate; more are dropped.
const LIMIT: u32 = 24 << 10;

/// Slows down the first transmit queue of an end that has several; the others send at once. Packets
/// wait there for 50 ms at most.
///
/// # Errors
/// There is no `tc` (iproute2), or the kernel has no token bucket filter (CONFIG_NET_SCH_TBF).
pub fn slow(end: &End) -> Result<()> {
    let dev = ["dev", &end.name];
    let tc = |args: &[&str]| {
        end.netns.run(|| {
            let tc = Command::new("tc")
                .args(["qdisc", "add"])
                .args(dev)
                .args(args)
                .output();
            let tc = tc.context("cannot run tc: is iproute2 installed?")?;
            let words = String::from_utf8_lossy(&tc.stderr);
            ensure!(tc.status.success(), "tc {args:?}: {}", words.trim());
            Ok(())
        })
    };
    tc(&["root", "handle", "1:", "mq"])?;
    let (rate, limit) = (RATE.to_string(), LIMIT.to_string());
    tc(&[
        "parent", "1:1", "tbf", "rate", &rate, "burst", "1600", "limit", &limit,
    ])
}
