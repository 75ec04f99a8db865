// SPDX-License-Identifier: MIT OR Apache-2.0
//! nginx, a web server with one page.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;
use rxsteer::host::cpumask::CpuMask;

use crate::lab::netns::Netns;
use crate::lab::tool::{Running, Tool};

pub(super) const TOOL: Tool = Tool {
    program: "nginx",
    package: "nginx-light",
    needs: "sockets",
};

/// Size of the page, bytes.
const PAGE: usize = 1024;

/// Starts it with that many worker processes, which share a socket, and otherwise as Debian configures it:
/// sendfile, an access log.
pub(super) fn start(
    netns: &Netns,
    cpus: &CpuMask,
    folder: &Path,
    to: SocketAddr,
    workers: u32,
) -> Result<Running> {
    fs::write(folder.join("index.html"), vec![b'x'; PAGE])?;
    let config = format!(
        "user root root;
worker_processes {workers};
daemon off;
pid nginx.pid;
error_log stderr;
events {{ worker_connections 4096; }}
http {{
    sendfile on;
    tcp_nopush on;
    # As long as the client wants.
    keepalive_requests 1000000000;
    access_log /dev/null combined;
    client_body_temp_path .;
    proxy_temp_path .;
    fastcgi_temp_path .;
    uwsgi_temp_path .;
    scgi_temp_path .;
    server {{ listen {to}; root .; }}
}}
"
    );
    let path = folder.join("nginx.conf");
    fs::write(&path, config)?;
    let (path, folder) = (path.to_string_lossy(), folder.to_string_lossy());
    TOOL.start(netns, cpus, ["-p", &folder, "-c", &path, "-e", "stderr"])
}
