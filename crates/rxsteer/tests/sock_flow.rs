// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sockets that may write entries of the sock_flow_table.

use std::io::{self, Write};
use std::mem::{size_of, zeroed};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, unshare};
use nix::unistd::Pid;
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::netns::Netns;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, until};
use rxsteer::api::client;
use rxsteer::api::explain::{Application, Name, Question};
use rxsteer::daemon::options::Options;
use rxsteer::datapath::flow::Flow;
use rxsteer::datapath::policy::Policy;

const ROOT: u32 = 0;
const NOBODY: u32 = 65534;

const TCP: u8 = libc::IPPROTO_TCP as u8;
const UDP: u8 = libc::IPPROTO_UDP as u8;

/// The peer of the sockets in [`Elsewhere`], which does not exist.
const PEER: (Ipv4Addr, u16) = (Ipv4Addr::new(198, 18, 9, 9), 4000);
const LOCAL_PORT: u16 = 5009;

/// The flow's entry in the table, as `explain` reads it.
fn application(netns: &Netns, flow: &Flow) -> Result<Application> {
    let question = Question {
        names: vec![Name::Flow(*flow)],
        limit: 1,
        ..Question::default()
    };
    let answer = netns.run(|| client::explain(question))?;
    let [flow] = &answer.flows[..] else {
        anyhow::bail!("one flow, not {answer:?}");
    };
    Ok(flow.application.clone())
}

/// A process in a network namespace of its own with a socket that is connected to [`PEER`] and has
/// sent to it.
struct Elsewhere(Child);

impl Elsewhere {
    /// Made by user `uid` on `cpu`. A network namespace belongs to the user namespace in which it
    /// is made: with `user_namespace`, a new one, in which every user may make one.
    fn new(uid: u32, user_namespace: bool, cpu: u32) -> Result<Self> {
        let mut flags = CloneFlags::CLONE_NEWNET;
        flags.set(CloneFlags::CLONE_NEWUSER, user_namespace);
        let mut cpus = CpuSet::new();
        cpus.set(cpu as usize)?;
        let mut command = Command::new("cat"); // until its input ends
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        // SAFETY: the closure makes system calls only, between fork and exec.
        unsafe {
            command.pre_exec(move || {
                sched_setaffinity(Pid::from_raw(0), &cpus)?;
                Errno::result(libc::setresuid(uid, uid, uid))?;
                unshare(flags)?;
                send_from_here()
            });
        }
        let child = command.spawn();
        Ok(Self(child.context("a socket in another namespace")?))
    }

    fn end(mut self) -> Result<()> {
        drop(self.0.stdin.take());
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn address(ip: Ipv4Addr, port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: ip.to_bits().to_be(),
        },
        sin_zero: [0; 8],
    }
}

/// Gives `lo` the peer's address, for a route, and connects a socket, which exec() leaves open.
/// Async-signal-safe.
fn send_from_here() -> io::Result<()> {
    let (peer, local) = (
        address(PEER.0, PEER.1),
        address(Ipv4Addr::UNSPECIFIED, LOCAL_PORT),
    );
    let len = size_of::<libc::sockaddr_in>() as u32;
    // SAFETY: the structures outlive the calls; an ifreq of zeros is valid, and an address fits.
    unsafe {
        let socket = Errno::result(libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0))?;
        let mut lo: libc::ifreq = zeroed();
        lo.ifr_name[0] = b'l' as libc::c_char;
        lo.ifr_name[1] = b'o' as libc::c_char;
        (&raw mut lo.ifr_ifru)
            .cast::<libc::sockaddr_in>()
            .write(peer);
        Errno::result(libc::ioctl(socket, libc::SIOCSIFADDR, &raw const lo))?;
        lo.ifr_ifru.ifru_flags = libc::IFF_UP as i16;
        Errno::result(libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw const lo))?;
        Errno::result(libc::bind(socket, (&raw const local).cast(), len))?;
        Errno::result(libc::connect(socket, (&raw const peer).cast(), len))?;
        Errno::result(libc::send(socket, c"x".as_ptr().cast(), 1, 0))?;
    }
    Ok(())
}

/// Senders of datagrams to local port `port` whose flows have the same entry of the table as `flow`.
fn senders(netns: &Netns, flow: &Flow, port: u16) -> Result<Vec<SocketAddr>> {
    let senders = (20_000..24_000).map(|sender| SocketAddr::from((Ipv4Addr::LOCALHOST, sender)));
    let names: Vec<_> = senders
        .map(|sender| Name::Flow(Flow::of_socket(UDP, sender, port)))
        .collect();
    let question = Question {
        limit: names.len(),
        names,
        ..Question::default()
    };
    let answer = netns.run(|| client::explain(question))?;
    let entry = application(netns, flow)?.entry;
    let same = answer.flows.iter().filter(|e| e.application.entry == entry);
    let senders = same.filter_map(|e| match e.flow {
        Some(Flow::Ports { remote, .. }) => Some(remote),
        _ => None,
    });
    Ok(senders.collect())
}

/// Datagrams with made-up senders don't take the entry of a connection, but for one in 1024.
#[test]
fn datagrams_do_not_take_the_entry_of_a_connection() -> Result<()> {
    const ROUNDS: usize = 200;
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let netns = &bed.link.dut.netns;
    // So few that many senders share one, so many that other flows of the host hardly do.
    let options = Options {
        rps_sock_flow_entries: 256,
        ..rfs(&bed)
    };
    let active = Active::steer(&bed.link.dut, options)?;
    let has_entry = |flow: &Flow| Ok::<_, anyhow::Error>(application(netns, flow)?.cpu.is_some());
    netns.run(|| {
        // A socket that threads on several CPUs read would not be recorded.
        let mut cpus = CpuSet::new();
        cpus.set(OTHER_CPU as usize)?;
        sched_setaffinity(Pid::from_raw(0), &cpus)?;

        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let connect = || {
            let client = TcpStream::connect(listener.local_addr()?)?;
            let port = client.local_addr()?.port();
            let flow = Flow::of_socket(TCP, listener.local_addr()?, port);
            Ok::<_, anyhow::Error>((client, flow))
        };
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let to = server.local_addr()?;
        let (mut client, connection) = connect()?;
        let sharing = senders(netns, &connection, to.port())?;
        let mut next = sharing.iter().cycle();
        // The server receives a datagram.
        let mut datagram = || -> Result<Flow> {
            let from = *next.next().context("a sender")?;
            UdpSocket::bind(from)?.send_to(b"x", to)?;
            assert_eq!(server.recv_from(&mut [0; 8])?.1, from);
            Ok(Flow::of_socket(UDP, from, to.port()))
        };
        assert!(has_entry(&datagram()?)?, "the entry was free");
        assert!(has_entry(&datagram()?)?, "and that of a datagram");

        let mut kept = 0;
        for _ in 0..ROUNDS {
            client.write_all(b"x")?;
            assert!(has_entry(&connection)?, "a connection takes every entry");
            datagram()?;
            kept += u32::from(has_entry(&connection)?);
        }
        // 199.8 are expected; chance gives less than 190 in one of 10^13 runs.
        assert!(kept >= 190, "{kept} of {ROUNDS}");

        // A connection that is not used any more does not keep it for ever.
        until("a datagram has the entry", || {
            Ok(has_entry(&datagram()?)?.then_some(()))
        })?;
        // The entry of a closed one is free at once.
        client.write_all(b"x")?;
        assert!(has_entry(&connection)?);
        drop(client);
        assert!(!has_entry(&connection)?);
        assert!(has_entry(&datagram()?)?);

        // The control: sockets that are connected take the entries of others.
        let (mut client, connection) = connect()?;
        client.write_all(b"x")?;
        assert!(has_entry(&connection)?);
        let sharing = senders(netns, &connection, to.port())?;
        server.connect(sharing.first().context("a sender")?)?;
        server.send(b"x")?;
        assert!(!has_entry(&connection)?);
        Ok(())
    })?;
    active.stop()
}

/// Policy rfs alone, on the test's link.
fn rfs(bed: &Testbed) -> Options {
    Options {
        policy: Policy::RFS,
        ..bed.options(&[POLLING_CPU])
    }
}

/// Sockets of a network namespace that root has made write entries, and remove them by closing; a user in a
/// namespace of his own may do neither.
#[test]
fn a_user_can_not_write_entries_of_others() -> Result<()> {
    in_lab!();
    if let Err(e) = Elsewhere::new(NOBODY, true, POLLING_CPU) {
        let reason = format!("users can't make namespaces here: {e:#}");
        rxlab::testing::not_run(rxlab::test_name!(), &reason);
        return Ok(());
    }
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let active = Active::steer(dut, rfs(&bed))?;
    let peer = SocketAddr::from(PEER);
    let flow = Flow::of_socket(UDP, peer, LOCAL_PORT);
    let cpu = || Ok::<_, anyhow::Error>(application(&dut.netns, &flow)?.cpu);

    let user = Elsewhere::new(NOBODY, true, OTHER_CPU)?;
    assert_eq!(cpu()?, None, "a user has written it");

    // The controls, one of them as a container with users of its own.
    for user_namespace in [true, false] {
        let root = Elsewhere::new(ROOT, user_namespace, POLLING_CPU)?;
        assert_eq!(cpu()?, Some(POLLING_CPU), "{user_namespace}");
        let second = Elsewhere::new(NOBODY, true, OTHER_CPU)?;
        assert_eq!(cpu()?, Some(POLLING_CPU), "a user has changed it");
        second.end()?;
        assert_eq!(cpu()?, Some(POLLING_CPU), "a user has removed it");
        root.end()?;
        assert_eq!(cpu()?, None, "closed");
    }
    user.end()?;
    active.stop()
}
