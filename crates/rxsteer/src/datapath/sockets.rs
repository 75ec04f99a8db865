// SPDX-License-Identifier: MIT OR Apache-2.0
//! Watches applications receive and send data: the programs of `bpf/socket.bpf.c`, which write the
//! `sock_flow_table`.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{Error, ErrorKind, Link, ProgramType};
use nix::errno::Errno;

use super::netnses::Netnses;
use crate::bpf::socket_skel::{OpenSocketSkel, SocketSkel};
use crate::host::{caps, detached, netns, polling};

/// Tracepoints of Linux 6.3 and later.
const TRACEPOINTS: [&str; 2] = ["sock_recv_length", "sock_send_length"];

/// Programs that replace those on the tracepoints: at functions.
const FUNCTIONS: [&str; 5] = [
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
    /// By name of the program.
    pub(super) links: Vec<(String, Link)>,
    /// Whether programs are attached to functions. Detaching the last one of a function waits until
    /// every task has slept once (`synchronize_rcu_tasks()`), which on a loaded host can take any
    /// time.
    pub(crate) at_functions: bool,
    /// The epoch of the table that the programs write.
    pub(crate) epoch: u16,
    netnses: Netnses,
    skel: SocketSkel<'static>,
}

impl Sockets {
    /// Loads and attaches the programs, those for unconnected UDP sockets only if `unconnected`.
    /// `epoch` is that of the `sock_flow_table`. Also returns the applications that can't be
    /// followed on this host, in words.
    ///
    /// # Errors
    /// When the kernel has no hook for connected sockets, or refuses a program.
    pub(crate) fn attach(
        mut open: OpenSocketSkel<'static>,
        unconnected: bool,
        epoch: u16,
    ) -> Result<(Self, Vec<String>)> {
        let mut unseen = Vec::new();
        let missing = caps::missing_tracepoints(&TRACEPOINTS)?;
        let cgroup = cgroup_root();
        if !unconnected {
            unseen
                .push("unconnected UDP sockets are not followed: --ignore-unconnected".to_owned());
        } else if let Err(e) = &cgroup {
            unseen.push(format!("unconnected UDP sockets are not followed: {e:#}"));
        }
        for mut prog in open.open_object_mut().progs_mut() {
            let name = prog.name().to_string_lossy().into_owned();
            prog.set_autoload(if CGROUP.contains(&&*name) {
                cgroup.is_ok() && (unconnected || !UNCONNECTED.contains(&&*name))
            } else if FUNCTIONS.contains(&&*name) {
                !missing.is_empty()
            } else {
                missing.is_empty()
            });
        }
        let hint = || match missing.is_empty() {
            true => "the programs that watch sockets were refused",
            false => {
                "before Linux 6.3 flows can follow applications only where programs may be \
                 attached to kernel functions (CONFIG_FUNCTION_TRACER)"
            }
        };
        let mut sockets = Self {
            links: Vec::new(),
            at_functions: !missing.is_empty(),
            epoch,
            netnses: Netnses::default(),
            skel: open.load().with_context(hint)?,
        };
        sockets.look_at_host()?;
        let bss = sockets.skel.maps.bss_data.as_mut();
        bss.context("no variables")?.devices_netns = netns::cookie()?;
        let links = &mut sockets.links;
        for prog in sockets
            .skel
            .object()
            .progs_mut()
            .filter(|prog| prog.autoload())
        {
            let name = prog.name().to_string_lossy().into_owned();
            match (prog.prog_type(), &cgroup) {
                (ProgramType::Tracing, _) => {
                    links.push((name, prog.attach_trace().with_context(hint)?));
                }
                (_, Err(_)) => {}
                (_, Ok(root)) => match prog.attach_cgroup(root.as_raw_fd()) {
                    Ok(link) => links.push((name, link)),
                    Err(e) => unseen.push(refused(&name, &e)),
                },
            }
        }
        Ok((sockets, unseen))
    }

    /// Looks which network namespaces packets of the `steered` devices reach, by index.
    ///
    /// # Errors
    /// When the map can't be read or written.
    pub(crate) fn look_at_netnses(&mut self, steered: &[u32]) -> Result<()> {
        let bss = self.skel.maps.bss_data.as_ref().context("no variables")?;
        let asked = bss.nr_netns_asked;
        self.netnses.look(&self.skel.maps.netnses, asked, steered)
    }

    /// Reads the host's settings on which the programs depend, again: others may change them.
    ///
    /// # Errors
    /// When no socket can be opened.
    pub(crate) fn look_at_host(&mut self) -> Result<()> {
        let bss = self.skel.maps.bss_data.as_mut().context("no variables")?;
        bss.host_busy_read = polling::host_busy_read().context("net.core.busy_read")?;
        Ok(())
    }
}

/// What the root cgroup's refusal of a program leads to, with what to do: hierarchy_allows_attach() and
/// __cgroup_bpf_attach() in kernel/bpf/cgroup.c.
fn refused(program: &str, error: &Error) -> String {
    let what = match UNCONNECTED.contains(&program) {
        true => "unconnected UDP sockets are not followed",
        false => "it is not seen that sockets are closed",
    };
    let remedy = match error.kind() {
        ErrorKind::PermissionDenied => {
            "another program is attached there alone: `bpftool cgroup tree` names it; detach it, or \
             attach it with BPF_F_ALLOW_MULTI"
        }
        ErrorKind::TooBig => {
            "there are as many as the kernel allows: `bpftool cgroup tree` names them; detach one"
        }
        _ => "boot a kernel with CONFIG_CGROUP_BPF=y",
    };
    format!(
        "{what}: the root cgroup refuses {program} ({error:#}); {remedy}, or give --ignore-unconnected"
    )
}

/// Why the hierarchy can't be had, with what to do. It need not be mounted.
fn no_hierarchy(error: Errno) -> anyhow::Error {
    let remedy = match error {
        Errno::EPERM | Errno::EACCES | Errno::ENOSYS => detached::NEEDS,
        Errno::ENODEV => "boot a kernel with CONFIG_CGROUPS=y and CONFIG_CGROUP_BPF=y",
        _ => "mount one: `mount -t cgroup2 none /sys/fs/cgroup`",
    };
    anyhow!("no cgroup v2 hierarchy can be had ({error}); {remedy}, or give --ignore-unconnected")
}

/// The root of the cgroup v2 hierarchy, by a mount of its own: the host's may be invisible to this process
/// (`ip netns exec` hides /sys).
fn cgroup_root() -> Result<OwnedFd> {
    let root = detached::mount(c"cgroup2").map_err(no_hierarchy)?;
    // Every cgroup except the root has this file.
    if Path::new(&format!("/proc/self/fd/{}/cgroup.type", root.as_raw_fd())).exists() {
        tracing::warn!(
            "in a container, unconnected UDP sockets are followed only in its own cgroup"
        );
    }
    Ok(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_has_its_remedy() {
        const LEAVE: &str = ", or give --ignore-unconnected";
        for (errno, remedy) in [
            (libc::EPERM, "BPF_F_ALLOW_MULTI"),
            (libc::E2BIG, "detach one"),
            (libc::EINVAL, "CONFIG_CGROUP_BPF=y"),
        ] {
            let text = refused("on_udp4_recv", &Error::from_raw_os_error(errno));
            let what =
                "unconnected UDP sockets are not followed: the root cgroup refuses on_udp4_recv";
            assert!(
                text.starts_with(what) && text.contains(remedy) && text.ends_with(LEAVE),
                "{text}"
            );
        }
        for (errno, remedy) in [
            (Errno::EPERM, "SystemCallFilter="),
            (Errno::ENODEV, "CONFIG_CGROUPS=y"),
            (Errno::EBUSY, "mount -t cgroup2"),
        ] {
            let text = no_hierarchy(errno).to_string();
            assert!(text.contains(remedy) && text.ends_with(LEAVE), "{text}");
        }
        // The control: what is refused decides the words.
        let text = refused("on_sock_release", &Error::from_raw_os_error(libc::EPERM));
        assert!(
            text.starts_with("it is not seen that sockets are closed"),
            "{text}"
        );
    }
}
