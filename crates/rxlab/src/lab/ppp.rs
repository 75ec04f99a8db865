// SPDX-License-Identifier: MIT OR Apache-2.0
//! A PPPoE session over a link, as a subscriber's, without discovery and without the protocols by
//! which a PPP daemon negotiates.

use std::fs::{File, OpenOptions};
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use nix::net::if_::if_nametoindex;
use rtnetlink::LinkUnspec;
use socket2::{Domain, SockAddr, Socket, Type};

use super::link::{End, Link};
use super::netns::Netns;
use super::rtnl;

/// Prefix length of the subnet.
const PREFIX: u8 = 24;

/// The session's number.
const SESSION: u16 = 7;

/// The MTU of Ethernet without the headers of PPPoE (RFC 2516, section 7), bytes.
const MTU: u32 = 1492;

// linux/ppp-ioctl.h
nix::ioctl_read!(pppiocgchan, b't', 55, libc::c_int);
nix::ioctl_write_ptr!(pppiocattchan, b't', 56, libc::c_int);
nix::ioctl_write_ptr!(pppiocconnect, b't', 58, libc::c_int);
nix::ioctl_readwrite!(pppiocnewunit, b't', 62, libc::c_int);

/// `struct sockaddr_pppox` of linux/if_pppox.h, with the address of PPPoE.
#[repr(C, packed)]
struct Address {
    family: libc::sa_family_t,
    /// PPPoE is 0.
    protocol: libc::c_uint,
    /// Big-endian.
    session: u16,
    remote: [u8; 6],
    device: [libc::c_char; libc::IFNAMSIZ],
}

/// See the module's documentation. Its devices are there until this is dropped.
pub struct Session {
    /// The device in the namespace under test.
    pub name: String,
    /// Its address, with that of the tester in one subnet.
    pub ipv4: Ipv4Addr,
    _ends: [Unit; 2],
}

/// A device, and what it stands on.
struct Unit {
    name: String,
    _session: Socket,
    _channel: File,
    _unit: File,
}

impl Session {
    /// Makes a device on each end of the link.
    ///
    /// # Errors
    /// The kernel has no PPPoE.
    pub fn new(link: &Link) -> Result<Self> {
        let [near, far] = [1, 2].map(|host| Ipv4Addr::new(198, 19, 252, host));
        let (dut, tester) = (&link.dut, &link.tester);
        let ends = [Unit::new(dut, tester, near)?, Unit::new(tester, dut, far)?];
        Ok(Self {
            name: ends[0].name.clone(),
            ipv4: near,
            _ends: ends,
        })
    }
}

impl Unit {
    fn new(end: &End, other: &End, ipv4: Ipv4Addr) -> Result<Self> {
        let unit = end.netns.run(|| Self::attach(end, other))?;
        unit.configure(&end.netns, ipv4)
            .with_context(|| format!("cannot set {} up", unit.name))?;
        Ok(unit)
    }

    fn attach(end: &End, other: &End) -> Result<Self> {
        let session = connected(end, other).context("the kernel needs CONFIG_PPPOE")?;
        let mut number = 0;
        // SAFETY: the numbers outlive the calls, which read or write one each.
        unsafe {
            pppiocgchan(session.as_raw_fd(), &mut number)?;
            let channel = open()?;
            pppiocattchan(channel.as_raw_fd(), &number)?;
            let unit = open()?;
            number = -1; // any free one
            pppiocnewunit(unit.as_raw_fd(), &mut number)?;
            pppiocconnect(channel.as_raw_fd(), &number)?;
            Ok(Self {
                name: format!("ppp{number}"),
                _session: session,
                _channel: channel,
                _unit: unit,
            })
        }
    }

    fn configure(&self, netns: &Netns, ipv4: Ipv4Addr) -> Result<()> {
        netns.run(|| {
            let index = if_nametoindex(self.name.as_str())?;
            rtnl::run(async |handle| {
                let up = LinkUnspec::new_with_index(index).mtu(MTU).up();
                handle.link().set(up.build()).execute().await?;
                let address = handle.address().add(index, ipv4.into(), PREFIX);
                address.execute().await
            })??;
            Ok(())
        })
    }
}

fn open() -> Result<File> {
    let path = "/dev/ppp";
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.context(path)
}

/// The socket of the session with the other end.
fn connected(end: &End, other: &End) -> Result<Socket> {
    let session = Socket::new(Domain::from(libc::AF_PPPOX), Type::STREAM, None)?;
    let mut device = [0; libc::IFNAMSIZ];
    for (to, from) in device.iter_mut().zip(end.name.bytes()) {
        *to = from as libc::c_char;
    }
    let address = Address {
        family: libc::AF_PPPOX as libc::sa_family_t,
        protocol: 0,
        session: SESSION.to_be(),
        remote: other.mac,
        device,
    };
    // SAFETY: an `Address` fits into the storage, and the length is its size.
    let ((), address) = unsafe {
        SockAddr::try_init(|storage, length| {
            storage.cast::<Address>().write_unaligned(address);
            *length = size_of::<Address>() as libc::socklen_t;
            Ok(())
        })
    }?;
    session.connect(&address)?;
    Ok(session)
}
