// SPDX-License-Identifier: MIT OR Apache-2.0
//! wrk, a client of web servers.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use rxsteer::host::cpumask::CpuMask;

use super::said::{NR_CLIENTS, Said, number};
use crate::lab::netns::Netns;
use crate::lab::tool::{Running, Tool};

pub(super) const TOOL: Tool = Tool {
    program: "wrk",
    package: "wrk",
    needs: "sockets",
};

/// What it runs at its end: numbers, where its own text has units.
const DONE: &str = r#"
done = function(summary, latency, requests)
    local errors = summary.errors
    local lost = errors.connect + errors.read + errors.write + errors.status + errors.timeout
    print("answers: " .. summary.requests)
    print("us: " .. summary.duration)
    print("lost: " .. lost)
    for i, p in ipairs({50, 99, 99.9}) do print("percentile " .. i .. ": " .. latency:percentile(p)) end
end
"#;

/// Asks for the page over [`NR_CLIENTS`] connections. With a pace, each waits after an answer, at random
/// and up to twice the mean.
pub(super) fn start(
    netns: &Netns,
    cpus: &CpuMask,
    folder: &Path,
    to: SocketAddr,
    once: bool,
    pace: Option<f64>,
) -> Result<Running> {
    let mut script = DONE.to_owned();
    if let Some(rate) = pace {
        let twice = 2e3 * f64::from(NR_CLIENTS) / rate;
        script += &format!("function delay() return math.random() * {twice} end\n");
    }
    let path = folder.join("done.lua");
    fs::write(&path, script)?;
    let connection = if once {
        "Connection: close"
    } else {
        "Connection: keep-alive"
    };
    let arguments = [
        "-c",
        &NR_CLIENTS.to_string(),
        "-t",
        &cpus.len().min(NR_CLIENTS as usize).to_string(),
        "-d",
        "24h",
        "-s",
        &path.to_string_lossy(),
        "-H",
        connection,
        &format!("http://{to}/"),
    ];
    TOOL.start(netns, cpus, arguments)
}

/// What [`DONE`] prints.
pub(super) fn said(printed: &str) -> Result<Said> {
    let answers: u64 = number(printed, "answers:")?;
    let us: f64 = number(printed, "us:")?;
    let percentile = |i| number(printed, &format!("percentile {i}:"));
    Ok(Said {
        answers,
        rate: answers as f64 * 1e6 / us,
        lost: number(printed, "lost:").context("errors")?,
        us: [percentile(1)?, percentile(2)?, percentile(3)?],
    })
}
