// SPDX-License-Identifier: MIT OR Apache-2.0
//! The carrier: a device through which skbs change their CPU. Packets that are redirected to its
//! ingress, with N as their receive queue, are put into the softnet backlog of CPU N by kernel RPS.
//!
//! It is a tun or tap device that nothing writes to or reads from: the kernel removes it with this
//! process, however the process ends.

use std::path::Path;

use anyhow::{Result, ensure};
use nix::net::if_::if_nametoindex;

use super::cpumask::CpuMask;
use super::tun::Queue;
use super::tunable::Tunables;

/// Most queues of a tun device (MAX_TAP_QUEUES in drivers/net/tun.c).
const MOST_CPUS: u32 = 256;

/// See the module's documentation.
#[derive(Debug)]
pub struct Carrier {
    /// Interface index.
    pub ifindex: u32,
    /// One for each queue.
    _queues: Vec<Queue>,
}

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
        let queue = Queue::open("rxsteer%d", kind | libc::IFF_MULTI_QUEUE)?;
        let name = queue.name.clone();
        let more = (1..nr_cpus).map(|_| queue.another());
        let mut queues = more.collect::<Result<Vec<_>>>()?;
        let sys = Tunables::sys();
        for cpu in 0..nr_cpus {
            // Lets kernel RPS put the packets of this queue into this CPU's backlog.
            let path = format!("class/net/{name}/queues/rx-{cpu}/rps_cpus");
            let mask: CpuMask = [cpu].into_iter().collect();
            sys.write(&path, &mask.to_mask_string())?;
        }
        // Without addresses it sends nothing by itself.
        if Path::new("/proc/sys/net/ipv6/conf").exists() {
            let path = format!("sys/net/ipv6/conf/{name}/disable_ipv6");
            Tunables::proc().write(&path, "1")?;
        }
        queue.set_up()?;
        queues.push(queue);
        Ok(Self {
            ifindex: if_nametoindex(name.as_str())?,
            _queues: queues,
        })
    }
}
