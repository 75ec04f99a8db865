// SPDX-License-Identifier: MIT OR Apache-2.0
//! Watching applications take and send data: the programs of `bpf/socket.h`, which write the
//! `sock_flow_table`.

use std::fs::{self, File};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel, Skel};

use crate::caps;
use crate::rx::{OpenRxSkel, RxSkel};

/// Programs and their tracepoints.
const TRACEPOINTS: [(&str, &str); 2] = [
    ("on_sock_recv", "sock_recv_length"),
    ("on_sock_send", "sock_send_length"),
];

/// Programs that are attached to the root of the cgroup hierarchy.
const CGROUP: [&str; 3] = ["on_sock_release", "on_udp4_recv", "on_udp6_recv"];

/// The attached programs; dropping it detaches them.
pub(crate) struct Sockets {
    _links: Vec<Link>,
    _skel: RxSkel<'static>,
}

impl Sockets {
    /// Whether a program of the object is one of these.
    pub(crate) fn owns(program: &str) -> bool {
        TRACEPOINTS.iter().any(|(own, _)| *own == program) || CGROUP.contains(&program)
    }

    /// Loads and attaches them. Returns what can't be followed on this host, in words, as well.
    ///
    /// # Errors
    /// When the kernel has none of the tracepoints (they came with 6.3), or refuses a program.
    pub(crate) fn attach(mut open: OpenRxSkel<'static>) -> Result<(Self, Vec<String>)> {
        let mut unseen = Vec::new();
        let names: Vec<_> = TRACEPOINTS.iter().map(|(_, tp)| *tp).collect();
        let missing = caps::missing_tracepoints(&names)?;
        if !missing.is_empty() {
            bail!(
                "this kernel does not tell when an application takes data (tracepoints \
                 sock_recv_length and sock_send_length, Linux 6.3): flows can't follow it; use \
                 --policy rps"
            );
        }
        let cgroup = cgroup_root();
        if let Err(e) = &cgroup {
            unseen.push(format!("unconnected UDP sockets are not followed: {e:#}"));
        }
        for mut prog in open.open_object_mut().progs_mut() {
            let name = prog.name().to_string_lossy().into_owned();
            let follow = Self::owns(&name) && (cgroup.is_ok() || !CGROUP.contains(&&*name));
            prog.set_autoload(follow);
        }
        let skel = open
            .load()
            .context("the kernel refused the programs that watch sockets")?;
        let mut links = Vec::new();
        for prog in skel.object().progs_mut().filter(|prog| prog.autoload()) {
            let name = prog.name().to_string_lossy().into_owned();
            let Some(root) = cgroup.as_ref().ok().filter(|_| CGROUP.contains(&&*name)) else {
                let link = prog.attach_trace();
                links.push(link.with_context(|| format!("attaching {name}"))?);
                continue;
            };
            match prog.attach_cgroup(root.as_raw_fd()) {
                Ok(link) => links.push(link),
                Err(e) => unseen.push(format!(
                    "unconnected UDP sockets are not followed: the root cgroup refuses {name}: {e}"
                )),
            }
        }
        Ok((
            Self {
                _links: links,
                _skel: skel,
            },
            unseen,
        ))
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
    File::open(path).with_context(|| path.to_owned())
}
