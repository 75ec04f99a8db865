// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loopback device in softirq mode: its packets change their CPU, arrive in order, and keep their route and
//! their entry in connection tracking.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use crate::helpers::process::Rxsteer;
use crate::helpers::transfer::{datagrams, transfer};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rxlab::lab::netns::Netns;
use rxlab::lab::stacked;
use rxlab::lab::tool::NFT;
use rxlab::testing::not_run;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, until};
use rxlab::{in_lab, test_name};
use rxsteer::host::ethtool::Ethtool;

fn traffic(netns: &Netns) -> Result<()> {
    transfer(netns, netns, Ipv4Addr::LOCALHOST)?;
    datagrams(netns, netns, Ipv4Addr::LOCALHOST.into())?;
    datagrams(netns, netns, Ipv6Addr::LOCALHOST.into())
}

fn steer(netns: &Netns, args: &[&str]) -> Result<Rxsteer> {
    let args = [&["lo", "--mode=auto", "--rps-cpus=1"], args].concat();
    Rxsteer::steering(netns, &args)
}

/// Packets were redirected, and the account closes without a loss.
fn each_counts_once(running: &Rxsteer) -> Result<()> {
    let sums = running.at_rest()?;
    ensure!(sums.redirected > 1_000, "{sums:?}");
    ensure!((sums.lost, sums.vanished) == (0, 0), "{sums:?}");
    Ok(())
}

#[test]
fn packets_of_lo_change_their_cpu() -> Result<()> {
    in_lab!();
    let netns = Netns::new("dut")?;
    for policy in ["--policy=rps", "--policy=rfs"] {
        let running = steer(&netns, &[policy])?;
        assert_eq!(running.status()?.devices[0].mode, "softirq");
        traffic(&netns)?;
        each_counts_once(&running).context(policy)?;
        let ended = running.stop(Signal::SIGTERM)?;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        traffic(&netns)?;
    }
    Ok(())
}

/// What `ethtool -K lo tso off` switches off.
const SEGMENTATION: &[&str] = &[
    "tx-tcp-segmentation",
    "tx-tcp-ecn-segmentation",
    "tx-tcp-mangleid-segmentation",
    "tx-tcp6-segmentation",
];

/// The addresses of the two ends of a tunnel.
const ENDS: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 19, 7, 1), Ipv4Addr::new(198, 19, 7, 2)];

/// As [`packets_that_are_split_are_counted_once`], with segments of a tunnel.
#[test]
fn packets_of_a_tunnel_are_counted_once() -> Result<()> {
    in_lab!();
    let netns = Netns::new("dut")?;
    let running = steer(&netns, &["--policy=rps"])?;
    let [near, far] = match stacked::over_loopback(&netns, ENDS) {
        Ok(ends) => ends,
        Err(error) => {
            not_run(test_name!(), &format!("{error:#}"));
            return Ok(());
        }
    };
    transfer(&near, &far, ENDS[1])?;
    datagrams(&far, &near, ENDS[0].into())?;
    each_counts_once(&running)
}

/// Where lo does not segment, the kernel does, behind the egress: each segment counts once.
#[test]
fn packets_that_are_split_are_counted_once() -> Result<()> {
    in_lab!();
    let netns = Netns::new("dut")?;
    let running = steer(&netns, &["--policy=rps"])?;
    netns.run(|| Ethtool::open("lo")?.set_features(SEGMENTATION, false))?;
    traffic(&netns)?;
    each_counts_once(&running)
}

/// Ports by what connection tracking does with their packets; no server is at the second one.
const TRANSLATED: u16 = 6000;
const REDIRECTED: u16 = 6001;
const UNTRACKED: u16 = 6002;
const IN_A_ZONE: u16 = 6003;
const TRACKED: u16 = 6004;

/// Limit on an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

const ROUND_TRIPS: u32 = 100;

/// The rules of `input` drop packets that have lost what those of `output` have decided.
fn rules() -> String {
    format!(
        "
table inet proxy {{
	chain nat {{
		type nat hook output priority -100
		meta l4proto {{ tcp, udp }} th dport {REDIRECTED} redirect to :{TRANSLATED}
	}}
	chain output {{
		type filter hook output priority raw
		meta l4proto {{ tcp, udp }} th dport {UNTRACKED} notrack
		meta l4proto {{ tcp, udp }} th sport {UNTRACKED} notrack
		meta l4proto {{ tcp, udp }} th dport {IN_A_ZONE} ct zone set 7
		meta l4proto {{ tcp, udp }} th sport {IN_A_ZONE} ct zone set 7
	}}
	chain input {{
		type filter hook input priority filter
		meta l4proto {{ tcp, udp }} th dport {UNTRACKED} ct state != untracked drop
		meta l4proto {{ tcp, udp }} th sport {UNTRACKED} ct state != untracked drop
		meta l4proto {{ tcp, udp }} th dport {IN_A_ZONE} ct zone != 7 drop
		meta l4proto {{ tcp, udp }} th sport {IN_A_ZONE} ct zone != 7 drop
		meta l4proto {{ tcp, udp }} th dport {TRACKED} ct state != {{ new, established }} drop
	}}
}}
"
    )
}

/// Sends each of the numbers to `port`, over TCP and UDP, and waits for its answer from `server`.
fn round_trips(netns: &Netns, at: IpAddr, port: u16, server: u16) -> Result<()> {
    let (listener, sink) = netns.run(|| {
        Ok((
            TcpListener::bind((at, server))?,
            UdpSocket::bind((at, server))?,
        ))
    })?;
    sink.set_read_timeout(Some(TIMEOUT))?;
    let client = netns.spawn(Some(POLLING_CPU), "client", move || {
        let socket = UdpSocket::bind((at, 0))?;
        socket.connect((at, port))?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let mut stream = TcpStream::connect_timeout(&(at, port).into(), TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_nodelay(true)?;
        for number in 0..ROUND_TRIPS {
            let (sent, mut answer) = (number.to_be_bytes(), [0; 4]);
            stream.write_all(&sent)?;
            stream.read_exact(&mut answer).context("TCP")?;
            ensure!(answer == sent, "TCP: {answer:?} instead of {sent:?}");
            socket.send(&sent)?;
            socket.recv(&mut answer).context("UDP")?;
            ensure!(answer == sent, "UDP: {answer:?} instead of {sent:?}");
        }
        anyhow::Ok(())
    })?;
    netns.spawn(Some(OTHER_CPU), "server", move || {
        listener.set_nonblocking(true)?;
        let (mut stream, _) = until("TCP connects", || Ok(listener.accept().ok()))?;
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let mut bytes = [0; 4];
        while stream.read_exact(&mut bytes).is_ok() {
            stream.write_all(&bytes)?;
            let (_, from) = sink.recv_from(&mut bytes)?;
            sink.send_to(&bytes, from)?;
        }
        anyhow::Ok(())
    })?;
    client.join()
}

/// Packets of lo bring their entry in connection tracking.
#[test]
fn packets_keep_their_entry_in_connection_tracking() -> Result<()> {
    in_lab!();
    let netns = Netns::new("dut")?;
    if let Err(error) = NFT.run(&netns, &["-f", "-"], &rules()) {
        not_run(test_name!(), &format!("{error:#}"));
        return Ok(());
    }
    let addresses: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let flows = [
        (REDIRECTED, TRANSLATED),
        (UNTRACKED, UNTRACKED),
        (IN_A_ZONE, IN_A_ZONE),
        (TRACKED, TRACKED),
    ];
    let each = |run: &dyn Fn(IpAddr, u16, u16) -> Result<()>| {
        let all = addresses
            .iter()
            .flat_map(|at| flows.map(|(port, server)| (*at, port, server)));
        let failed: Vec<String> = all
            .filter_map(|(at, port, server)| {
                let error = run(at, port, server).err()?;
                Some(format!("{at}, port {port}: {error:#}"))
            })
            .collect();
        ensure!(failed.is_empty(), "{failed:#?}");
        Ok(())
    };
    each(&|at, port, server| round_trips(&netns, at, port, server))?;
    let running = steer(&netns, &["--policy=rps"])?;
    each(&|at, port, server| {
        let before = running.at_rest()?;
        round_trips(&netns, at, port, server)?;
        let after = running.at_rest()?;
        let redirected = after.redirected - before.redirected;
        ensure!(
            redirected > u64::from(ROUND_TRIPS),
            "{redirected} packets were redirected"
        );
        ensure!(after.vanished == before.vanished, "{after:?}");
        Ok(())
    })?;
    let ended = running.stop(Signal::SIGTERM)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    Ok(())
}
