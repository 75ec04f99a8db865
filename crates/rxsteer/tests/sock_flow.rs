// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who may write the entries of the sock_flow_table.

use std::io;
use std::mem::{size_of, zeroed};
use std::net::Ipv4Addr;
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
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed};
use rxsteer::api::client;
use rxsteer::api::explain::{Application, Question};
use rxsteer::daemon::options::Options;
use rxsteer::datapath::policy::Policy;

const ROOT: u32 = 0;
const NOBODY: u32 = 65534;

/// The flow of the sockets in [`Elsewhere`]: its peer's address is made up.
const FLOW: &str = "udp/198.18.9.9:4000/5009";
const PEER: (Ipv4Addr, u16) = (Ipv4Addr::new(198, 18, 9, 9), 4000);
const LOCAL_PORT: u16 = 5009;

/// The flow's entry in the table, as `explain` reads it.
fn application(netns: &Netns, flow: &str) -> Result<Application> {
    let question = Question {
        names: vec![flow.parse()?],
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

/// Policy rfs alone, on the test's link.
fn rfs(bed: &Testbed) -> Options {
    Options {
        policy: Policy::RFS,
        ..bed.options(&[POLLING_CPU])
    }
}

/// Whose network namespace root has made may write entries, and remove them by closing; a user in a
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
    let cpu = || Ok::<_, anyhow::Error>(application(&dut.netns, FLOW)?.cpu);

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
