// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device of the lab and a peer of its own, which is a thread of this program: what
//! [`On`](crate::bench::experiment::On) is between two hosts.
//!
//! The peer has the generators' CPUs, or without those the CPU that polls the queue. Without a queue of
//! its own, a device receives where the peer sends: a plain veth, the loopback device.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Result, bail};

use crate::bench::experiment::DeviceKind;
use crate::bench::peer::server::Server;
use crate::bench::setup::confined::Confined;
use crate::bench::setup::testbed::{INTERRUPT_CPU, Masks};
use crate::lab::ethtool::Offload;
use crate::lab::link::{Link, LinkConfig};
use crate::lab::netns::{Netns, Thread};
use crate::lab::nic::Nic;
use crate::lab::resident::Resident;
use crate::lab::stacked::{Kind, Stacked};
use crate::lab::tun::Tunnel;

/// See the module's documentation. The peer serves until this is dropped.
pub struct Local {
    /// The namespace of the device under test.
    pub dut: Netns,
    /// The device's name.
    pub name: String,
    /// The peer's address.
    pub peer: SocketAddr,
    stop: Option<OwnedFd>,
    thread: Option<Thread<Result<()>>>,
    _tunnel: Option<Tunnel>,
    _nic: Option<Nic>,
    /// By which a veth's other end is found.
    _resident: Option<Resident>,
    /// The link below a tunnel.
    _below: Option<Link>,
}

impl Local {
    /// Makes the device and starts the peer.
    ///
    /// # Errors
    /// When the kernel does not know the kind.
    pub fn new(kind: DeviceKind, masks: &Masks) -> Result<Self> {
        let dut = Netns::new("dut")?;
        let tester = match kind {
            DeviceKind::Lo => dut.clone(),
            _ => Netns::new("tester")?,
        };
        let link = |gro| {
            let config = LinkConfig {
                gro,
                ..LinkConfig::default()
            };
            Link::new(&tester, &dut, &config)
        };
        let (mut tunnel, mut nic, mut resident, mut below) = (None, None, None, None);
        let (name, peer) = match kind {
            DeviceKind::Nic => bail!("the lab's NIC has a client of its own, without sockets"),
            DeviceKind::Plain => {
                let link = link(false)?;
                // As a new veth has it: checksums are left out.
                link.tester.ethtool.set(Offload::TxChecksum, true)?;
                resident = Some(Resident::start(&tester)?);
                (link.dut.name, link.tester.ipv4)
            }
            DeviceKind::Vxlan => {
                let link = link(true)?;
                let stacked = Stacked::new(&link, Kind::Vxlan)?;
                let polled = || Nic::new(&link.dut, &[INTERRUPT_CPU])?.before_others();
                nic = masks.apart().then(polled).transpose()?;
                below = Some(link);
                (stacked.name, stacked.peer)
            }
            DeviceKind::Tun => {
                let made = Tunnel::new(&tester, &dut, libc::IFF_TUN, INTERRUPT_CPU)?;
                let made = tunnel.insert(made);
                (made.name.clone(), made.peer)
            }
            DeviceKind::Lo => ("lo".to_owned(), Ipv4Addr::LOCALHOST),
        };
        let mut local = Self {
            dut,
            name,
            peer: SocketAddr::new(IpAddr::V4(peer), 0),
            stop: None,
            thread: None,
            _tunnel: tunnel,
            _nic: nic,
            _resident: resident,
            _below: below,
        };
        local.serve(&tester, masks)?;
        Ok(local)
    }

    fn serve(&mut self, tester: &Netns, masks: &Masks) -> Result<()> {
        let address = self.peer;
        let server = tester.run(|| Server::bind(Some(address)))?;
        self.peer = server.address()?;
        let (wait, stop) = nix::unistd::pipe()?;
        let cpus = match masks.apart() {
            true => masks.generators.clone(),
            false => masks.polling.clone(),
        };
        let serve = move || {
            let _confined = Confined::to(&cpus)?;
            server.serve(wait.as_fd(), &|_| {})
        };
        self.thread = Some(tester.spawn(None, "peer", serve)?);
        self.stop = Some(stop);
        Ok(())
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = nix::unistd::write(&stop, &[0]);
        }
        if let Some(Err(e)) = self.thread.take().map(Thread::join) {
            tracing::warn!("the peer: {e:#}");
        }
    }
}
