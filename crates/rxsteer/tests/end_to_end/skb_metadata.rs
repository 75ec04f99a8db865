// SPDX-License-Identifier: MIT OR Apache-2.0
//! What packets carry beside their bytes comes through a hop in softirq mode: the id of the NAPI instance,
//! VLAN tags and time stamps. (That checksum verdicts do is shown in softirq.rs, hashes in rx_hash.rs.)

use std::ffi::c_int;
use std::io::{self, IoSliceMut};
use std::mem::size_of_val;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};

use crate::helpers::process::Rxsteer;
use crate::helpers::watch::packets;
use anyhow::{Result, bail, ensure};
use etherparse::PacketBuilder;
use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::socket::sockopt::Timestamping;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, TimestampingFlag, recvmsg, setsockopt};
use nix::sys::time::TimeSpec;
use rxlab::in_lab;
use rxlab::lab::filter::clear_cb;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::link::{End, LinkConfig};
use rxlab::lab::option;
use rxlab::lab::stamped::{self, Stamps};
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, until};
use rxsteer::host::polling;
use socket2::Socket;

/// Few enough for a socket's default buffer: a frame takes some 4 kB.
const NR_FRAMES: u64 = 20;

/// Steers all packets to [`OTHER_CPU`].
fn steer(dut: &End, mode: &str) -> Result<Rxsteer> {
    let cpus = format!("--rps-cpus={OTHER_CPU}");
    let mode = format!("--mode={mode}");
    Rxsteer::steering(&dut.netns, &[&dut.name, &mode, "--policy=rps", &cpus])
}

/// A batch of these flows' packets.
fn sent<'a>(bed: &'a Testbed, flows: &UdpFlows) -> impl Fn() -> Result<()> + use<'a> {
    let frames = Frames::Udp(flows.clone());
    move || bed.send(frames.clone(), NR_FRAMES)
}

/// Sends until all packets of a batch hop: the first ones find no proof that those before them have
/// been delivered, or no backlog. `look` sees each batch from before its first packet.
fn all_hop<T>(
    running: &Rxsteer,
    send: impl Fn() -> Result<()>,
    look: impl Fn() -> Result<T>,
) -> Result<T> {
    until("all packets of a batch hop", || {
        let before = (running.received()?, running.at_rest()?.redirected);
        let looked = look()?;
        send()?;
        until("all were received", || {
            Ok((running.received()? >= before.0 + NR_FRAMES).then_some(()))
        })?;
        let nr_hops = running.at_rest()?.redirected - before.1;
        Ok((nr_hops == NR_FRAMES).then_some(looked))
    })
}

/// The id that a socket finds at its last packet.
fn napi_id(bed: &Testbed, running: &Rxsteer) -> Result<Option<u32>> {
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 1);
    let socket = dut.netns.run(|| {
        let socket = UdpSocket::bind((dut.ipv4, flows.dport))?;
        // Only a connected socket takes the id along (sk_mark_napi_id() in include/net/busy_poll.h).
        socket.connect((flows.saddr, flows.sport))?;
        Ok(socket)
    })?;
    all_hop(running, sent(bed, &flows), || Ok(()))?;
    socket.set_nonblocking(true)?;
    while socket.recv(&mut [0; 2048]).is_ok() {}
    Ok(polling::napi_id(&socket)?)
}

#[test]
fn the_napi_id_is_kept() -> Result<()> {
    in_lab!(napi);
    let bed = Testbed::new(&LinkConfig::default())?;
    let mut found = Vec::new();
    for mode in ["softirq", "native"] {
        let running = steer(&bed.link.dut, mode)?;
        found.push(napi_id(&bed, &running)?);
        ensure!(running.stop(Signal::SIGTERM)?.code == Some(0));
    }
    // The control: a hop in native mode loses it.
    ensure!(found[0].is_some() && found[1].is_none(), "{found:?}");
    Ok(())
}

/// Sees the packets of a device, each time that the device has them. Its filter clears `skb->cb`, where
/// what comes next finds no note on the packet.
struct Capture(Socket);

impl Capture {
    fn on(end: &End) -> Result<Self> {
        let socket = packets(end, libc::ETH_P_ALL, &[])?;
        let on: c_int = 1;
        option::set(&socket, libc::SOL_PACKET, libc::PACKET_AUXDATA, &on)?;
        clear_cb(&socket)?;
        Ok(Self(socket))
    }

    /// The VLAN id beside the next packet; `None` if none is left, `Some(None)` without a tag.
    fn next(&self) -> Result<Option<Option<u16>>> {
        /// `struct tpacket_auxdata` (linux/if_packet.h), after a header of 16 bytes.
        const STATUS: usize = 16;
        const TCI: usize = STATUS + 16;
        const TP_STATUS_VLAN_VALID: u32 = 1 << 4;
        let (mut packet, mut control) = ([0u8; 2048], [0u64; 8]);
        let mut data = libc::iovec {
            iov_base: packet.as_mut_ptr().cast(),
            iov_len: packet.len(),
        };
        // SAFETY: an all-zero header is valid, and its buffers outlive the call.
        let received = unsafe {
            let mut header: libc::msghdr = std::mem::zeroed();
            header.msg_iov = &mut data;
            header.msg_iovlen = 1;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = size_of_val(&control);
            libc::recvmsg(self.0.as_raw_fd(), &mut header, 0)
        };
        match Errno::result(received) {
            Err(Errno::EAGAIN) => return Ok(None),
            received => received.map_err(io::Error::from)?,
        };
        let bytes: Vec<u8> = control.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let status = u32::from_ne_bytes(bytes[STATUS..STATUS + 4].try_into()?);
        let tci = u16::from_ne_bytes(bytes[TCI..TCI + 2].try_into()?);
        Ok(Some(
            (status & TP_STATUS_VLAN_VALID != 0).then_some(tci & 0xfff),
        ))
    }
}

/// The kernel takes the tag out of the frame before tc. A capture sees each packet once, and none is lost
/// behind it.
#[test]
fn vlan_tags_are_kept() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let running = steer(&bed.link.dut, "softirq")?;
    let flows = UdpFlows::to(&bed.link.dut, 4);
    // Nothing is sent back, which the capture would see too.
    let netns = &bed.link.dut.netns;
    let _socket = netns.run(|| Ok(UdpSocket::bind((flows.daddr, flows.dport))?))?;
    // The control: frames without a tag have none.
    for tag in [Some(7), None] {
        let flows = UdpFlows {
            tags: tag.map(|id| (0x8100, id)).into_iter().collect(),
            ..flows.clone()
        };
        let capture = all_hop(&running, sent(&bed, &flows), || Capture::on(&bed.link.dut))?;
        let mut seen = Vec::new();
        while let Some(vlan) = capture.next()? {
            seen.push(vlan);
        }
        ensure!(seen.len() as u64 == NR_FRAMES, "{tag:?}: {seen:?}");
        ensure!(seen.iter().all(|vlan| *vlan == tag), "{tag:?}: {seen:?}");
    }
    ensure!(running.stop(Signal::SIGTERM)?.code == Some(0));
    Ok(())
}

/// Asks for the time stamps of software and hardware.
fn ask_for_stamps(socket: &impl AsFd) -> Result<()> {
    let stamps = TimestampingFlag::SOF_TIMESTAMPING_RX_SOFTWARE
        | TimestampingFlag::SOF_TIMESTAMPING_SOFTWARE
        | TimestampingFlag::SOF_TIMESTAMPING_RX_HARDWARE
        | TimestampingFlag::SOF_TIMESTAMPING_RAW_HARDWARE;
    Ok(setsockopt(socket, Timestamping, &stamps)?)
}

/// The stamps of all packets that wait at a socket, in order. The kernel makes none when a packet is
/// read, as it does for SO_TIMESTAMP (`__sock_recv_timestamp()` in net/socket.c).
fn stamps_at(socket: &impl AsRawFd) -> Result<Vec<Stamps>> {
    let ns = |time: TimeSpec| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64;
    let mut all = Vec::new();
    loop {
        let (mut packet, mut control) = ([0u8; 2048], [0u8; 256]);
        let mut data = [IoSliceMut::new(&mut packet)];
        let received = recvmsg::<()>(
            socket.as_raw_fd(),
            &mut data,
            Some(&mut control),
            MsgFlags::MSG_DONTWAIT,
        );
        let received = match received {
            Err(Errno::EAGAIN) => return Ok(all),
            received => received?,
        };
        let mut stamps = Stamps {
            software: 0,
            hardware: 0,
        };
        for message in received.cmsgs()? {
            if let ControlMessageOwned::ScmTimestampsns(found) = message {
                stamps.software = ns(found.system);
                stamps.hardware = ns(found.hw_raw);
            }
        }
        all.push(stamps);
    }
}

/// An application that asks for time stamps.
fn application(dut: &End, flows: &UdpFlows) -> Result<UdpSocket> {
    let socket = dut
        .netns
        .run(|| Ok(UdpSocket::bind((flows.daddr, flows.dport))?))?;
    ask_for_stamps(&socket)?;
    Ok(socket)
}

/// No device of the lab has them: a program gives packets the stamps.
#[test]
fn hardware_time_stamps_are_kept() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let running = steer(dut, "softirq")?;
    let flows = UdpFlows::to(dut, 1);
    let (IpAddr::V4(saddr), IpAddr::V4(daddr)) = (flows.saddr, flows.daddr) else {
        bail!("flows of IPv4");
    };
    let builder = PacketBuilder::ethernet2(flows.smac, flows.dmac)
        .ipv4(saddr.octets(), daddr.octets(), 64)
        .udp(flows.sport, flows.dport);
    let mut frame = Vec::new();
    builder.write(&mut frame, b"stamped")?;

    let stamps = |hardware| {
        let stamp = |i| Stamps {
            software: 1_600_000_000_000_000_000 + i,
            hardware: (hardware + i) * u64::from(hardware > 0),
        };
        (0..NR_FRAMES).map(stamp).collect::<Vec<_>>()
    };
    // The control: packets without a hardware stamp have none.
    for given in [stamps(1_500_000_000_000_000_000), stamps(0)] {
        let send = || stamped::send(dut, POLLING_CPU, &frame, &given);
        let socket = all_hop(&running, send, || application(dut, &flows))?;
        let read = stamps_at(&socket)?;
        ensure!(read == given, "{read:?} {given:?}");
    }
    ensure!(running.stop(Signal::SIGTERM)?.code == Some(0));
    Ok(())
}
