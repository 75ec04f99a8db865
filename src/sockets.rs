// SPDX-License-Identifier: MIT OR Apache-2.0
//! Watching applications take and send data: the programs of `bpf/socket.h`, which write the
//! `sock_flow_table`.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;

use anyhow::{Context, Result};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{Link, ProgramType};

use crate::caps;
use crate::rx::{OpenRxSkel, RxSkel};

/// Programs on tracepoints, which came with Linux 6.3.
const TRACEPOINTS: [(&str, &str); 2] = [
    ("on_sock_recv", "sock_recv_length"),
    ("on_sock_send", "sock_send_length"),
];

/// Programs that stand in for them: at the entry of functions.
const ENTRIES: [&str; 5] = [
    "on_inet_recv",
    "on_inet6_recv",
    "on_inet_send",
    "on_inet6_send",
    "on_inet_release",
];

/// Programs that are attached to the root of the cgroup hierarchy.
const CGROUP: [&str; 3] = ["on_sock_release", "on_udp4_recv", "on_udp6_recv"];

/// Of these, the ones that see unconnected UDP sockets.
const UNCONNECTED: [&str; 2] = ["on_udp4_recv", "on_udp6_recv"];

/// The attached programs; dropping it detaches them.
pub(crate) struct Sockets {
    _links: Vec<Link>,
    _skel: RxSkel<'static>,
}

impl Sockets {
    /// Whether a program of the object is one of these.
    pub(crate) fn owns(program: &str) -> bool {
        TRACEPOINTS.iter().any(|(own, _)| *own == program)
            || ENTRIES.contains(&program)
            || CGROUP.contains(&program)
    }

    /// Loads and attaches them, those for unconnected UDP sockets only if asked for. Returns what can't be followed on this host, in words, as well.
    ///
    /// # Errors
    /// When the kernel has no hook for connected sockets, or refuses a program.
    pub(crate) fn attach(
        mut open: OpenRxSkel<'static>,
        unconnected: bool,
    ) -> Result<(Self, Vec<String>)> {
        let mut unseen = Vec::new();
        let missing = caps::missing_tracepoints(&TRACEPOINTS.map(|(_, tracepoint)| tracepoint))?;
        let cgroup = cgroup_root();
        if let Err(e) = &cgroup
            && unconnected
        {
            unseen.push(format!("unconnected UDP sockets are not followed: {e:#}"));
        }
        for mut prog in open.open_object_mut().progs_mut() {
            let name = prog.name().to_string_lossy().into_owned();
            prog.set_autoload(if CGROUP.contains(&&*name) {
                cgroup.is_ok() && (unconnected || !UNCONNECTED.contains(&&*name))
            } else if ENTRIES.contains(&&*name) {
                !missing.is_empty()
            } else {
                Self::owns(&name) && missing.is_empty()
            });
        }
        let hint = || match missing.is_empty() {
            true => "the programs that watch sockets were refused",
            false => {
                "before Linux 6.3 flows can follow applications only where programs may be \
                 attached to kernel functions (CONFIG_FUNCTION_TRACER)"
            }
        };
        let skel = open.load().with_context(hint)?;
        let mut links = Vec::new();
        for prog in skel.object().progs_mut().filter(|prog| prog.autoload()) {
            let name = prog.name().to_string_lossy().into_owned();
            match (prog.prog_type(), &cgroup) {
                (ProgramType::Tracing, _) => links.push(prog.attach_trace().with_context(hint)?),
                (_, Err(_)) => {}
                (_, Ok(root)) => match prog.attach_cgroup(root.as_raw_fd()) {
                    Ok(link) => links.push(link),
                    Err(e) => unseen.push(format!(
                        "unconnected UDP sockets are not followed: the root cgroup refuses \
                         {name}: {e}"
                    )),
                },
            }
        }
        let sockets = Self {
            _links: links,
            _skel: skel,
        };
        Ok((sockets, unseen))
    }
}

/// The root of the cgroup v2 hierarchy, wherever it is mounted.
fn cgroup_root() -> Result<File> {
    let mounts = fs::read_to_string("/proc/thread-self/mounts")?;
    // DEVICE PATH TYPE OPTIONS …
    let path = mounts
        .lines()
        .map(|line| line.split(' '))
        .filter_map(|mut words| Some((words.nth(1)?, words.next()?)))
        .find_map(|(path, kind)| (kind == "cgroup2").then_some(path))
        .context("no cgroup v2 hierarchy is mounted")?;
    // Every cgroup has this file but the root.
    if Path::new(path).join("cgroup.type").exists() {
        tracing::warn!(
            "{path} is a container's cgroup: other unconnected UDP sockets are not followed"
        );
    }
    File::open(path).with_context(|| path.to_owned())
}
