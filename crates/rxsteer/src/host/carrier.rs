// SPDX-License-Identifier: MIT OR Apache-2.0
//! The carrier: a device through which skbs change their CPU. Packets that are redirected to its
//! ingress, with N as their receive queue, are put into the softnet backlog of CPU N by kernel RPS.
//!
//! It is a tun or tap device that nothing writes to or reads from: the kernel removes it with this
//! process, however the process ends.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::cpumask::CpuMask;

/// Most queues of a tun device (MAX_TAP_QUEUES in drivers/net/tun.c).
const MOST_CPUS: u32 = 256;

/// See the module's documentation.
#[derive(Debug)]
pub struct Carrier {
    /// Interface index.
    pub ifindex: u32,
    /// One for each queue.
    _queues: Vec<OwnedFd>,
}

nix::ioctl_write_ptr_bad!(tunsetiff, 0x4004_54ca, libc::ifreq);
nix::ioctl_read_bad!(siocgifflags, libc::SIOCGIFFLAGS, libc::ifreq);
nix::ioctl_write_ptr_bad!(siocsifflags, libc::SIOCSIFFLAGS, libc::ifreq);

impl Carrier {
    /// Creates a carrier for these CPU ids, from 0 to `nr_cpus` - 1, in the network namespace of the
    /// calling thread. `without_mac`: for packets that begin with the IP header.
    ///
    /// # Errors
    /// When there are too many CPUs, when the kernel has no tun devices, or when /sys does not show
    /// this network namespace.
    pub fn create(nr_cpus: u32, without_mac: bool) -> Result<Self> {
        ensure!(
            nr_cpus <= MOST_CPUS,
            "skb mode is for {MOST_CPUS} CPUs at most, and this host may have {nr_cpus}"
        );
        let kind = if without_mac {
            libc::IFF_TUN
        } else {
            libc::IFF_TAP
        };
        let mut request = request("rxsteer%d");
        request.ifr_ifru.ifru_flags =
            (kind | libc::IFF_NO_PI | libc::IFF_MULTI_QUEUE) as libc::c_short;
        let mut queues = Vec::new();
        for _ in 0..nr_cpus {
            let queue = open_tun()?;
            // SAFETY: the request outlives the call; the kernel writes the device's name to it.
            unsafe { tunsetiff(queue.as_raw_fd(), &request) }
                .context("the kernel refused a tun device")?;
            queues.push(OwnedFd::from(queue));
        }
        let name = name_of(&request);
        let carrier = Self {
            ifindex: if_nametoindex(name.as_str())?,
            _queues: queues,
        };
        for cpu in 0..nr_cpus {
            steer(&name, cpu)?;
        }
        // Without addresses it sends nothing by itself. The file is missing without IPv6.
        let ipv6 = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
        if Path::new(&ipv6).exists() {
            fs::write(&ipv6, "1").with_context(|| ipv6)?;
        }
        set_up(&mut request).with_context(|| format!("{name} can't be set up"))?;
        Ok(carrier)
    }
}

fn open_tun() -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .context("skb mode needs tun devices, CONFIG_TUN of the kernel: /dev/net/tun")
}

/// Lets kernel RPS put the packets of queue `cpu` into that CPU's backlog.
fn steer(name: &str, cpu: u32) -> Result<()> {
    let path = format!("/sys/class/net/{name}/queues/rx-{cpu}/rps_cpus");
    let mask: CpuMask = [cpu].into_iter().collect();
    fs::write(&path, mask.to_mask_string()).with_context(|| format!("cannot write {path}"))
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: all zeros is a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

fn name_of(request: &libc::ifreq) -> String {
    let bytes = request.ifr_name.iter().map(|&c| c as u8);
    String::from_utf8_lossy(&bytes.take_while(|&c| c != 0).collect::<Vec<_>>()).into_owned()
}

fn set_up(request: &mut libc::ifreq) -> Result<()> {
    let socket = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // SAFETY: the request outlives both calls; the kernel has written its flags before they are
    // read.
    unsafe {
        siocgifflags(socket.as_raw_fd(), request)?;
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
        siocsifflags(socket.as_raw_fd(), request)?;
    }
    Ok(())
}
