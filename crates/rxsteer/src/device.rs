// SPDX-License-Identifier: MIT OR Apache-2.0
//! A network device: the facts about it, and what speaks against steering its packets.
//!
//! Nothing here changes anything on the device.

use std::ffi::CStr;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use ethtool::{EthtoolAttr, EthtoolFeatureAttr, EthtoolFeatureBit};
use futures_util::TryStreamExt;
use libbpf_rs::query::ProgInfoIter;
use nix::net::if_::{Interface, if_nameindex, if_nametoindex};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use serde::Serialize;

use crate::cpumask::CpuMask;
use crate::netdev::{self, Napi};
use crate::topology::Topology;

/// Where in the receive path the XDP program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum XdpMode {
    /// In the driver, before an skb exists.
    Native,
    /// In the stack, on finished skbs: any driver, but slower.
    Generic,
}

impl fmt::Display for XdpMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Generic => "generic",
        })
    }
}

/// Something that speaks against steering a device, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Objection {
    pub reason: String,
    /// A command, or an action in words.
    pub remedy: String,
    /// Steering would lose, reorder or misdirect packets, or can't work at all.
    pub fatal: bool,
}

impl fmt::Display for Objection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.reason, self.remedy)
    }
}

/// An XDP program that is attached to a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AttachedXdp {
    pub id: u32,
    /// Empty if the kernel won't tell, which takes CAP_SYS_ADMIN.
    pub name: String,
    /// `native`, `generic`, `offloaded`, or several.
    pub mode: String,
    /// Processes with the program or its link open, as `name (pid N)`.
    pub holders: Vec<String>,
}

/// A setting of the device that is on, off, or on for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    Off,
    On,
    /// On, and the driver does not let go of it.
    Fixed,
}

/// A network device of the current network namespace.
#[derive(Clone, Debug, Serialize)]
pub struct Device {
    pub name: String,
    pub ifindex: u32,
    /// `virtio_net`, `veth`, …; empty for devices without ethtool operations.
    pub driver: String,
    /// Receive queues in use.
    pub rx_queues: u32,
    /// Bytes.
    pub mtu: u32,
    pub up: bool,
    /// There is a bus device below it, rather than software alone.
    pub hardware: bool,
    pub xdp: Option<AttachedXdp>,
    /// Whether the driver runs XDP and carries out redirects; `None` before Linux 6.3.
    pub native_xdp: Option<bool>,
    /// VLAN tags, of either type, are taken out of received frames by the device.
    pub rx_vlan_offload: Offload,
    /// Files below `queues/` by which kernel RPS or RFS is on, as `rx-0/rps_cpus`.
    pub kernel_rps: Vec<String>,
    /// `None` before Linux 6.8.
    #[serde(skip)]
    pub napis: Option<Vec<Napi>>,
}

impl Device {
    /// Reads the facts about device `name`.
    ///
    /// Fails if there is no such device, saying which there are, or if the kernel can't be asked.
    pub fn open(name: &str) -> Result<Self> {
        let Ok(ifindex) = if_nametoindex(name) else {
            bail!(
                "there is no network device `{name}` here; there are: {}",
                names()?.join(", ")
            );
        };
        let sysfs = Path::new("/sys/class/net").join(name);
        // A /sys that was mounted in another network namespace shows that one's devices.
        if read_number(&sysfs.join("ifindex")).ok() != Some(ifindex) {
            bail!(
                "/sys does not show the network namespace that `{name}` is in; enter the namespace \
                 with `ip netns exec`, which mounts the right one"
            );
        }
        let (xdp, features) = query_xdp(ifindex)
            .with_context(|| format!("cannot ask the kernel for the XDP program on {name}"))?;
        // libbpf reports no features both where there are none and where the kernel is too old.
        let native_xdp = netdev::is_known()?.then_some(
            features & (NETDEV_XDP_ACT_BASIC | NETDEV_XDP_ACT_REDIRECT)
                == NETDEV_XDP_ACT_BASIC | NETDEV_XDP_ACT_REDIRECT,
        );
        let queues = sysfs.join("queues");
        Ok(Self {
            name: name.to_string(),
            ifindex,
            driver: driver(name)?,
            rx_queues: rx_queues(&queues)?.len() as u32,
            mtu: read_number(&sysfs.join("mtu"))?,
            up: read_number(&sysfs.join("flags"))? & libc::IFF_UP as u32 != 0,
            hardware: sysfs.join("device").exists(),
            xdp,
            native_xdp,
            rx_vlan_offload: rx_vlan_offload(name)
                .with_context(|| format!("cannot ask the kernel for the features of {name}"))?,
            kernel_rps: kernel_rps(&queues)?,
            napis: netdev::napis(ifindex)?,
        })
    }

    /// What speaks against steering this device in `mode`, the fatal first.
    pub fn objections(&self, mode: XdpMode) -> Vec<Objection> {
        let mut objections: Vec<Objection> = [
            self.attached_xdp(),
            self.kernel_rps_on(),
            (mode == XdpMode::Native)
                .then(|| self.no_native_xdp())
                .flatten(),
            (mode == XdpMode::Native)
                .then(|| self.tags_lost())
                .flatten(),
            (mode == XdpMode::Native)
                .then(|| self.checksums_missing())
                .flatten(),
            (mode == XdpMode::Generic).then(|| self.no_napi()).flatten(),
            (mode == XdpMode::Native).then(|| self.tun()).flatten(),
            self.down(),
        ]
        .into_iter()
        .flatten()
        .collect();
        objections.sort_by_key(|objection| !objection.fatal);
        objections
    }

    /// Why attaching failed, from the error number and, where the kernel gave one, its extended
    /// acknowledgement (libbpf prints it as `Kernel error message: …`).
    pub fn attach_objection(&self, mode: XdpMode, errno: i32, extack: Option<&str>) -> Objection {
        let name = &self.name;
        let said = extack.unwrap_or_default().trim();
        let lower = said.to_ascii_lowercase();
        let mentions = |words: &[&str]| words.iter().any(|word| lower.contains(word));
        let error = io::Error::from_raw_os_error(errno);
        let why = if said.is_empty() {
            error.to_string()
        } else {
            said.to_string()
        };

        let remedy = match errno {
            libc::EPERM | libc::EACCES => "run it as root".to_string(),
            libc::EBUSY | libc::EEXIST => {
                format!("see what else is attached: `ip -details link show dev {name}`")
            }
            _ if mentions(&["lro", "gro_hw", "gro-hw", "hw gro", "hw-gro"]) => {
                format!("turn it off: `ethtool -K {name} lro off rx-gro-hw off`")
            }
            _ if mentions(&["mtu", "multi-buff", "frags", "frame size"])
                || errno == libc::ERANGE =>
            {
                format!(
                    "the MTU is {}; lower it (`ip link set dev {name} mtu 1500`), or use \
                     `--mode generic`",
                    self.mtu
                )
            }
            _ if mentions(&["queue", "channel", "ring"])
                || matches!(errno, libc::ENOMEM | libc::ENOSPC) =>
            {
                format!(
                    "the driver needs transmit queues of its own for XDP; use fewer channels: \
                     `ethtool -L {name} combined {}`",
                    (self.rx_queues / 2).max(1)
                )
            }
            _ if mode == XdpMode::Native => "use `--mode generic`".to_string(),
            _ => "see the kernel's log: `dmesg`".to_string(),
        };
        Objection {
            reason: format!("{name} takes no XDP program in {mode} mode: {why}"),
            remedy,
            fatal: true,
        }
    }

    /// The CPU that receives the packets of `queue` ([`Topology::interrupt_cpu`]).
    pub fn interrupt_cpu(&self, topology: &Topology, queue: u32) -> Option<u32> {
        let napis = self.napis.as_deref().unwrap_or_default();
        topology.interrupt_cpu(&self.name, queue, self.rx_queues, napis)
    }

    /// Fails if an XDP program is on the device, which is never replaced.
    pub fn without_xdp(&self) -> Result<()> {
        match self.attached_xdp() {
            Some(objection) => bail!("{objection}"),
            None => Ok(()),
        }
    }

    fn attached_xdp(&self) -> Option<Objection> {
        let xdp = self.xdp.as_ref()?;
        let name = match xdp.name.as_str() {
            "" => String::new(),
            name => format!(" `{name}`"),
        };
        let (holder, remedy) = if xdp.holders.is_empty() {
            let word = match xdp.mode.as_str() {
                "native" => "xdpdrv",
                "generic" => "xdpgeneric",
                "offloaded" => "xdpoffload",
                _ => "xdp",
            };
            let remedy = format!(
                "if nobody needs it, detach it: `ip link set dev {} {word} off`",
                self.name
            );
            (String::new(), remedy)
        } else {
            let holders = xdp.holders.join(", ");
            (
                format!(", held by {holders}"),
                format!("stop {holders} first"),
            )
        };
        Some(Objection {
            reason: format!(
                "an XDP program is attached to {} already:{name} (id {}, {} mode{holder})",
                self.name, xdp.id, xdp.mode
            ),
            remedy,
            fatal: true,
        })
    }

    fn kernel_rps_on(&self) -> Option<Objection> {
        let file = self.kernel_rps.first()?;
        let more = match self.kernel_rps.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        Some(Objection {
            reason: format!(
                "kernel RPS is on for {}, and would queue every packet again ({file}{more})",
                self.name
            ),
            remedy: format!(
                "turn it off: `for f in /sys/class/net/{}/queues/rx-*/rps_*; do echo 0 > $f; done`",
                self.name
            ),
            fatal: true,
        })
    }

    fn no_native_xdp(&self) -> Option<Objection> {
        (self.native_xdp == Some(false)).then(|| Objection {
            reason: format!(
                "the driver of {} ({}) does not run XDP programs",
                self.name,
                if self.driver.is_empty() {
                    "none"
                } else {
                    &self.driver
                }
            ),
            remedy: "use `--mode generic`".to_string(),
            fatal: true,
        })
    }

    /// A redirected frame leaves behind what the device wrote beside it, a VLAN tag included: it
    /// would arrive on the untagged interface. Generic mode queues whole skbs and loses nothing.
    fn tags_lost(&self) -> Option<Objection> {
        let name = &self.name;
        let remedy = match self.rx_vlan_offload {
            Offload::Off => return None,
            // It is the sender that leaves the tag beside the frame here. Its setting can't be
            // seen from this end; ours is taken as the word that both were looked at.
            _ if self.driver == "veth" => format!(
                "on the other end `ethtool -K PEER txvlan off tx-vlan-stag-hw-insert off`, then \
                 here `ethtool -K {name} rxvlan off rx-vlan-stag-hw-parse off`"
            ),
            Offload::On => {
                format!("turn it off: `ethtool -K {name} rxvlan off rx-vlan-stag-hw-parse off`")
            }
            Offload::Fixed => "use `--mode generic`: the driver can't turn it off".to_string(),
        };
        Some(Objection {
            reason: format!(
                "{name} hands over VLAN tags outside of the frame, where a redirect loses them"
            ),
            remedy,
            fatal: true,
        })
    }

    /// A veth's sender leaves the checksum to hardware that isn't there; a redirected frame no
    /// longer says so, and is dropped as corrupt.
    fn checksums_missing(&self) -> Option<Objection> {
        (self.driver == "veth").then(|| Objection {
            reason: format!(
                "what the other end of {} sends without checksums would be dropped",
                self.name
            ),
            remedy: "make it fill them in, unless that is done: there `ethtool -K PEER tx off`"
                .to_string(),
            fatal: false,
        })
    }

    /// tun runs native XDP where its user writes, without NAPI: for one queue on several CPUs at once.
    fn tun(&self) -> Option<Objection> {
        (self.driver == "tun").then(|| Objection {
            fatal: true,
            reason: format!(
                "{} is a tun or tap device, whose frames are not received by NAPI polls: their order \
                 can't be kept",
                self.name
            ),
            remedy: "steer the device that its packets come from instead".to_string(),
        })
    }

    /// Outside of a NAPI poll several CPUs run generic XDP for one queue at once, and order is
    /// lost before the program sees a packet.
    fn no_napi(&self) -> Option<Objection> {
        let polled = match &self.napis {
            Some(napis) => !napis.is_empty(),
            None => self.hardware,
        };
        if polled {
            return None;
        }
        let name = &self.name;
        let remedy = if !self.up {
            format!("it may be because {name} is down: `ip link set dev {name} up`")
        } else if self.native_xdp == Some(false) {
            "steer the device that its packets come from instead".to_string()
        } else if self.driver == "veth" && self.napis.is_some() {
            format!("use native mode, or give it NAPI: `ethtool -K {name} gro on`")
        } else {
            "use native mode".to_string()
        };
        let told = match &self.napis {
            Some(_) => "",
            None => ", as far as this kernel tells (Linux 6.8 tells more)",
        };
        Some(Objection {
            reason: format!("generic mode would reorder: {name} is not polled by NAPI{told}"),
            remedy,
            fatal: true,
        })
    }

    fn down(&self) -> Option<Objection> {
        (!self.up).then(|| Objection {
            reason: format!("{} is down: there is nothing to steer yet", self.name),
            remedy: format!("`ip link set dev {} up`", self.name),
            fatal: false,
        })
    }
}

// linux/netdev.h. Written out because Debian 12's headers, of 6.1, do not have it.
const NETDEV_XDP_ACT_BASIC: u64 = 1;
const NETDEV_XDP_ACT_REDIRECT: u64 = 2;

/// The names of the network namespace's devices, in the order of their indices.
///
/// # Errors
/// When the kernel can't be asked.
pub fn names() -> Result<Vec<String>> {
    let devices = if_nameindex().context("cannot list the network devices")?;
    let name = |device: &Interface| device.name().to_string_lossy().into_owned();
    Ok(devices.iter().map(name).collect())
}

/// A number in decimal, or in hex after `0x`, as sysfs has both.
fn read_number(path: &Path) -> Result<u32> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let text = text.trim();
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    }
    .with_context(|| format!("{}: `{text}`", path.display()))
}

/// The receive queues below `queues`, in the order of their numbers.
fn rx_queues(queues: &Path) -> Result<Vec<u32>> {
    let mut numbers: Vec<u32> = fs::read_dir(queues)
        .with_context(|| queues.display().to_string())?
        .flatten()
        .filter_map(|entry| {
            entry
                .file_name()
                .to_str()?
                .strip_prefix("rx-")?
                .parse()
                .ok()
        })
        .collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The files below `queues` that have kernel RPS or RFS on. A kernel without CONFIG_RPS has none.
fn kernel_rps(queues: &Path) -> Result<Vec<String>> {
    let mut on = Vec::new();
    for queue in rx_queues(queues)? {
        for file in ["rps_cpus", "rps_flow_cnt"] {
            let name = format!("rx-{queue}/{file}");
            let Ok(value) = fs::read_to_string(queues.join(&name)) else {
                continue;
            };
            let set = match file {
                "rps_cpus" => !CpuMask::parse_mask(&value)?.is_empty(),
                _ => value.trim() != "0",
            };
            if set {
                on.push(name);
            }
        }
    }
    Ok(on)
}

/// The XDP program on a device, and its driver's `NETDEV_XDP_ACT_*`.
fn query_xdp(ifindex: u32) -> io::Result<(Option<AttachedXdp>, u64)> {
    let mut query = libbpf_sys::bpf_xdp_query_opts {
        sz: size_of::<libbpf_sys::bpf_xdp_query_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: `query` outlives the call and carries its own size.
    let ret = unsafe { libbpf_sys::bpf_xdp_query(ifindex as i32, 0, &mut query) };
    if ret < 0 {
        return Err(io::Error::from_raw_os_error(-ret));
    }
    let programs: Vec<(u32, &str)> = [
        (query.drv_prog_id, "native"),
        (query.skb_prog_id, "generic"),
        (query.hw_prog_id, "offloaded"),
    ]
    .into_iter()
    .filter(|(id, _)| *id != 0)
    .collect();
    let xdp = programs.first().map(|&(id, _)| AttachedXdp {
        id,
        name: program_name(id).unwrap_or_default(),
        mode: programs
            .iter()
            .map(|(_, mode)| *mode)
            .collect::<Vec<_>>()
            .join(" and "),
        holders: holders(Path::new("/proc"), id),
    });
    Ok((xdp, query.feature_flags))
}

fn program_name(id: u32) -> Option<String> {
    let info = ProgInfoIter::default().find(|info| info.id == id)?;
    Some(info.name.to_string_lossy().into_owned())
}

/// The processes that have program `id`, or a link of it, open.
fn holders(proc: &Path, id: u32) -> Vec<String> {
    let wanted = format!("prog_id:\t{id}");
    let holds = |process: &Path| {
        fs::read_dir(process.join("fd")).is_ok_and(|fds| {
            fds.flatten().any(|fd| {
                fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().contains("bpf"))
                    && fs::read_to_string(process.join("fdinfo").join(fd.file_name()))
                        .is_ok_and(|info| info.lines().any(|line| line == wanted))
            })
        })
    };
    let Ok(processes) = fs::read_dir(proc) else {
        return Vec::new();
    };
    let mut pids: Vec<u32> = processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| holds(&proc.join(pid.to_string())))
        .collect();
    pids.sort_unstable();
    pids.iter()
        .map(|pid| {
            let comm = fs::read_to_string(proc.join(pid.to_string()).join("comm"));
            format!("{} (pid {pid})", comm.unwrap_or_default().trim())
        })
        .collect()
}

/// The driver's name, which virtual devices have no link in sysfs for.
fn driver(name: &str) -> Result<String> {
    /// `struct ethtool_drvinfo` up to what is read here, and as long as the kernel writes.
    #[repr(C)]
    struct DrvInfo {
        cmd: u32,
        driver: [u8; 32],
        rest: [u8; 160],
    }
    const ETHTOOL_GDRVINFO: u32 = 3;
    nix::ioctl_write_ptr_bad!(siocethtool, libc::SIOCETHTOOL, libc::ifreq);

    let mut info = DrvInfo {
        cmd: ETHTOOL_GDRVINFO,
        driver: [0; 32],
        rest: [0; 160],
    };
    // SAFETY: all zeros is a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut info).cast();
    let socket = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // SAFETY: the request points to `info`, which is as large as the kernel's structure.
    match unsafe { siocethtool(socket.as_raw_fd(), &request) } {
        Ok(_) => {
            let driver = CStr::from_bytes_until_nul(&info.driver).unwrap_or_default();
            Ok(driver.to_string_lossy().into_owned())
        }
        Err(nix::Error::EOPNOTSUPP) => Ok(String::new()),
        Err(e) => Err(e).with_context(|| format!("cannot ask the kernel for the driver of {name}")),
    }
}

/// Whether the device takes VLAN tags, of type 802.1Q or 802.1ad, out of the frames.
fn rx_vlan_offload(name: &str) -> Result<Offload> {
    let attrs = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?
        .block_on(async {
            let (connection, mut handle, _) = ethtool::new_connection()?;
            let connection = tokio::spawn(connection);
            let mut request = handle.feature().get(Some(name)).execute().await?;
            let reply = request.try_next().await?;
            connection.abort();
            anyhow::Ok(reply.map(|reply| reply.payload.nlas).unwrap_or_default())
        })?;
    Ok(offload_of(
        &attrs,
        &["rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"],
    ))
}

fn offload_of(attrs: &[EthtoolAttr], features: &[&str]) -> Offload {
    let is_set = |bits: &[EthtoolFeatureBit], feature: &str| {
        bits.iter().any(|bit| bit.name == feature && bit.value)
    };
    let (mut active, mut changeable) = (Vec::new(), Vec::new());
    for attr in attrs {
        match attr {
            EthtoolAttr::Feature(EthtoolFeatureAttr::Active(bits)) => {
                active.extend_from_slice(bits)
            }
            EthtoolAttr::Feature(EthtoolFeatureAttr::Hw(bits)) => {
                changeable.extend_from_slice(bits)
            }
            _ => {}
        }
    }
    let on: Vec<&str> = features
        .iter()
        .copied()
        .filter(|f| is_set(&active, f))
        .collect();
    if on.is_empty() {
        Offload::Off
    } else if on.iter().all(|feature| is_set(&changeable, feature)) {
        Offload::On
    } else {
        Offload::Fixed
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A network card that nothing speaks against.
    fn card() -> Device {
        Device {
            name: "eth0".into(),
            ifindex: 2,
            driver: "ice".into(),
            rx_queues: 8,
            mtu: 1500,
            up: true,
            hardware: true,
            xdp: None,
            native_xdp: Some(true),
            rx_vlan_offload: Offload::Off,
            kernel_rps: Vec::new(),
            napis: Some(vec![Napi {
                id: 8193,
                irq: Some(40),
                ..Napi::default()
            }]),
        }
    }

    fn veth() -> Device {
        Device {
            name: "veth0".into(),
            driver: "veth".into(),
            hardware: false,
            napis: Some(Vec::new()),
            ..card()
        }
    }

    /// The only objection, which must be as fatal as said.
    fn only(device: &Device, mode: XdpMode, fatal: bool) -> String {
        let objections = device.objections(mode);
        assert_eq!(objections.len(), 1, "{objections:?}");
        assert_eq!(objections[0].fatal, fatal, "{objections:?}");
        objections[0].to_string()
    }

    #[test]
    fn nothing_speaks_against_a_plain_card() {
        assert_eq!(card().objections(XdpMode::Native), []);
        assert_eq!(card().objections(XdpMode::Generic), []);
    }

    #[test]
    fn an_attached_program_is_named_with_its_holder() {
        let xdp = AttachedXdp {
            id: 41,
            name: "xdp_dispatcher".into(),
            mode: "generic".into(),
            holders: vec!["katran (pid 7)".into()],
        };
        let held = Device {
            xdp: Some(xdp.clone()),
            ..card()
        };
        for mode in [XdpMode::Native, XdpMode::Generic] {
            let text = only(&held, mode, true);
            for part in [
                "`xdp_dispatcher`",
                "id 41",
                "generic mode",
                "stop katran (pid 7)",
            ] {
                assert!(text.contains(part), "{text}");
            }
        }
        let xdp = AttachedXdp {
            holders: Vec::new(),
            name: String::new(),
            ..xdp
        };
        let text = only(
            &Device {
                xdp: Some(xdp),
                ..card()
            },
            XdpMode::Native,
            true,
        );
        assert!(
            text.contains("`ip link set dev eth0 xdpgeneric off`"),
            "{text}"
        );
    }

    #[test]
    fn kernel_rps_is_refused_in_both_modes() {
        let device = Device {
            kernel_rps: vec!["rx-3/rps_cpus".into()],
            ..card()
        };
        for mode in [XdpMode::Native, XdpMode::Generic] {
            let text = only(&device, mode, true);
            assert!(
                text.contains("rx-3/rps_cpus") && text.contains("echo 0"),
                "{text}"
            );
        }
    }

    #[test]
    fn offloaded_tags_are_refused_in_native_mode_alone() {
        let device = Device {
            rx_vlan_offload: Offload::On,
            ..card()
        };
        let text = only(&device, XdpMode::Native, true);
        assert!(text.contains("`ethtool -K eth0 rxvlan off"), "{text}");
        assert_eq!(device.objections(XdpMode::Generic), []);
        let device = Device {
            rx_vlan_offload: Offload::Fixed,
            ..card()
        };
        assert!(only(&device, XdpMode::Native, true).contains("--mode generic"));
        let device = Device {
            rx_vlan_offload: Offload::On,
            ..veth()
        };
        let first = device.objections(XdpMode::Native)[0].clone();
        assert!(
            first.fatal && first.remedy.contains("PEER txvlan off"),
            "{first}"
        );
    }

    #[test]
    fn native_mode_needs_a_driver_that_runs_it() {
        let device = Device {
            native_xdp: Some(false),
            ..card()
        };
        assert!(only(&device, XdpMode::Native, true).contains("--mode generic"));
        // Before 6.3 the kernel does not say: attaching will.
        let device = Device {
            native_xdp: None,
            ..card()
        };
        assert_eq!(device.objections(XdpMode::Native), []);
    }

    #[test]
    fn generic_mode_needs_napi() {
        assert!(only(&veth(), XdpMode::Generic, true).contains("not polled by NAPI"));
        let polled = Device {
            napis: card().napis,
            ..veth()
        };
        assert_eq!(polled.objections(XdpMode::Generic), []);
        // Where the kernel does not say, hardware is taken to have it and software not to.
        assert_eq!(
            Device {
                napis: None,
                ..card()
            }
            .objections(XdpMode::Generic),
            []
        );
        assert!(
            only(
                &Device {
                    napis: None,
                    ..veth()
                },
                XdpMode::Generic,
                true
            )
            .contains("NAPI")
        );
        // A network card whose driver still interrupts per packet.
        assert!(
            only(
                &Device {
                    napis: Some(vec![]),
                    ..card()
                },
                XdpMode::Generic,
                true
            )
            .len()
                > 1
        );
    }

    #[test]
    fn a_device_that_is_down_is_a_warning() {
        let device = Device {
            up: false,
            ..card()
        };
        assert!(only(&device, XdpMode::Native, false).contains("ip link set dev eth0 up"));
    }

    #[test]
    fn the_fatal_come_first() {
        let device = Device {
            up: false,
            rx_vlan_offload: Offload::On,
            ..veth()
        };
        let fatal: Vec<bool> = device
            .objections(XdpMode::Native)
            .iter()
            .map(|o| o.fatal)
            .collect();
        assert_eq!(fatal, [true, false, false]);
    }

    #[test]
    fn errors_of_attaching_have_a_remedy() {
        let remedy = |errno, extack| {
            card()
                .attach_objection(XdpMode::Native, errno, extack)
                .remedy
        };
        assert!(remedy(libc::EOPNOTSUPP, None).contains("--mode generic"));
        assert!(remedy(libc::EPERM, None).contains("root"));
        assert!(remedy(libc::EBUSY, None).contains("ip -details link"));
        assert!(remedy(libc::ENOMEM, None).contains("ethtool -L eth0 combined 4"));
        assert!(remedy(libc::ERANGE, None).contains("mtu 1500"));
        let cases = [
            ("Peer MTU is too large to set XDP", "mtu 1500"),
            ("MTU too large to enable XDP", "mtu 1500"),
            (
                "Can't set XDP while host is implementing GRO_HW/CSUM",
                "rx-gro-hw off",
            ),
            (
                "the Rx/Tx channel count should be at most half of the maximum",
                "ethtool -L",
            ),
            (
                "XDP expects number of rx queues not less than peer tx queues",
                "ethtool -L",
            ),
        ];
        for (said, part) in cases {
            let objection = card().attach_objection(XdpMode::Native, libc::EINVAL, Some(said));
            assert!(objection.reason.contains(said), "{objection}");
            assert!(objection.remedy.contains(part), "{objection}");
        }
    }

    #[test]
    fn kernel_rps_is_found_in_sysfs() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for queue in 0..11 {
            file(&format!("rx-{queue}/rps_cpus"), "00000000,00000000\n");
            file(&format!("rx-{queue}/rps_flow_cnt"), "0\n");
            file(&format!("tx-{queue}/xps_cpus"), "3\n");
        }
        assert_eq!(rx_queues(dir.path()).unwrap(), (0..11).collect::<Vec<_>>());
        assert_eq!(kernel_rps(dir.path()).unwrap(), Vec::<String>::new());
        file("rx-2/rps_cpus", "00000001,00000000\n");
        file("rx-10/rps_flow_cnt", "4096\n");
        assert_eq!(
            kernel_rps(dir.path()).unwrap(),
            ["rx-2/rps_cpus", "rx-10/rps_flow_cnt"]
        );
    }

    #[test]
    fn holders_are_found_by_their_open_files() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: u32, comm: &str, to: &str, info: &str| {
            let dir = proc.path().join(pid.to_string());
            fs::create_dir_all(dir.join("fd")).unwrap();
            fs::create_dir_all(dir.join("fdinfo")).unwrap();
            fs::write(dir.join("comm"), format!("{comm}\n")).unwrap();
            symlink(to, dir.join("fd/5")).unwrap();
            fs::write(dir.join("fdinfo/5"), info).unwrap();
        };
        process(
            30,
            "loader",
            "anon_inode:bpf-prog",
            "prog_type:\t6\nprog_id:\t41\n",
        );
        process(
            4,
            "linker",
            "anon_inode:bpf_link",
            "link_type:\txdp\nprog_id:\t41\n",
        );
        process(5, "other", "anon_inode:bpf-prog", "prog_id:\t411\n");
        process(6, "reader", "/tmp/notes", "prog_id:\t41\n");
        assert_eq!(
            holders(proc.path(), 41),
            ["linker (pid 4)", "loader (pid 30)"]
        );
    }

    #[test]
    fn offloads_are_off_on_or_fixed() {
        let bits = |names: &[&str]| -> Vec<EthtoolFeatureBit> {
            let bit = |(index, name): (usize, &&str)| EthtoolFeatureBit {
                index: index as u32,
                name: name.to_string(),
                value: true,
            };
            names.iter().enumerate().map(bit).collect()
        };
        let offload = |active: &[&str], hw: &[&str]| {
            let active = EthtoolAttr::Feature(EthtoolFeatureAttr::Active(bits(active)));
            let hw = EthtoolAttr::Feature(EthtoolFeatureAttr::Hw(bits(hw)));
            offload_of(&[hw, active], &["a", "b"])
        };
        assert_eq!(offload(&[], &["a", "b"]), Offload::Off);
        assert_eq!(offload(&["c"], &["c"]), Offload::Off);
        assert_eq!(offload(&["b"], &["a", "b"]), Offload::On);
        assert_eq!(offload(&["a", "b"], &["a"]), Offload::Fixed);
    }

    #[test]
    fn a_missing_device_is_answered_with_those_there_are() {
        let error = Device::open("rxsteer-none").unwrap_err().to_string();
        assert!(
            error.contains("`rxsteer-none`") && error.contains("lo"),
            "{error}"
        );
    }

    #[test]
    fn the_loopback_device_can_be_read() {
        let lo = Device::open("lo").unwrap();
        assert_eq!((lo.ifindex, lo.rx_queues), (1, 1));
        assert!(!lo.hardware);
        assert!(
            lo.objections(XdpMode::Generic)
                .iter()
                .any(|o| o.reason.contains("NAPI"))
        );
    }
}
