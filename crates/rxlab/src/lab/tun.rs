// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two tun or tap devices, joined as by a VPN's daemon: a thread for each direction writes to one
//! what the other sends.

use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::net::if_::if_nametoindex;
use rxsteer::host::tun::Queue;
use rxsteer::host::wait::readable;

use super::netns::{Netns, Thread};
use super::rtnl;

/// Largest packet that a device of the default MTU sends, with its Ethernet header.
const PACKET_MAX: usize = 1514;

/// Time between looks whether to stop.
const LOOK: Duration = Duration::from_millis(50);

/// See the module's documentation. They end when this is dropped.
pub struct Tunnel {
    /// The device in the second namespace.
    pub name: String,
    /// Its address, with that of the first in one subnet.
    pub ipv4: Ipv4Addr,
    /// The first one's address.
    pub peer: Ipv4Addr,
    stop: Arc<AtomicBool>,
    /// The first one writes to the second device.
    threads: Vec<Thread<()>>,
}

impl Tunnel {
    /// `kind`: `IFF_TUN` or `IFF_TAP`. `cpu`: where the packets are written, and so received.
    ///
    /// # Errors
    /// The kernel has no tun devices, or the CPU is offline.
    pub fn new(tester: &Netns, dut: &Netns, kind: libc::c_int, cpu: u32) -> Result<Self> {
        let [near, far] = [1, 2].map(|host| Ipv4Addr::new(198, 19, 255, host));
        let (first, second) = (end(tester, kind, far)?, end(dut, kind, near)?);
        let mut tunnel = Self {
            name: second.name.clone(),
            ipv4: near,
            peer: far,
            stop: Arc::default(),
            threads: Vec::new(),
        };
        let (first, second) = (Arc::new(first), Arc::new(second));
        tunnel.pass(dut, cpu, first.clone(), second.clone())?;
        tunnel.pass(tester, cpu, second, first)?;
        Ok(tunnel)
    }

    /// Writes packets to the second device on another CPU, where it then receives them.
    ///
    /// # Errors
    /// The CPU is offline.
    pub fn move_to(&self, cpu: u32) -> Result<()> {
        self.threads[0].move_to(cpu)
    }

    fn pass(&mut self, to_netns: &Netns, cpu: u32, from: Arc<Queue>, to: Arc<Queue>) -> Result<()> {
        let stop = self.stop.clone();
        let thread = to_netns.spawn(Some(cpu), "tunnel", move || {
            let mut packet = [0; PACKET_MAX];
            while !stop.load(Ordering::Relaxed) {
                if !readable(&[from.file.as_fd()], Some(LOOK)).is_ok_and(|ready| ready[0]) {
                    continue;
                }
                // What can't be written is lost, as on a network.
                if let Ok(n) = (&from.file).read(&mut packet) {
                    let _ = (&to.file).write(&packet[..n]);
                }
            }
        })?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join();
        }
    }
}

fn end(netns: &Netns, kind: libc::c_int, address: Ipv4Addr) -> Result<Queue> {
    netns.run(|| {
        let queue = Queue::open("tunnel%d", kind)?;
        let ifindex = if_nametoindex(queue.name.as_str())?;
        rtnl::run(async |handle| {
            let address = handle.address().add(ifindex, address.into(), 24);
            address.execute().await
        })?
        .with_context(|| format!("{} takes no address", queue.name))?;
        queue.set_up()?;
        Ok(queue)
    })
}
