// SPDX-License-Identifier: MIT OR Apache-2.0
//! What this host lacks for steering, with a remedy for each.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result};
use libbpf_rs::MapType;
use libbpf_rs::btf::types::{Enum, Func};
use libbpf_rs::btf::{Btf, BtfType};
use serde::Serialize;

/// Something that the host lacks. `Display` writes one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    pub what: String,
    pub how_to_get: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this needs {}: {}", self.what, self.how_to_get)
    }
}

/// The oldest kernel that the data path was read against and tested on.
const OLDEST_KERNEL: (u32, u32) = (6, 1);

/// Capabilities by their number in linux/capability.h. For: attaching XDP; tracing programs; maps
/// and programs; opening a running rxsteer's maps by id (bpf_get_fd_by_id).
const CAPABILITIES: [(u32, &str); 4] = [
    (12, "CAP_NET_ADMIN"),
    (38, "CAP_PERFMON"),
    (39, "CAP_BPF"),
    (21, "CAP_SYS_ADMIN"),
];

/// Required tracepoints. The first three count frames that a backlog took, that its ring refused,
/// and that never reached one. No flow leaves INLINE before napi_poll reports the end of a poll.
const TRACEPOINTS: [&str; 4] = [
    "xdp_cpumap_kthread",
    "xdp_cpumap_enqueue",
    "xdp_redirect_err",
    "napi_poll",
];

const VMLINUX_BTF: &str = "/sys/kernel/btf/vmlinux";

/// Returns what this host lacks; empty when it lacks nothing.
///
/// The probes leave nothing behind: their map and program are gone on return.
pub fn missing() -> Vec<Missing> {
    Host::look().missing()
}

/// Returns those of the kernel tracepoints `names` to which a `tp_btf` program can't attach.
///
/// # Errors
/// When the kernel has no BTF.
pub fn missing_tracepoints<'a>(names: &[&'a str]) -> Result<Vec<&'a str>> {
    let btf = Btf::from_vmlinux().with_context(|| format!("cannot read {VMLINUX_BTF}"))?;
    Ok(names
        .iter()
        .copied()
        .filter(|name| {
            btf.type_by_name::<BtfType>(&format!("btf_trace_{name}"))
                .is_none()
        })
        .collect())
}

/// Whether an XDP program can read the hash that the device computed (Linux 6.3).
///
/// # Errors
/// When the kernel has no BTF.
pub fn has_device_hash() -> Result<bool> {
    let btf = Btf::from_vmlinux().with_context(|| format!("cannot read {VMLINUX_BTF}"))?;
    Ok(btf
        .type_by_name::<Func<'_>>("bpf_xdp_metadata_rx_hash")
        .is_some())
}

/// Whether sockets keep the hash of their packets, as kernel RPS needs it (CONFIG_RPS).
pub fn sockets_keep_hash() -> bool {
    Path::new("/sys/class/net/lo/queues/rx-0/rps_cpus").exists()
}

/// The mask of the bit of `napi_struct.state` that is set while an application polls.
///
/// # Errors
/// When the kernel has no BTF, or no busy polling.
pub fn napi_state_in_busy_poll() -> Result<u64> {
    let btf = Btf::from_vmlinux().with_context(|| format!("cannot read {VMLINUX_BTF}"))?;
    let mut enums = btf.type_by_kind::<Enum<'_>>();
    let number = enums.find_map(|bits| {
        let named = |name: &OsStr| name == "NAPI_STATE_IN_BUSY_POLL";
        let bit = bits.iter().find(|bit| bit.name.is_some_and(named))?;
        Some(bit.value)
    });
    Ok(1 << number.context("this kernel has no busy polling")?)
}

/// Facts about a host.
struct Host {
    root: bool,
    capabilities: u64,
    /// Whether system calls are filtered (seccomp).
    filtered: bool,
    /// Whether capabilities are those of a user namespace, not of the host.
    user_namespace: bool,
    release: String,
    lockdown: String,
    /// PREEMPT_RT lets one poll preempt another on the same CPU (bpf/core/tables.h, poll_stamp).
    realtime: bool,
    /// A subset of [`TRACEPOINTS`]; `None` if the kernel has no BTF.
    missing_tracepoints: Option<Vec<&'static str>>,
    /// `None` without the capabilities that the probes need.
    probed: Option<Probed>,
}

struct Probed {
    bpf: io::Result<()>,
    cpumap: bool,
    frags: io::Result<()>,
}

impl Host {
    fn look() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let status = read("/proc/thread-self/status");
        let mut host = Self {
            root: nix::unistd::geteuid().is_root(),
            capabilities: effective_capabilities(&status),
            filtered: status.contains("Seccomp:\t2\n"),
            user_namespace: is_user_namespace(&read("/proc/self/uid_map")),
            release: read("/proc/sys/kernel/osrelease"),
            lockdown: read("/sys/kernel/security/lockdown"),
            realtime: read("/sys/kernel/realtime").trim() == "1",
            // libbpf logs a missing file.
            missing_tracepoints: Path::new(VMLINUX_BTF)
                .exists()
                .then(|| missing_tracepoints(&TRACEPOINTS).ok())
                .flatten(),
            probed: None,
        };
        if host.lacking_capabilities().is_empty() {
            host.probed = Some(Probed {
                bpf: try_map(),
                cpumap: MapType::Cpumap.is_supported().unwrap_or(false),
                frags: try_frags(),
            });
        }
        host
    }

    fn lacking_capabilities(&self) -> Vec<&'static str> {
        CAPABILITIES
            .iter()
            .filter(|(bit, _)| self.capabilities & (1 << bit) == 0)
            .map(|(_, name)| *name)
            .collect()
    }

    fn missing(&self) -> Vec<Missing> {
        let mut missing = Vec::new();
        let mut lacks = |what: String, how_to_get: &str| {
            let how_to_get = how_to_get.to_owned();
            missing.push(Missing { what, how_to_get });
        };

        let release = self.release.trim();
        if kernel_version(release).is_some_and(|version| version < OLDEST_KERNEL) {
            let (major, minor) = OLDEST_KERNEL;
            lacks(
                format!("Linux {major}.{minor} or later (this is {release})"),
                "boot a newer kernel",
            );
        }
        if self.realtime {
            lacks(
                "a kernel without PREEMPT_RT, which lets polls interleave on one CPU".to_string(),
                "boot a kernel that is not built for real time",
            );
        }
        match self.missing_tracepoints.as_deref() {
            None => lacks(
                format!("the kernel's type information, {VMLINUX_BTF}"),
                "boot a kernel with CONFIG_DEBUG_INFO_BTF=y, and mount /sys",
            ),
            Some([]) => {}
            Some(names) => lacks(
                format!("the tracepoints {}", names.join(", ")),
                "boot a kernel with CONFIG_BPF_EVENTS=y and CONFIG_TRACEPOINTS=y",
            ),
        }
        if self.lockdown.contains("[confidentiality]") {
            lacks(
                "BPF programs that read the kernel, forbidden by lockdown".to_string(),
                "boot without `lockdown=confidentiality`",
            );
        }
        let capabilities = self.lacking_capabilities();
        if !capabilities.is_empty() {
            lacks(
                format!("the capabilities {}", capabilities.join(", ")),
                &match self.root {
                    false => "run it as root, for instance with sudo".to_owned(),
                    true => format!(
                        "this root is confined: a container gets them by `docker run{}`, a pod by \
                         securityContext.capabilities.add, a unit by CapabilityBoundingSet=",
                        (capabilities.iter())
                            .map(|name| format!(" --cap-add={}", &name["CAP_".len()..]))
                            .collect::<String>()
                    ),
                },
            );
        }

        let Some(probed) = &self.probed else {
            return missing;
        };
        if let Err(e) = &probed.bpf {
            lacks(
                format!("the bpf system call ({e})"),
                match e.raw_os_error() {
                    Some(libc::ENOSYS) => "boot a kernel with CONFIG_BPF_SYSCALL=y",
                    _ if self.user_namespace => {
                        "a user namespace is refused it: start a container with `--userns=host`, a pod \
                         with hostUsers: true"
                    }
                    _ if self.filtered => {
                        "a filter of system calls refuses it: allow bpf, in a container's seccomp profile, \
                         a pod's securityContext.seccompProfile, a unit's SystemCallFilter="
                    }
                    _ => "allow it in the security module, or run it outside of the container",
                },
            );
            // The remaining probes need the system call.
            return missing;
        }
        if !probed.cpumap {
            lacks(
                "maps of type cpumap".to_string(),
                "boot a kernel with CONFIG_BPF_SYSCALL=y, CONFIG_NET=y and CONFIG_SMP=y",
            );
        }
        if let Err(e) = &probed.frags {
            lacks(
                format!("XDP programs for frames in several buffers ({e})"),
                "boot a kernel of 6.1 or later that allows XDP",
            );
        }
        missing
    }
}

/// The effective capabilities in a `/proc/PID/status`, one bit each.
fn effective_capabilities(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0)
}

/// Whether a `/proc/PID/uid_map` is not that of the host, which maps every user to itself. Unknown is
/// not.
fn is_user_namespace(uid_map: &str) -> bool {
    let mapped: Vec<_> = uid_map.split_whitespace().collect();
    !mapped.is_empty() && mapped != ["0", "0", "4294967295"]
}

/// Major and minor of a release such as `6.1.0-37-amd64`.
fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Closes a descriptor that libbpf returned, or converts its negative error number.
fn opened(fd: i32) -> io::Result<()> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: libbpf has just opened the descriptor; nothing else owns it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Ok(())
}

/// Creates an array map with one entry.
fn try_map() -> io::Result<()> {
    // SAFETY: the name is a C string, and no options are given.
    opened(unsafe {
        libbpf_sys::bpf_map_create(
            libbpf_sys::BPF_MAP_TYPE_ARRAY,
            c"rxsteer_probe".as_ptr(),
            4,
            4,
            1,
            std::ptr::null(),
        )
    })
}

/// Loads an XDP program of two instructions that accepts frames in several buffers.
fn try_frags() -> io::Result<()> {
    let instruction = |code: u32, imm: u32| libbpf_sys::bpf_insn {
        code: code as u8,
        imm: imm as i32,
        ..Default::default()
    };
    // r0 = XDP_PASS; exit
    let program = [
        instruction(
            libbpf_sys::BPF_ALU64 | libbpf_sys::BPF_MOV | libbpf_sys::BPF_K,
            libbpf_sys::XDP_PASS,
        ),
        instruction(libbpf_sys::BPF_JMP | libbpf_sys::BPF_EXIT, 0),
    ];
    let options = libbpf_sys::bpf_prog_load_opts {
        sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as libbpf_sys::size_t,
        prog_flags: libbpf_sys::BPF_F_XDP_HAS_FRAGS,
        ..Default::default()
    };
    // SAFETY: program and options outlive the call and carry their sizes; the names are C strings.
    opened(unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_XDP,
            c"rxsteer_probe".as_ptr(),
            c"GPL".as_ptr(),
            program.as_ptr(),
            program.len() as libbpf_sys::size_t,
            (&raw const options).cast_mut(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// include/linux/netdevice.h since 5.11.
    #[test]
    fn btf_has_the_busy_poll_bit() {
        if Path::new(VMLINUX_BTF).exists() {
            assert_eq!(napi_state_in_busy_poll().unwrap(), 1 << 6);
        }
    }

    /// A host that lacks nothing.
    fn able() -> Host {
        Host {
            root: true,
            capabilities: u64::MAX,
            filtered: false,
            user_namespace: false,
            release: "6.1.0-37-amd64\n".into(),
            missing_tracepoints: Some(Vec::new()),
            lockdown: "[none] integrity confidentiality\n".into(),
            realtime: false,
            probed: Some(Probed {
                bpf: Ok(()),
                cpumap: true,
                frags: Ok(()),
            }),
        }
    }

    fn probed(change: impl FnOnce(&mut Probed)) -> Host {
        let mut host = able();
        change(host.probed.as_mut().unwrap());
        host
    }

    /// The only missing thing, as one line.
    fn only(host: &Host) -> String {
        let missing = host.missing();
        assert_eq!(missing.len(), 1, "{missing:?}");
        let line = missing[0].to_string();
        assert!(!line.contains('\n'), "{line}");
        line
    }

    fn denied() -> io::Error {
        io::Error::from_raw_os_error(libc::EPERM)
    }

    #[test]
    fn an_able_host_lacks_nothing() {
        assert_eq!(able().missing(), []);
    }

    #[test]
    fn each_lack_is_one_line_with_a_remedy() {
        let without_bpf = !(1u64 << 39);
        let user = Host {
            root: false,
            capabilities: 0,
            probed: None,
            ..able()
        };
        let line = only(&user);
        assert!(line.contains("CAP_BPF") && line.contains("sudo"), "{line}");
        let confined = Host {
            capabilities: without_bpf,
            probed: None,
            ..able()
        };
        let line = only(&confined);
        assert!(
            line.contains("CAP_BPF") && !line.contains("CAP_NET_ADMIN"),
            "{line}"
        );
        let ways = ["run --cap-add=BPF`,", "capabilities.add,", "a unit"];
        assert!(ways.iter().all(|way| line.contains(way)), "{line}");

        let old = Host {
            release: "5.15.0-91-generic".into(),
            ..able()
        };
        assert!(only(&old).contains("5.15.0-91-generic"));
        let untyped = Host {
            missing_tracepoints: None,
            ..able()
        };
        assert!(only(&untyped).contains("CONFIG_DEBUG_INFO_BTF"));
        let untraced = Host {
            missing_tracepoints: Some(vec!["xdp_x"]),
            ..able()
        };
        assert!(only(&untraced).contains("xdp_x"));
        let locked = Host {
            lockdown: "none integrity [confidentiality]".into(),
            ..able()
        };
        assert!(only(&locked).contains("lockdown"));
        let realtime = Host {
            realtime: true,
            ..able()
        };
        assert!(only(&realtime).contains("PREEMPT_RT"));

        assert!(only(&probed(|p| p.cpumap = false)).contains("cpumap"));
        assert!(only(&probed(|p| p.frags = Err(denied()))).contains("XDP"));
    }

    #[test]
    fn without_the_system_call_the_rest_is_not_blamed() {
        let host = probed(|p| {
            p.bpf = Err(denied());
            p.cpumap = false;
            p.frags = Err(denied());
        });
        assert!(only(&host).contains("security module"));
        let filtered = Host {
            filtered: true,
            ..host
        };
        assert!(only(&filtered).contains("seccomp"));
        let user = Host {
            user_namespace: true,
            ..filtered
        };
        assert!(only(&user).contains("hostUsers"));
        let host = probed(|p| p.bpf = Err(io::Error::from_raw_os_error(libc::ENOSYS)));
        assert!(only(&host).contains("CONFIG_BPF_SYSCALL"));
    }

    #[test]
    fn versions_and_capabilities_are_read() {
        assert_eq!(kernel_version("6.18.44-x-y"), Some((6, 18)));
        assert_eq!(kernel_version("6.1"), Some((6, 1)));
        assert_eq!(kernel_version("unknown"), None);
        let status = "Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t000001ffffffffff\n";
        assert_eq!(effective_capabilities(status), 0x1ff_ffff_ffff);
        assert_eq!(effective_capabilities(""), 0);
        assert!(!is_user_namespace("         0          0 4294967295\n"));
        assert!(is_user_namespace("0 100000 65536\n"));
    }
}
