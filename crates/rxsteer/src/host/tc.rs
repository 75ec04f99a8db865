// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attaching programs at a device's tc ingress, where packets enter the stack, after GRO, and at its
//! egress.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use anyhow::{Context, Result};

use super::guardian::Guardian;

/// An attached program; dropping it detaches the program, and so does the end of the process.
#[derive(Debug)]
pub struct TcLink {
    _hold: Hold,
}

#[derive(Debug)]
#[expect(dead_code, reason = "dropped, never read")]
enum Hold {
    /// Since Linux 6.6: the kernel removes the link with its last descriptor.
    Tcx(OwnedFd),
    /// A filter of a clsact qdisc would outlive the process.
    Clsact(Guardian, Option<Arc<Made>>),
}

/// This process made the clsact qdisc of a device. All its filters there hold this: the last one that
/// is removed takes the qdisc along.
#[derive(Debug)]
struct Made;

/// By interface index.
static MADE: Mutex<BTreeMap<u32, Weak<Made>>> = Mutex::new(BTreeMap::new());

/// Where packets enter the stack, after GRO, or leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Ingress,
    Egress,
}

impl Hook {
    fn tcx(self) -> u32 {
        match self {
            Self::Ingress => libbpf_sys::BPF_TCX_INGRESS,
            Self::Egress => libbpf_sys::BPF_TCX_EGRESS,
        }
    }

    fn clsact(self) -> u32 {
        match self {
            Self::Ingress => libbpf_sys::BPF_TC_INGRESS,
            Self::Egress => libbpf_sys::BPF_TC_EGRESS,
        }
    }

    /// As `tc` calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

/// Attaches `program`, of type `BPF_PROG_TYPE_SCHED_CLS`, to a device in this thread's network namespace, before the programs that are there already. Those are neither
/// replaced, nor skipped if the program returns `TCX_NEXT` (-1, also `TC_ACT_UNSPEC`).
///
/// # Errors
/// When the kernel refuses the program, or has neither tcx (Linux 6.6) nor clsact; without tcx also
/// if `tc` is missing, which removes the program at the end.
pub fn attach(program: BorrowedFd<'_>, ifindex: u32, hook: Hook) -> Result<TcLink> {
    let hold = match attach_tcx(program, ifindex, hook.tcx()) {
        Ok(link) => Hold::Tcx(link),
        // The error for an attach type that is not known.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let (guardian, made) = attach_clsact(program, ifindex, hook)?;
            Hold::Clsact(guardian, made)
        }
        Err(e) => return Err(e).context("the device refused a tc program"),
    };
    Ok(TcLink { _hold: hold })
}

/// As [`attach`], but `None` before Linux 6.6: where nothing of this process should stay, as in another network
/// namespace.
///
/// # Errors
/// When the kernel refuses the program.
pub fn attach_link(program: BorrowedFd<'_>, ifindex: u32, hook: Hook) -> Result<Option<TcLink>> {
    match attach_tcx(program, ifindex, hook.tcx()) {
        Ok(link) => Ok(Some(TcLink {
            _hold: Hold::Tcx(link),
        })),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(None),
        Err(e) => Err(e).context("the device refused a tc program"),
    }
}

fn attach_tcx(program: BorrowedFd<'_>, ifindex: u32, hook: u32) -> io::Result<OwnedFd> {
    let opts = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        // Without a program to be before: the first.
        flags: libbpf_sys::BPF_F_BEFORE,
        ..Default::default()
    };
    let ifindex = i32::try_from(ifindex).map_err(io::Error::other)?;
    // SAFETY: `opts` outlives the call; the kernel checks the rest.
    let fd = unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), ifindex, hook, &opts) };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the kernel has just opened this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Removes the filter when its standard input ends, and the qdisc if the process made it and no other
/// filter is there. Its arguments are the device, whether the qdisc was made, the path of
/// tc, and the hook: a shell with commands of its own, as busybox's, may have another tc. It reads the filter's
/// priority and handle. A device that is gone took both with it.
const DETACH: &str = r#"
    trap "" INT TERM HUP
    read -r pref
    read -r handle
    read -r _
    "$3" qdisc show dev "$1" >/dev/null 2>&1 || exit 0
    [ -z "$handle" ] || "$3" filter del dev "$1" "$4" pref "$pref" handle "$handle" bpf || exit 1
    [ "$2" = true ] || exit 0
    [ -z "$("$3" filter show dev "$1" ingress; "$3" filter show dev "$1" egress)" ] || exit 0
    "$3" qdisc del dev "$1" clsact"#;

/// The path of iproute2's tc, by `PATH`; busybox's knows no programs.
fn tool() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join("tc"))
        .find(|tc| {
            let version = Command::new(tc).arg("-V").output();
            version.is_ok_and(|out| out.status.success())
        })
}

/// Attaches the program as a filter; the guardian removes it. If this process is killed between
/// the two steps, some microseconds, the filter stays.
fn attach_clsact(
    program: BorrowedFd<'_>,
    ifindex: u32,
    at: Hook,
) -> Result<(Guardian, Option<Arc<Made>>)> {
    let tc = tool()
        .context("before Linux 6.6, a tc program needs the program `tc` (install iproute2)")?;
    let mut hook = libbpf_sys::bpf_tc_hook {
        sz: size_of::<libbpf_sys::bpf_tc_hook>() as libbpf_sys::size_t,
        ifindex: i32::try_from(ifindex)?,
        attach_point: at.clsact(),
        ..Default::default()
    };
    let made = clsact(&mut hook)?;
    let mut guardian = Command::new("sh");
    guardian.args([
        "-c",
        DETACH,
        "sh",
        &format!("if{ifindex}"),
        &made.is_some().to_string(),
    ]);
    guardian.arg(tc).arg(at.name());
    let mut guardian = Guardian::spawn(&mut guardian, None, None)
        .context("a tc program can't be removed at the end: is there no sh?")?;
    let mut opts = libbpf_sys::bpf_tc_opts {
        sz: size_of::<libbpf_sys::bpf_tc_opts>() as libbpf_sys::size_t,
        prog_fd: program.as_raw_fd(),
        ..Default::default()
    };
    // With neither priority nor handle, the kernel chooses a priority of its own before all others.
    // SAFETY: both structures outlive the call.
    let error = unsafe { libbpf_sys::bpf_tc_attach(&hook, &mut opts) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(-error))
            .context("the device refused a tc program");
    }
    guardian.tell(&opts.priority)?;
    guardian.tell(&opts.handle)?;
    Ok((guardian, made))
}

/// Makes the qdisc, unless it is there.
fn clsact(hook: &mut libbpf_sys::bpf_tc_hook) -> Result<Option<Arc<Made>>> {
    let ifindex = hook.ifindex as u32;
    let mut known = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(made) = known.get(&ifindex).and_then(Weak::upgrade) {
        return Ok(Some(made));
    }
    // SAFETY: `hook` outlives the call.
    match unsafe { libbpf_sys::bpf_tc_hook_create(hook) } {
        0 => {
            let made = Arc::new(Made);
            known.insert(ifindex, Arc::downgrade(&made));
            Ok(Some(made))
        }
        // A clsact or ingress qdisc, which other programs may use.
        e if e == -libc::EEXIST => Ok(None),
        e => Err(io::Error::from_raw_os_error(-e)).context("the device has no clsact"),
    }
}
