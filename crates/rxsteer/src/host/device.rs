// SPDX-License-Identifier: MIT OR Apache-2.0
//! Facts about a network device. Read only: nothing here changes the device.

use std::ffi::CStr;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use libbpf_rs::query::ProgInfoIter;
use nix::errno::Errno;
use nix::net::if_::{Interface, if_indextoname, if_nameindex, if_nametoindex};
use serde::Serialize;

use crate::host::cpumask::CpuMask;
use crate::host::ethtool::{Ethtool, NTUPLE, Offload, RX_GRO, RX_HASH, RX_MERGE, RX_VLAN};
use crate::host::lower::Lower;
use crate::host::netdev::{self, Napi};
use crate::host::netlink::{self, attrs, number};
use crate::host::peer::Peer;
use crate::host::topology::Topology;

/// Where in the receive path the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum RxMode {
    /// In the driver, before an skb exists.
    Native,
    /// In the stack, after GRO, by the kernel's RPS: any device.
    Softirq,
}

impl fmt::Display for RxMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Softirq => "softirq",
        })
    }
}

/// An XDP program that is attached to a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AttachedXdp {
    pub id: u32,
    /// Empty if the kernel doesn't tell, which requires CAP_SYS_ADMIN.
    pub name: String,
    /// `native`, `generic`, `offloaded`, or several.
    pub mode: String,
    /// Processes that have the program or its link open, as `name (pid N)`.
    pub holders: Vec<String>,
}

impl AttachedXdp {
    /// Whether a rxsteer has attached it.
    pub fn is_rxsteers(&self) -> bool {
        self.name == "rxsteer"
    }
}

/// A network device of the current network namespace.
#[derive(Clone, Debug, Serialize)]
pub struct Device {
    pub name: String,
    pub ifindex: u32,
    /// `virtio_net`, `veth`, …; empty for devices without ethtool operations.
    pub driver: String,
    /// Number of receive queues in use.
    pub rx_queues: u32,
    /// In bytes.
    pub mtu: u32,
    pub up: bool,
    /// Whether a bus device backs it; false for a software device.
    pub hardware: bool,
    pub xdp: Option<AttachedXdp>,
    /// Whether the driver runs XDP and carries out redirects; `None` before Linux 6.3.
    pub native_xdp: Option<bool>,
    /// Whether the device removes VLAN tags (802.1Q or 802.1ad) from received frames.
    pub rx_vlan_offload: Offload,
    /// Whether the device merges received frames (LRO, hardware GRO).
    pub rx_merge: Offload,
    /// Whether the device gives packets a hash.
    #[serde(skip)]
    pub rx_hash: Offload,
    /// Whether the device has filters for flows, which accelerated RFS needs.
    #[serde(skip)]
    pub ntuple: Offload,
    /// Whether the stack merges the frames of a flow (GRO).
    pub gro: bool,
    /// Files below `queues/` that enable kernel RPS or RFS, as `rx-0/rps_cpus`.
    pub kernel_rps: Vec<String>,
    /// The devices in whose queues its packets arrive, if not in its own.
    #[serde(skip)]
    pub lower: Lower,
    /// The other end of a veth, if a path leads to it.
    #[serde(skip)]
    pub peer: Option<Peer>,
    /// Whether its packets begin with the IP header.
    #[serde(skip)]
    pub without_mac: bool,
    /// Whether it is a tun device without NAPI, which receives outside of polls.
    #[serde(skip)]
    pub unpolled: bool,
    /// Whether it returns what is sent to it, as lo does.
    #[serde(skip)]
    pub loopback: bool,
    /// `None` before Linux 6.8.
    #[serde(skip)]
    pub napis: Option<Vec<Napi>>,
}

impl Device {
    /// Reads the facts about device `name`.
    ///
    /// # Errors
    /// When no such device exists (the message lists the others), or a query fails.
    pub fn open(name: &str) -> Result<Self> {
        let Ok(ifindex) = if_nametoindex(name) else {
            bail!(
                "there is no network device `{name}` here; there are: {}",
                names()?.join(", ")
            );
        };
        let sysfs = Path::new("/sys/class/net").join(name);
        // A /sys mounted in another network namespace shows the devices of that namespace.
        if read_number(&sysfs.join("ifindex")).ok() != Some(ifindex) {
            bail!(
                "/sys does not show the network namespace that `{name}` is in; enter the namespace \
                 with `ip netns exec`, which mounts the right one"
            );
        }
        let xdp = query_xdp(ifindex)
            .with_context(|| format!("cannot ask the kernel for the XDP program on {name}"))?;
        let needed = NETDEV_XDP_ACT_BASIC | NETDEV_XDP_ACT_REDIRECT;
        let native_xdp =
            netdev::xdp_features(ifindex)?.map(|supported| supported & needed == needed);
        let queues = sysfs.join("queues");
        let ethtool = Ethtool::by_index(ifindex)?;
        let (driver, features) = (ethtool.driver()?, ethtool.features()?);
        let peer = match driver.as_str() {
            "veth" => {
                Peer::of(ifindex).with_context(|| format!("cannot find the other end of {name}"))?
            }
            _ => None,
        };
        let flags = read_number(&sysfs.join("flags"))?;
        Ok(Self {
            name: name.to_string(),
            ifindex,
            lower: Lower::of(&sysfs, &driver),
            driver,
            rx_queues: rx_queues(&queues)?.len() as u32,
            mtu: read_number(&sysfs.join("mtu"))?,
            up: flags & libc::IFF_UP as u32 != 0,
            loopback: flags & libc::IFF_LOOPBACK as u32 != 0,
            hardware: sysfs.join("device").exists(),
            xdp,
            native_xdp,
            rx_vlan_offload: features.offload(RX_VLAN),
            rx_merge: features.offload(RX_MERGE),
            rx_hash: features.offload(&[RX_HASH]),
            ntuple: features.offload(&[NTUPLE]),
            gro: features.offload(&[RX_GRO]) != Offload::Off,
            peer,
            kernel_rps: kernel_rps(&queues)?,
            without_mac: without_mac(read_number(&sysfs.join("type"))? as u16),
            unpolled: unpolled(&sysfs)?,
            napis: netdev::napis(ifindex)?,
        })
    }

    /// Whether the device is no longer in this network namespace. One that was renamed is.
    ///
    /// # Errors
    /// When the kernel can't be asked.
    pub fn is_gone(&self) -> Result<bool> {
        match if_nametoindex(self.name.as_str()) {
            Ok(ifindex) if ifindex == self.ifindex => return Ok(false),
            Ok(_) | Err(Errno::ENODEV) => {}
            Err(e) => return Err(e).with_context(|| self.name.clone()),
        }
        let devices = if_nameindex().context("cannot list the network devices")?;
        Ok(devices.iter().all(|d| d.index() != self.ifindex))
    }

    /// The number of receive queues now, as [`Self::rx_queues`]. Looks at `/sys` alone.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn rx_queues_now(&self) -> Result<u32> {
        let queues = Path::new("/sys/class/net").join(&self.name).join("queues");
        Ok(rx_queues(&queues)?.len() as u32)
    }

    /// The files that enable kernel RPS or RFS now, as [`Self::kernel_rps`]. Looks at `/sys` alone.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn kernel_rps_now(&self) -> Result<Vec<String>> {
        kernel_rps(&Path::new("/sys/class/net").join(&self.name).join("queues"))
    }

    /// The CPU that receives packets of `queue`; see [`Topology::interrupt_cpu`].
    pub fn interrupt_cpu(&self, topology: &Topology, queue: u32) -> Option<u32> {
        let napis = self.napis.as_deref().unwrap_or_default();
        topology.interrupt_cpu(&self.name, queue, self.rx_queues, napis)
    }

    /// Interrupts of `queue` since boot; see [`Topology::nr_interrupts`].
    pub fn nr_interrupts(&self, topology: &Topology, queue: u32) -> Option<u64> {
        let napis = self.napis.as_deref().unwrap_or_default();
        topology.nr_interrupts(&self.name, queue, self.rx_queues, napis)
    }
}

// linux/netdev.h. Repeated here because the headers of Debian 12 (6.1) lack them.
const NETDEV_XDP_ACT_BASIC: u64 = 1;
const NETDEV_XDP_ACT_REDIRECT: u64 = 2;

// linux/if_link.h.
const IFLA_XDP: u16 = 43;
const IFLA_XDP_DRV_PROG_ID: u16 = 5;
const IFLA_XDP_SKB_PROG_ID: u16 = 6;
const IFLA_XDP_HW_PROG_ID: u16 = 7;

/// The names of the network namespace's devices, ordered by interface index.
///
/// # Errors
/// When the query of the kernel fails.
pub fn names() -> Result<Vec<String>> {
    let devices = if_nameindex().context("cannot list the network devices")?;
    let name = |device: &Interface| device.name().to_string_lossy().into_owned();
    Ok(devices.iter().map(name).collect())
}

/// The name of the device with this altname (`ip link property add … altname`), which /sys does not
/// know; `None` if there is none.
pub fn name_of_altname(altname: &str) -> Option<String> {
    let link = netlink::link_by_name(altname).ok()?;
    let (_, name) = attrs(&link).find(|(kind, _)| *kind == libc::IFLA_IFNAME)?;
    let name = CStr::from_bytes_until_nul(name).ok()?.to_str().ok()?;
    (name != altname).then(|| name.to_owned())
}

/// The name of a device in the network namespace of the calling thread; `None` if it has none with this
/// index.
pub fn name_of(ifindex: u32) -> Option<String> {
    // nix 0.31 takes the null pointer of an unknown index for success.
    let name = if_indextoname(ifindex)
        .ok()
        .filter(|name| !name.is_empty())?;
    Some(name.to_string_lossy().into_owned())
}

/// Reads a sysfs number: decimal, or hex after `0x`.
fn read_number(path: &Path) -> Result<u32> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let text = text.trim();
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    }
    .with_context(|| format!("{}: `{text}`", path.display()))
}

/// Whether packets of a device of this type (linux/if_arp.h) have no link layer header:
/// dev_is_mac_header_xmit() in linux/if_arp.h.
fn without_mac(link_type: u16) -> bool {
    const ARPHRD_RAWIP: u16 = 519;
    const ARPHRD_IP6GRE: u16 = 823;
    matches!(
        link_type,
        libc::ARPHRD_TUNNEL
            | libc::ARPHRD_TUNNEL6
            | libc::ARPHRD_SIT
            | libc::ARPHRD_IPGRE
            | ARPHRD_IP6GRE
            | libc::ARPHRD_VOID
            | libc::ARPHRD_NONE
            | ARPHRD_RAWIP
            | libc::ARPHRD_PPP
    )
}

/// Whether the device in this folder of /sys is a tun device without NAPI. Whoever opens it next may
/// change that.
fn unpolled(sysfs: &Path) -> Result<bool> {
    let flags = sysfs.join("tun_flags");
    Ok(flags.exists() && read_number(&flags)? & libc::IFF_NAPI as u32 == 0)
}

/// The receive queue numbers found in the folder `queues`, ascending.
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

/// The files below `queues` that enable kernel RPS or RFS; empty without CONFIG_RPS.
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

/// The XDP program on a device.
fn query_xdp(ifindex: u32) -> io::Result<Option<AttachedXdp>> {
    let link = netlink::link(ifindex)?;
    let mut nested = attrs(&link).filter(|(kind, _)| *kind == IFLA_XDP);
    let xdp = nested.next().map_or(&[][..], |(_, value)| value);
    let programs: Vec<(u32, &str)> = [
        (IFLA_XDP_DRV_PROG_ID, "native"),
        (IFLA_XDP_SKB_PROG_ID, "generic"),
        (IFLA_XDP_HW_PROG_ID, "offloaded"),
    ]
    .into_iter()
    .filter_map(|(kind, mode)| Some((number(xdp, kind)?.try_into().ok()?, mode)))
    .collect();
    Ok(programs.first().map(|&(id, _)| AttachedXdp {
        id,
        name: program_name(id).unwrap_or_default(),
        mode: programs
            .iter()
            .map(|(_, mode)| *mode)
            .collect::<Vec<_>>()
            .join(" and "),
        holders: holders(Path::new("/proc"), id),
    }))
}

fn program_name(id: u32) -> Option<String> {
    let info = ProgInfoIter::default().find(|info| info.id == id)?;
    Some(info.name.to_string_lossy().into_owned())
}

/// Processes that have program `id` or a link to it open, as `name (pid N)`, ordered by pid.
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

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
        assert!(lo.loopback && lo.up && !lo.without_mac);
    }
}
