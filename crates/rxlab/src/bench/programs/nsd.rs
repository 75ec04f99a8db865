// SPDX-License-Identifier: MIT OR Apache-2.0
//! nsd, a name server with one zone.

use std::fmt::Write;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;
use rxsteer::host::cpumask::CpuMask;

use crate::lab::netns::Netns;
use crate::lab::tool::{Running, Tool};

pub(super) const TOOL: Tool = Tool {
    program: "nsd",
    package: "nsd",
    needs: "sockets",
};

/// The zone.
pub(super) const ZONE: &str = "example.test";

/// Names in it: `h0` and so on.
pub(super) const NR_NAMES: u32 = 1000;

/// Starts it with a process for each worker, each with a socket of its own (SO_REUSEPORT), as its manual
/// recommends for several.
pub(super) fn start(
    netns: &Netns,
    cpus: &CpuMask,
    folder: &Path,
    to: SocketAddr,
    workers: u32,
) -> Result<Running> {
    let mut zone = format!(
        "$ORIGIN {ZONE}.\n$TTL 3600\n@ IN SOA ns host 1 7200 3600 1209600 3600\n@ IN NS ns\nns IN A {}\n",
        to.ip()
    );
    for name in 0..NR_NAMES {
        writeln!(zone, "h{name} IN A 203.0.113.{}", name % 250)?;
    }
    fs::write(folder.join("zone"), zone)?;
    let folder = folder.display();
    let config = format!(
        "server:
    server-count: {workers}
    reuseport: yes
    tcp-count: 1000
    ip-address: {}@{}
    username: \"\"
    zonesdir: \"{folder}\"
    database: \"\"
    pidfile: \"\"
    xfrdfile: \"\"
    zonelistfile: \"{folder}/zones\"
    xfrdir: \"{folder}\"
remote-control:
    control-enable: no
zone:
    name: {ZONE}
    zonefile: zone
",
        to.ip(),
        to.port()
    );
    let path = format!("{folder}/nsd.conf");
    fs::write(&path, config)?;
    TOOL.start(netns, cpus, ["-d", "-c", &path])
}
