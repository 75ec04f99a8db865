// SPDX-License-Identifier: MIT OR Apache-2.0
//! Client of the kernel's netlink family `netdev` (6.3; NAPI instances 6.8, their settings 6.13):
//! Documentation/netlink/specs/netdev.yaml.

use std::fmt;
use std::io::{self, ErrorKind};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use nix::sys::socket::SockProtocol;
use serde::{Deserialize, Serialize};

use super::netlink::{self, attrs, number, put_attr};

/// A NAPI instance of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Napi {
    pub id: u32,
    /// The interrupt that schedules it, if the driver reports one.
    pub irq: Option<u32>,
    /// The kernel thread that polls it, if threaded.
    pub pid: Option<u32>,
    /// All `None` before 6.13.
    pub settings: Settings,
}

/// How a NAPI instance is scheduled (Documentation/networking/napi.rst). `None`: unknown or kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The interrupt is unmasked after this number of consecutive polls without packets.
    pub defer_hard_irqs: Option<u32>,
    /// While the interrupt is masked, the delay from one poll to the next, ns.
    pub gro_flush_timeout: Option<u64>,
    /// The longest time for which successful epoll polling keeps the interrupt masked, ns.
    pub irq_suspend_timeout: Option<u64>,
    /// Linux 6.17 and later.
    pub threaded: Option<Threaded>,
}

impl Settings {
    /// The settings that `other` has as well.
    pub fn only(&self, other: &Self) -> Self {
        Self {
            defer_hard_irqs: other.defer_hard_irqs.and(self.defer_hard_irqs),
            gro_flush_timeout: other.gro_flush_timeout.and(self.gro_flush_timeout),
            irq_suspend_timeout: other.irq_suspend_timeout.and(self.irq_suspend_timeout),
            threaded: other.threaded.and(self.threaded),
        }
    }

    /// The settings that in `now` still have the value of `set`: no other process changed them.
    pub fn unless_changed(&self, set: &Self, now: &Self) -> Self {
        let same = Self {
            defer_hard_irqs: now
                .defer_hard_irqs
                .filter(|n| set.defer_hard_irqs == Some(*n)),
            gro_flush_timeout: now
                .gro_flush_timeout
                .filter(|n| set.gro_flush_timeout == Some(*n)),
            irq_suspend_timeout: now
                .irq_suspend_timeout
                .filter(|n| set.irq_suspend_timeout == Some(*n)),
            threaded: now.threaded.filter(|n| set.threaded == Some(*n)),
        };
        self.only(&same)
    }

    /// The settings that `other` lacks.
    pub fn without(&self, other: &Self) -> Self {
        let unless = |theirs: bool| (!theirs).then_some(());
        Self {
            defer_hard_irqs: unless(other.defer_hard_irqs.is_some()).and(self.defer_hard_irqs),
            gro_flush_timeout: unless(other.gro_flush_timeout.is_some())
                .and(self.gro_flush_timeout),
            irq_suspend_timeout: unless(other.irq_suspend_timeout.is_some())
                .and(self.irq_suspend_timeout),
            threaded: unless(other.threaded.is_some()).and(self.threaded),
        }
    }
}

/// What polls a NAPI instance. The values are the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Threaded {
    /// softirq
    Off = 0,
    /// a kernel thread for each instance
    On = 1,
    /// a kernel thread that does not wait for interrupts (Linux 6.19)
    BusyPoll = 2,
}

impl fmt::Display for Threaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::On => "on",
            Self::BusyPoll => "busy-poll",
        })
    }
}

impl Threaded {
    /// Converts the number used by netlink and sysfs; `None` if it is unknown.
    pub fn of_number(number: u64) -> Option<Self> {
        [Self::Off, Self::On, Self::BusyPoll]
            .into_iter()
            .find(|threaded| *threaded as u64 == number)
    }
}

const GENL_HEADER: usize = 4;

// linux/netdev.h. Repeated here because the headers of Debian 12 (6.1) lack them.
const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_CMD_QUEUE_GET: u8 = 10;
const NETDEV_CMD_NAPI_GET: u8 = 11;
const NETDEV_CMD_NAPI_SET: u8 = 14;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
const NETDEV_A_NAPI_IFINDEX: u16 = 1;
const NETDEV_A_NAPI_ID: u16 = 2;
const NETDEV_A_NAPI_IRQ: u16 = 3;
const NETDEV_A_NAPI_PID: u16 = 4;
const NETDEV_A_NAPI_DEFER_HARD_IRQS: u16 = 5;
const NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT: u16 = 6;
const NETDEV_A_NAPI_IRQ_SUSPEND_TIMEOUT: u16 = 7;
const NETDEV_A_NAPI_THREADED: u16 = 8;
const NETDEV_A_QUEUE_ID: u16 = 1;
const NETDEV_A_QUEUE_IFINDEX: u16 = 2;
const NETDEV_A_QUEUE_TYPE: u16 = 3;
const NETDEV_A_QUEUE_NAPI_ID: u16 = 4;
const NETDEV_QUEUE_TYPE_RX: u64 = 0;

/// The NAPI instances of device `ifindex`, ordered by id. Ids ascend with receive queues. Instances
/// that only clean transmit queues have no id and are left out.
///
/// `None` before 6.8.
///
/// # Errors
/// When the query of the kernel fails.
pub fn napis(ifindex: u32) -> Result<Option<Vec<Napi>>> {
    let replies = of_device(NETDEV_CMD_NAPI_GET, NETDEV_A_NAPI_IFINDEX, ifindex)
        .context("cannot ask the kernel for the device's NAPI instances")?;
    let napi = |reply: &Vec<u8>| {
        let number = |kind| number(reply, kind);
        let small = |kind| number(kind).and_then(|value| u32::try_from(value).ok());
        Some(Napi {
            id: small(NETDEV_A_NAPI_ID)?,
            irq: small(NETDEV_A_NAPI_IRQ),
            pid: small(NETDEV_A_NAPI_PID),
            settings: Settings {
                defer_hard_irqs: small(NETDEV_A_NAPI_DEFER_HARD_IRQS),
                gro_flush_timeout: number(NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT),
                irq_suspend_timeout: number(NETDEV_A_NAPI_IRQ_SUSPEND_TIMEOUT),
                threaded: number(NETDEV_A_NAPI_THREADED).and_then(Threaded::of_number),
            },
        })
    };
    Ok(replies.map(|replies| {
        let mut napis: Vec<Napi> = replies.iter().filter_map(napi).collect();
        napis.sort_unstable_by_key(|napi| napi.id);
        napis
    }))
}

/// Pairs of receive queue and NAPI id of device `ifindex`, ordered by queue. Empty before 6.8, and
/// for the many drivers that don't report them.
///
/// # Errors
/// When the query of the kernel fails.
pub fn rx_queues(ifindex: u32) -> Result<Vec<(u32, u32)>> {
    let replies = of_device(NETDEV_CMD_QUEUE_GET, NETDEV_A_QUEUE_IFINDEX, ifindex)
        .context("cannot ask the kernel for the device's queues")?;
    let queue = |reply: Vec<u8>| {
        let small = |kind| u32::try_from(number(&reply, kind)?).ok();
        let receives = number(&reply, NETDEV_A_QUEUE_TYPE) == Some(NETDEV_QUEUE_TYPE_RX);
        let napi = small(NETDEV_A_QUEUE_NAPI_ID)?;
        receives.then_some((small(NETDEV_A_QUEUE_ID)?, napi))
    };
    let mut queues: Vec<_> = replies
        .unwrap_or_default()
        .into_iter()
        .filter_map(queue)
        .collect();
    queues.sort_unstable();
    Ok(queues)
}

/// Changes a NAPI instance (6.13; `threaded` 6.17), except settings that are `None`.
///
/// # Errors
/// ENOENT without such an instance, EPERM without CAP_NET_ADMIN, and EOPNOTSUPP, EINVAL or ERANGE
/// from a kernel without the setting or the value.
pub fn set_napi(id: u32, settings: &Settings) -> io::Result<()> {
    let Some(family) = family_id("netdev").map_err(io::Error::other)? else {
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    };
    let mut request = Vec::new();
    put_attr(&mut request, NETDEV_A_NAPI_ID, &id.to_ne_bytes());
    // The kernel's policy for these is u32 and refuses longer values.
    let threaded = settings.threaded.map(|threaded| threaded as u32);
    for (kind, value) in [
        (NETDEV_A_NAPI_DEFER_HARD_IRQS, settings.defer_hard_irqs),
        (NETDEV_A_NAPI_THREADED, threaded),
    ] {
        if let Some(value) = value {
            put_attr(&mut request, kind, &value.to_ne_bytes());
        }
    }
    // The kernel's policy for these is uint: 4 or 8 bytes.
    for (kind, value) in [
        (NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT, settings.gro_flush_timeout),
        (
            NETDEV_A_NAPI_IRQ_SUSPEND_TIMEOUT,
            settings.irq_suspend_timeout,
        ),
    ] {
        if let Some(value) = value {
            put_attr(&mut request, kind, &value.to_ne_bytes());
        }
    }
    exchange(family, NETDEV_CMD_NAPI_SET, 0, &request).map(drop)
}

/// The replies about one device to a command that exists since 6.8; `None` on older kernels.
fn of_device(command: u8, filter: u16, ifindex: u32) -> Result<Option<Vec<Vec<u8>>>> {
    let Some(family) = family_id("netdev")? else {
        return Ok(None);
    };
    let mut request = Vec::new();
    put_attr(&mut request, filter, &ifindex.to_ne_bytes());
    match dump(family, command, &request) {
        Ok(mut replies) => {
            // Kernels that have the command but not the filter reply for every device.
            replies.retain(|reply| number(reply, filter) == Some(ifindex.into()));
            Ok(Some(replies))
        }
        // 6.3 to 6.7 have the family without the command.
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// What device `ifindex` does for XDP programs, as `NETDEV_XDP_ACT_*`. `None` before 6.3.
///
/// # Errors
/// When the query of the kernel fails.
pub fn xdp_features(ifindex: u32) -> Result<Option<u64>> {
    let Some(family) = family_id("netdev")? else {
        return Ok(None);
    };
    let mut request = Vec::new();
    put_attr(&mut request, NETDEV_A_DEV_IFINDEX, &ifindex.to_ne_bytes());
    let replies = exchange(family, NETDEV_CMD_DEV_GET, 0, &request)
        .context("cannot ask the kernel for the device's XDP features")?;
    let features = |reply: &Vec<u8>| number(reply, NETDEV_A_DEV_XDP_FEATURES);
    Ok(Some(replies.first().and_then(features).unwrap_or_default()))
}

/// The number of a generic netlink family; `None` if the kernel lacks it.
fn family_id(name: &str) -> Result<Option<u16>> {
    let mut request = Vec::new();
    let name = [name.as_bytes(), b"\0"].concat();
    put_attr(&mut request, libc::CTRL_ATTR_FAMILY_NAME as u16, &name);
    let command = libc::CTRL_CMD_GETFAMILY as u8;
    let replies = match exchange(libc::GENL_ID_CTRL as u16, command, 0, &request) {
        Ok(replies) => replies,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).context("cannot ask the kernel for its netlink families"),
    };
    let id = replies
        .iter()
        .flat_map(|reply| attrs(reply))
        .find(|(kind, _)| *kind == libc::CTRL_ATTR_FAMILY_ID as u16)
        .and_then(|(_, value)| Some(u16::from_ne_bytes(value.try_into().ok()?)));
    match id {
        Some(id) => Ok(Some(id)),
        None => bail!("the kernel answered without the family's number"),
    }
}

fn dump(family: u16, command: u8, request: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    exchange(family, command, libc::NLM_F_DUMP as u16, request)
}

/// Sends one request; returns the attributes of each reply.
fn exchange(family: u16, command: u8, flags: u16, request: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    // Command, version, reserved.
    let body = [&[command, 1, 0, 0], request].concat();
    let replies = netlink::exchange(SockProtocol::NetlinkGeneric, family, flags, &body)?;
    let attrs = |reply: Vec<u8>| reply.get(GENL_HEADER..).unwrap_or_default().to_vec();
    Ok(replies.into_iter().map(attrs).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_by_name() {
        // The query needs no privilege, and every kernel has the controller.
        assert_eq!(
            family_id("nlctrl").unwrap(),
            Some(libc::GENL_ID_CTRL as u16)
        );
        assert_eq!(family_id("rxsteer-none").unwrap(), None);
    }

    #[test]
    fn the_loopback_device_has_no_napi() {
        if let Some(napis) = napis(1).unwrap() {
            assert_eq!(napis, []);
        }
    }
}
