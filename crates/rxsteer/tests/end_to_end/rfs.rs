// SPDX-License-Identifier: MIT OR Apache-2.0
//! Flows follow their applications, on real packets.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result};
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::lab::receiver::choose_by_cpu;
use rxlab::lab::sockets::reuseport;
use rxlab::testing::app::{App, connected, soon};
use rxlab::testing::testbed::{
    OTHER_CPU, POLLING_CPU, Testbed, all_at, follows, follows_not, follows_until_it_ends, mask,
    places, status, until,
};
use rxsteer::api::client;
use rxsteer::api::explain::{Name, Question};
use rxsteer::api::flows::Location;
use rxsteer::api::set::Change;
use rxsteer::daemon::options::{Options, RpsCpus};
use rxsteer::datapath::flow::Flow;
use rxsteer::datapath::policy::Policy;
use socket2::SockRef;

/// RPS alone sends all flows to the other CPU. The polling one needs not be in the mask.
fn rfs(bed: &Testbed) -> Options {
    Options {
        policy: Policy::RFS,
        ..bed.options(&[OTHER_CPU])
    }
}

/// The flow follows with policy rfs and not with rps.
fn only_by_rfs(bed: &Testbed, app: &App, mut send: impl FnMut() -> Result<()>) -> Result<()> {
    let dut = &bed.link.dut;
    let options = rfs(bed);
    let active = Active::steer(dut, options.clone())?;
    follows(&active, app, &mut send)?;
    active.stop()?;

    let options = Options {
        policy: Policy::RPS,
        ..options
    };
    let active = Active::steer(dut, options)?;
    follows_not(&active, app, &mut send)?;
    active.stop()
}

fn one(flows: UdpFlows) -> UdpFlows {
    UdpFlows {
        nr_flows: 1,
        ..flows
    }
}

#[test]
fn connected_udp() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig {
        ipv6: true,
        ..Default::default()
    })?;
    let dut = &bed.link.dut;
    for (flows, mapped) in [
        (UdpFlows::to(dut, 1), false),
        (UdpFlows::to(dut, 1), true),
        (UdpFlows::to_ipv6(dut, 1), false),
    ] {
        let map = |addr: IpAddr| match addr {
            IpAddr::V4(v4) if mapped => v4.to_ipv6_mapped().into(),
            other => other,
        };
        let socket = dut.netns.run(|| {
            let socket = UdpSocket::bind(SocketAddr::new(map(flows.daddr), flows.dport))?;
            socket.connect(SocketAddr::new(map(flows.saddr), flows.sport))?;
            soon(socket)
        })?;
        let mut buffer = [0; 2048];
        let app = App::start(&dut.netns, Box::new(move || socket.recv(&mut buffer)))?;
        only_by_rfs(&bed, &app, || bed.send(Frames::Udp(flows.clone()), 20))
            .with_context(|| format!("{} mapped {mapped}", flows.saddr))?;
    }
    Ok(())
}

#[test]
fn unconnected_udp_with_sender_address() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig {
        ipv6: true,
        ..Default::default()
    })?;
    let dut = &bed.link.dut;
    let (v4, v6) = (UdpFlows::to(dut, 8), UdpFlows::to_ipv6(dut, 8));
    let any = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    for (flows, local) in [(&v4, v4.daddr), (&v4, any), (&v6, v6.daddr), (&v6, any)] {
        let local = SocketAddr::new(local, flows.dport);
        let socket = dut.netns.run(|| soon(UdpSocket::bind(local)?))?;
        let mut buffer = [0; 2048];
        let take = move || socket.recv_from(&mut buffer).map(|(len, _)| len);
        let app = App::start(&dut.netns, Box::new(take))?;
        only_by_rfs(&bed, &app, || bed.send(Frames::Udp(flows.clone()), 40))
            .with_context(|| format!("{local} from {}", flows.saddr))?;
    }
    Ok(())
}

#[test]
fn tcp() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig {
        ipv6: true,
        ..Default::default()
    })?;
    let (dut, tester) = (&bed.link.dut, &bed.link.tester);
    let ping = [b'x'; 64];
    for local in [IpAddr::from(dut.ipv4), dut.ipv6.into()] {
        let listener = dut.netns.run(|| Ok(TcpListener::bind((local, 7))?))?;
        let mut client = tester.netns.run(|| Ok(TcpStream::connect((local, 7))?))?;
        client.set_nodelay(true)?;
        let (mut server, _) = listener.accept()?;
        server.set_read_timeout(Some(Duration::from_millis(5)))?;
        let mut buffer = [0; 2048];
        let app = App::start(&dut.netns, Box::new(move || server.read(&mut buffer)))?;
        only_by_rfs(&bed, &app, || {
            for _ in 0..20 {
                client.write_all(&ping)?;
            }
            Ok(())
        })
        .with_context(|| local.to_string())?;
    }
    Ok(())
}

/// Unconnected sockets can be excluded by option.
#[test]
fn unconnected_udp_can_be_ignored() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = one(UdpFlows::to(dut, 1));
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let socket = dut.netns.run(|| soon(UdpSocket::bind(local)?))?;
    let mut buffer = [0; 2048];
    let take = move || socket.recv_from(&mut buffer).map(|(len, _)| len);
    let app = App::start(&dut.netns, Box::new(take))?;
    let send = || bed.send(Frames::Udp(flows.clone()), 20);
    for unconnected in [true, false] {
        let options = Options {
            ignore_unconnected: !unconnected,
            ..rfs(&bed)
        };
        let active = Active::steer(dut, options)?;
        match unconnected {
            true => follows(&active, &app, send)?,
            false => follows_not(&active, &app, send)?,
        }
        active.stop()?;
    }
    Ok(())
}

/// Threads on two CPUs receive alternately from one socket; flows must not move with each packet.
#[test]
fn a_socket_that_threads_share_is_not_followed_to_and_fro() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 16);
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let socket = Arc::new(dut.netns.run(|| soon(UdpSocket::bind(local)?))?);
    let taken = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    // Each thread receives one datagram, then lets the other one.
    let turn = Arc::new(AtomicU64::new(0));
    let mut apps = Vec::new();
    for cpu in [POLLING_CPU, OTHER_CPU] {
        let (socket, taken, turn) = (socket.clone(), taken.clone(), turn.clone());
        let mut buffer = [0; 2048];
        let take = move || {
            if turn.load(Ordering::Relaxed) % 2 != u64::from(cpu) {
                std::thread::yield_now();
                return Ok(0);
            }
            let (len, _) = socket.recv_from(&mut buffer)?;
            taken[cpu as usize].fetch_add(1, Ordering::Relaxed);
            turn.fetch_add(1, Ordering::Relaxed);
            Ok(len)
        };
        let app = App::start(&dut.netns, Box::new(take))?;
        app.move_to(cpu)?;
        apps.push(app);
    }
    let active = Active::steer(dut, rfs(&bed))?;
    let moves = || Ok::<_, anyhow::Error>(status(&active)?.devices[0].queues[0].moves);
    let many = |taken: &AtomicU64| taken.load(Ordering::Relaxed) > 50;
    until("both receive, and flows stay where they are", || {
        let before = moves()?;
        bed.send(Frames::Udp(flows.clone()), 500)?;
        Ok((moves()? == before && taken.iter().all(many)).then_some(()))
    })?;
    drop(apps);
    active.stop()
}

/// One SO_REUSEPORT group with a socket and a CPU per thread.
#[test]
fn a_reuseport_group_has_its_flows_where_its_threads_are() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 64);
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let (tell, told) = mpsc::channel();
    let mut apps = Vec::new();
    for cpu in [POLLING_CPU, OTHER_CPU] {
        let socket = dut.netns.run(|| soon(reuseport(local)?))?;
        let tell = tell.clone();
        let mut buffer = [0; 2048];
        let take = move || {
            let (len, peer) = socket.recv_from(&mut buffer)?;
            let _ = tell.send((peer, cpu));
            Ok(len)
        };
        let app = App::start(&dut.netns, Box::new(take))?;
        app.move_to(cpu)?;
        apps.push(app);
    }
    let active = Active::steer(dut, rfs(&bed))?;
    // The kernel distributes flows over the sockets; each flow is processed on its socket's CPU.
    let send = || bed.send(Frames::Udp(flows.clone()), 64);
    send()?;
    let mut at = [0u64; 2];
    for _ in 0..64 {
        let (_, cpu) = told.recv_timeout(Duration::from_secs(30))?;
        at[cpu as usize] += 1;
    }
    assert!(at[0] > 0 && at[1] > 0, "{at:?}");
    until("each flow is where its thread is", || {
        let before = places(&status(&active)?.devices[0].queues[0]);
        send()?;
        let queue = until("the packets are received", || {
            let now = status(&active)?.devices[0].queues[0].clone();
            let moved = places(&now).iter().sum::<u64>() - before.iter().sum::<u64>();
            Ok((moved == 64 && now.sums.queued == 0).then_some(now))
        })?;
        let now = places(&queue);
        Ok(([now[0] - before[0], now[1] - before[1]] == at).then_some(()))
    })?;
    active.stop()
}

/// What chooses the socket of an SO_REUSEPORT group.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Chosen {
    /// A classic program, by the CPU that processes the packet.
    Program,
    /// SO_INCOMING_CPU, the same.
    Option,
    /// The kernel's hash.
    Hash,
}

/// A group with a socket for each of the two CPUs.
fn group(local: SocketAddr, chosen: Chosen) -> Result<[UdpSocket; 2]> {
    let sockets = [soon(reuseport(local)?)?, soon(reuseport(local)?)?];
    for socket in &sockets {
        // Room for a packet of each flow.
        nix::sys::socket::setsockopt(socket, nix::sys::socket::sockopt::RcvBufForce, &(1 << 20))?;
    }
    match chosen {
        Chosen::Program => choose_by_cpu(&sockets[0])?,
        Chosen::Option => {
            for (cpu, socket) in sockets.iter().enumerate() {
                SockRef::from(socket).set_cpu_affinity(cpu)?;
            }
        }
        Chosen::Hash => {}
    }
    Ok(sockets)
}

/// A flow whose socket is chosen by the CPU that processes it would have another socket, and another
/// reader, at its reader's CPU: it follows none. Each socket's reader is on the other socket's CPU.
#[test]
fn a_group_by_cpu_keeps_its_flows() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let options = Options {
        policy: Policy::RFS,
        ..bed.options(&[POLLING_CPU, OTHER_CPU])
    };
    for chosen in [Chosen::Program, Chosen::Option, Chosen::Hash] {
        let flows = UdpFlows::to(dut, 64);
        let local = SocketAddr::new(flows.daddr, flows.dport);
        let (tell, told) = mpsc::channel();
        let mut apps = Vec::new();
        let sockets = dut.netns.run(|| group(local, chosen))?;
        for ((number, socket), cpu) in (0..).zip(sockets).zip([OTHER_CPU, POLLING_CPU]) {
            let tell = tell.clone();
            let mut buffer = [0; 2048];
            let take = move || {
                let (len, peer) = socket.recv_from(&mut buffer)?;
                let _ = tell.send((peer, number));
                Ok(len)
            };
            let app = App::start(&dut.netns, Box::new(take))?;
            app.move_to(cpu)?;
            apps.push(app);
        }
        let active = Active::steer(dut, options.clone())?;
        let moves = || Ok::<_, anyhow::Error>(status(&active)?.devices[0].queues[0].moves);
        // Sends a packet of each flow; returns the number of its socket, 0 or 1.
        let round = || -> Result<BTreeMap<SocketAddr, u8>> {
            bed.send(Frames::Udp(flows.clone()), 64)?;
            let mut sockets = BTreeMap::new();
            for nr in 0..64 {
                let of = told.recv_timeout(Duration::from_secs(30));
                let (peer, socket) = of.with_context(|| format!("{chosen:?}: {nr} datagrams"))?;
                sockets.insert(peer, socket);
            }
            Ok(sockets)
        };
        let mut first = round()?;
        until("flows are where their hashes send them", || {
            let (before, moved) = (std::mem::replace(&mut first, round()?), moves()?);
            let at = places(&status(&active)?.devices[0].queues[0]);
            Ok((at[1] > 0 && before == first && moved == moves()?).then_some(()))
        })?;
        let moved = moves()?;
        for _ in 0..20 {
            assert_eq!(round()?, first, "{chosen:?}");
        }
        assert_eq!(moves()?, moved, "{chosen:?}");
        // The control: the flows of a group that the kernel's hash spreads are at their readers'.
        let queue = || Ok::<_, anyhow::Error>(places(&status(&active)?.devices[0].queues[0]));
        let before = queue()?;
        round()?;
        let now = until("the packets are counted", || {
            let now = queue()?;
            Ok((now.iter().sum::<u64>() == before.iter().sum::<u64>() + 64).then_some(now))
        })?;
        let of = |number| first.values().filter(|n| **n == number).count() as u64;
        let at = [now[0] - before[0], now[1] - before[1]];
        let expected = match chosen {
            Chosen::Hash => [of(1), of(0)],
            _ => [of(0), of(1)],
        };
        assert_eq!(at, expected, "{chosen:?}");
        active.stop()?;
    }
    Ok(())
}

/// An application outside of the queue's mask is not followed there; the polling CPU needs not be in it.
#[test]
fn no_flow_goes_to_a_cpu_outside_of_the_mask() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = one(UdpFlows::to(dut, 1));
    let socket = connected(&dut.netns, &flows)?;
    let mut buffer = [0; 2048];
    let app = App::start(&dut.netns, Box::new(move || socket.recv(&mut buffer)))?;
    app.move_to(OTHER_CPU)?;
    let mut send = || bed.send(Frames::Udp(flows.clone()), 20);
    let options = Options {
        policy: Policy::RFS,
        ..bed.options(&[POLLING_CPU])
    };
    let active = Active::steer(dut, options)?;
    let flow = Flow::of_socket(
        libc::IPPROTO_UDP as u8,
        SocketAddr::new(flows.saddr, flows.sport),
        flows.dport,
    );
    let question = Question {
        names: vec![Name::Flow(flow)],
        limit: 1,
        ..Question::default()
    };
    let recorded = || {
        let answer = dut.netns.run(|| client::explain(question.clone()))?;
        let cpu = answer.flows[0].application.cpu;
        let at = answer.flows[0].seen.first().map(|seen| seen.entry.wanted);
        Ok::<_, anyhow::Error>((cpu, at))
    };
    let mask = |cpus: &[u32]| {
        let change = Change::rps_cpus(&dut.name, None, &mask(cpus).to_string());
        dut.netns.run(|| client::set(change))
    };
    for _ in 0..2 {
        until("the application's CPU is recorded", || {
            send()?;
            Ok((recorded()?.0 == Some(OTHER_CPU)).then_some(()))
        })?;
        for _ in 0..10 {
            assert!(all_at(&active, POLLING_CPU, &mut send)?);
        }
        assert_eq!(recorded()?, (Some(OTHER_CPU), Some(Location::Inline)));
        // The control.
        mask(&[POLLING_CPU, OTHER_CPU])?;
        follows(&active, &app, &mut send)?;
        mask(&[POLLING_CPU])?;
        until("the flow has left", || {
            Ok(all_at(&active, POLLING_CPU, &mut send)?.then_some(()))
        })?;
    }
    active.stop()
}

fn rounded(size: u32) -> u32 {
    size.checked_next_power_of_two()
        .filter(|_| size > 0)
        .unwrap_or(0)
}

/// Size 0 of either table disables RFS, as in the kernel; changes at run time apply.
#[test]
fn tables_of_no_size_are_off_and_can_be_changed_under_way() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = one(UdpFlows::to(dut, 1));
    let socket = dut.netns.run(|| {
        let socket = UdpSocket::bind(SocketAddr::new(flows.daddr, flows.dport))?;
        socket.connect(SocketAddr::new(flows.saddr, flows.sport))?;
        soon(socket)
    })?;
    let mut buffer = [0; 2048];
    let app = App::start(&dut.netns, Box::new(move || socket.recv(&mut buffer)))?;
    let mut send = || bed.send(Frames::Udp(flows.clone()), 20);
    let active = Active::steer(dut, rfs(&bed))?;
    let set = |change: Change| dut.netns.run(|| client::set(change));
    let sizes = |sock: u32, dev: u32| Change {
        rps_sock_flow_entries: Some(sock),
        rps_flow_cnt: Some(dev),
        ..Change::default()
    };
    for (sock, dev) in [(0, 4096), (5, 7), (1 << 16, 0), (1, 1)] {
        let lines = set(sizes(sock, dev))?;
        assert!(
            lines[0].starts_with(&format!("rps_sock_flow_entries {} ", rounded(sock))),
            "{lines:?}"
        );
        if sock > 0 && dev > 0 {
            follows(&active, &app, &mut send)?;
        } else {
            follows_not(&active, &app, &mut send).with_context(|| format!("{sock} {dev}"))?;
        }
    }
    for policy in [Policy::RPS, Policy::OFF, Policy::RFS] {
        set(Change {
            policy: Some(policy),
            ..Change::default()
        })?;
        assert_eq!(status(&active)?.policy, policy.to_string());
        match policy {
            Policy::RFS => follows(&active, &app, &mut send)?,
            Policy::RPS => follows_not(&active, &app, &mut send)?,
            _ => {
                app.move_to(OTHER_CPU)?;
                until("the flow is INLINE", || {
                    Ok(all_at(&active, POLLING_CPU, &mut send)?.then_some(()))
                })?;
                for _ in 0..5 {
                    assert!(all_at(&active, POLLING_CPU, &mut send)?, "{policy}");
                }
            }
        }
    }
    assert_eq!(status(&active)?.devices[0].queues[0].imbalance(), None);
    active.stop()
}

#[test]
fn a_closed_sockets_flow_is_not_followed() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = one(UdpFlows::to(dut, 1));
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let peer = SocketAddr::new(flows.saddr, flows.sport);
    let send = || bed.send(Frames::Udp(flows.clone()), 20);
    let active = Active::steer(dut, rfs(&bed))?;
    // The other socket of the group gets the packets afterwards; it is not followed, since its
    // application doesn't read the sender's address.
    let heir = dut.netns.run(|| soon(reuseport(local)?))?;
    let mut buffer = [0; 2048];
    let heir = App::start(&dut.netns, Box::new(move || heir.recv(&mut buffer)))?;
    heir.move_to(POLLING_CPU)?;
    for _ in 0..3 {
        let socket = dut.netns.run(|| {
            let socket = reuseport(local)?;
            socket.connect(peer)?;
            soon(socket)
        })?;
        let app = App::start(&dut.netns, Box::new(move || socket.recv(&mut buffer)))?;
        follows_until_it_ends(&active, app, send)?;
    }
    active.stop()
}

/// One socket, flows from two queues, and a changing polling CPU: all packets are processed in
/// order where the application is, INLINE or not.
#[test]
fn queues_and_polling_cpus_change_nothing() -> Result<()> {
    in_lab!();
    let mut bed = Testbed::new(&LinkConfig {
        queues: 2,
        ..Default::default()
    })?;
    let flows = UdpFlows::to(&bed.link.dut, 64);
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let netns = bed.link.dut.netns.clone();
    let socket = netns.run(|| soon(UdpSocket::bind(local)?))?;
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBufForce, &(64 << 20))?;
    let reordered = Arc::new(AtomicBool::new(false));
    let seen = reordered.clone();
    let mut next = std::collections::HashMap::new();
    let mut buffer = [0; 2048];
    // Frames of a generator have its sequence number, and each generator has its queue.
    let take = move || {
        let (len, peer) = socket.recv_from(&mut buffer)?;
        let stamp = |at: usize, n: usize| buffer[at..at + n].to_vec();
        let seq = u64::from_be_bytes(stamp(0, 8).try_into().expect("eight bytes"));
        let least = next.entry((peer, stamp(12, 4))).or_insert(0);
        if seq < *least {
            seen.store(true, Ordering::Relaxed);
        }
        *least = seq + 1;
        Ok(len)
    };
    let app = App::start(&netns, Box::new(take))?;
    let options = Options {
        rps_cpus: RpsCpus::Mask(mask(&[POLLING_CPU, OTHER_CPU])),
        ..rfs(&bed)
    };
    let Testbed { link, nic } = &mut bed;
    let active = Active::steer(&link.dut, options)?;
    // The generator on CPU 1 sends into queue 1.
    let wires = [0, 1].map(|cpu| {
        let config = GeneratorConfig::lossless(Frames::Udp(flows.clone()), None).at(10_000);
        Generator::start(link, cpu, &config)
    });
    for (at, polling) in [(1, 0), (0, 0), (0, 1), (1, 1), (1, 0)] {
        app.move_to(at)?;
        nic.move_to(0, polling)?;
        nic.move_to(1, polling)?;
        for queue in 0..2 {
            let counts = || {
                let q = &status(&active)?.devices[0].queues[queue];
                let to = |cpu| q.backlogs.iter().find(|b| b.cpu == cpu);
                let to = |cpu| to(cpu).map_or(0, |b| b.terms.redirected);
                Ok::<_, anyhow::Error>((q.received, [q.inline, to(0), to(1)]))
            };
            let place = if at == polling { 0 } else { 1 + at as usize };
            until(
                &format!("queue {queue}: app on {at}, polled on {polling}"),
                || {
                    let before = counts()?;
                    let after = until("more packets", || {
                        let now = counts()?;
                        Ok((now.0 > before.0 + 500).then_some(now))
                    })?;
                    let there = after.1[place] - before.1[place];
                    Ok((there.abs_diff(after.0 - before.0) < 3).then_some(()))
                },
            )?;
        }
    }
    for wire in wires {
        assert_eq!(wire?.stop()?.lost, 0);
    }
    assert!(!reordered.load(Ordering::Relaxed), "reordered: 1 or more");
    active.stop()
}
