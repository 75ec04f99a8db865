// SPDX-License-Identifier: MIT OR Apache-2.0
//! Flows behind NAT follow their applications with `--follow-nat`, as under kernel RFS.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{MsgFlags, recv, send};
use rxlab::bench::setup::mode::{Active, Mode};
use rxlab::lab::container::{Container, PUBLISHED};
use rxlab::lab::link::LinkConfig;
use rxlab::lab::sockets;
use rxlab::testing::app::App;
use rxlab::testing::not_run;
use rxlab::testing::testbed::{
    OTHER_CPU, POLLING_CPU, Testbed, follows, follows_not, follows_until_it_ends, mask, until,
};
use rxlab::{in_lab, test_name};
use rxsteer::daemon::options::{Mode as RxMode, Options};
use rxsteer::datapath::hash::Hash;
use rxsteer::datapath::policy::Policy;
use socket2::SockRef;

/// Limit on the connections' arrival.
const TIMEOUT: Duration = Duration::from_secs(30);

const RCVBUF: usize = 1 << 20;

/// A test bed whose device leads to a container by NAT.
struct World {
    bed: Testbed,
    container: Container,
}

/// Both ends of a connection: at the tester, and in the container.
type Pair = (OwnedFd, OwnedFd);

impl World {
    /// None if this host has no NAT, which is reported.
    fn new(test: &str) -> Result<Option<Self>> {
        let bed = Testbed::new(&LinkConfig::default())?;
        match Container::new(&bed.link.dut) {
            Ok(container) => Ok(Some(Self { bed, container })),
            Err(error) => {
                not_run(test, &format!("{error:#}"));
                Ok(None)
            }
        }
    }

    fn published(&self) -> SocketAddr {
        (self.bed.link.dut.ipv4, PUBLISHED).into()
    }

    fn tcp_to_container(&self, count: u32) -> Result<Vec<Pair>> {
        let inside = self.container.netns();
        let listener = inside.run(|| Ok(TcpListener::bind(self.container.address())?))?;
        let connect = |_| {
            let stream = TcpStream::connect(self.published())?;
            stream.set_nodelay(true)?;
            Ok(stream.into())
        };
        let outside = self.bed.link.tester.netns.run(|| {
            let streams = (0..count).map(connect);
            streams.collect::<Result<Vec<OwnedFd>>>()
        })?;
        let accepted = sockets::accepted(&listener, count, TIMEOUT)?;
        Ok(outside
            .into_iter()
            .zip(accepted.into_iter().map(OwnedFd::from))
            .collect())
    }

    fn udp_to_container(&self, count: u32) -> Result<Vec<Pair>> {
        let tester = &self.bed.link.tester;
        let open = |_| {
            let socket = UdpSocket::bind((tester.ipv4, 0))?;
            socket.connect(self.published())?;
            Ok(socket)
        };
        let outside: Vec<UdpSocket> = tester
            .netns
            .run(|| (0..count).map(open).collect::<Result<_>>())?;
        let sources: io::Result<Vec<_>> = outside.iter().map(UdpSocket::local_addr).collect();
        let inside = sockets::connected_to(
            self.container.netns(),
            self.container.address(),
            sources?.into_iter(),
            RCVBUF,
        )?;
        let outside = outside.into_iter().map(OwnedFd::from);
        Ok(outside.zip(inside).collect())
    }

    fn tcp_from_container(&self) -> Result<Pair> {
        let tester = &self.bed.link.tester;
        let at = (tester.ipv4, 7);
        let listener = tester.netns.run(|| Ok(TcpListener::bind(at)?))?;
        let inside = self.container.netns().run(|| Ok(TcpStream::connect(at)?))?;
        inside.set_read_timeout(Some(Duration::from_millis(5)))?;
        let (outside, from) = listener.accept()?;
        outside.set_nodelay(true)?;
        self.is_masqueraded(from, inside.local_addr()?)?;
        Ok((outside.into(), inside.into()))
    }

    fn udp_from_container(&self) -> Result<Pair> {
        let tester = &self.bed.link.tester;
        let at = (tester.ipv4, 7);
        let outside = tester.netns.run(|| Ok(UdpSocket::bind(at)?))?;
        let inside = self.container.netns().run(|| {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(at)?;
            socket.send(&[0])?;
            Ok(socket)
        })?;
        inside.set_read_timeout(Some(Duration::from_millis(5)))?;
        let (_, from) = outside.recv_from(&mut [0])?;
        outside.connect(from)?;
        self.is_masqueraded(from, inside.local_addr()?)?;
        Ok((outside.into(), inside.into()))
    }

    fn is_masqueraded(&self, from: SocketAddr, inside: SocketAddr) -> Result<()> {
        ensure!(
            from.ip() == self.bed.link.dut.ipv4 && from.port() != inside.port(),
            "{inside} appears as {from}"
        );
        Ok(())
    }

    /// By policy rfs, with other flows at the other CPU.
    fn options(&self, mode: RxMode, follow_nat: bool) -> Options {
        Options {
            policy: Policy::RFS,
            mode,
            follow_nat,
            ..self.bed.options(&[OTHER_CPU])
        }
    }

    /// An application in the container, and what sends it packets from outside.
    fn application(&self, (outside, inside): Pair) -> Result<(App, impl Fn() -> Result<()>)> {
        let take = move || Ok(recv(inside.as_raw_fd(), &mut [0; 2048], MsgFlags::empty())?);
        let app = App::start(self.container.netns(), Box::new(take))?;
        let send = move || {
            for _ in 0..20 {
                send(outside.as_raw_fd(), &[b'x'; 64], MsgFlags::empty())?;
            }
            Ok(())
        };
        Ok((app, send))
    }

    /// The flow follows by the option alone.
    fn only_by_option(&self, pair: Pair, mode: RxMode) -> Result<()> {
        let dut = &self.bed.link.dut;
        let (app, send) = self.application(pair)?;
        let active = Active::steer(dut, self.options(mode, true))?;
        follows(&active, &app, &send)?;
        active.stop()?;

        let active = Active::steer(dut, self.options(mode, false))?;
        follows_not(&active, &app, &send).context("without the option")?;
        active.stop()
    }
}

/// The only one.
fn one(pairs: Result<Vec<Pair>>) -> Result<Pair> {
    pairs?.pop().context("there is one")
}

#[test]
fn tcp_to_a_published_port() -> Result<()> {
    in_lab!();
    let Some(world) = World::new(test_name!())? else {
        return Ok(());
    };
    for mode in [RxMode::Native, RxMode::Softirq] {
        world.only_by_option(one(world.tcp_to_container(1))?, mode)?;
    }
    Ok(())
}

#[test]
fn connected_udp_to_a_published_port() -> Result<()> {
    in_lab!();
    let Some(world) = World::new(test_name!())? else {
        return Ok(());
    };
    for mode in [RxMode::Native, RxMode::Softirq] {
        world.only_by_option(one(world.udp_to_container(1))?, mode)?;
    }
    Ok(())
}

/// Its entry is found by the hash that its packets had.
#[test]
fn a_closed_sockets_flow_is_not_followed() -> Result<()> {
    in_lab!();
    let Some(world) = World::new(test_name!())? else {
        return Ok(());
    };
    let (outside, inside) = one(world.udp_to_container(1))?;
    // The container refuses the datagrams once the socket is closed.
    let send = || {
        for _ in 0..20 {
            let _ = send(outside.as_raw_fd(), &[b'x'; 64], MsgFlags::empty());
        }
        Ok(())
    };
    let take = move || Ok(recv(inside.as_raw_fd(), &mut [0; 2048], MsgFlags::empty())?);
    let app = App::start(world.container.netns(), Box::new(take))?;
    let active = Active::steer(&world.bed.link.dut, world.options(RxMode::Native, true))?;
    follows_until_it_ends(&active, app, send)?;
    active.stop()
}

#[test]
fn masqueraded_connections() -> Result<()> {
    in_lab!();
    let Some(world) = World::new(test_name!())? else {
        return Ok(());
    };
    world.only_by_option(world.tcp_from_container()?, RxMode::Native)?;
    world.only_by_option(world.udp_from_container()?, RxMode::Native)
}

/// Connections whose applications run on both CPUs, in equal numbers.
const CONNECTIONS: u32 = 32;

/// Packets of which the share is computed, per connection.
const PACKETS: u64 = 100;

/// Applications that count packets processed on their CPU, and all packets.
struct Applications {
    outside: Vec<OwnedFd>,
    counts: Arc<[AtomicU64; 2]>,
    _apps: Vec<App>,
}

impl Applications {
    fn start(world: &World, pairs: Vec<Pair>) -> Result<Self> {
        let counts = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let (mut outside, mut apps) = (Vec::new(), Vec::new());
        for (cpu, (far, near)) in [POLLING_CPU, OTHER_CPU].into_iter().cycle().zip(pairs) {
            let counts = counts.clone();
            let take = move || {
                let len = recv(near.as_raw_fd(), &mut [0; 2048], MsgFlags::empty())?;
                let here = SockRef::from(&near).cpu_affinity()? == cpu as usize;
                counts[0].fetch_add(here.into(), Ordering::Relaxed);
                counts[1].fetch_add(1, Ordering::Relaxed);
                Ok(len)
            };
            let app = App::start(world.container.netns(), Box::new(take))?;
            app.move_to(cpu)?;
            apps.push(app);
            outside.push(far);
        }
        Ok(Self {
            outside,
            counts,
            _apps: apps,
        })
    }

    /// Sends a packet at a time, and waits for it to be received, so that none is merged with
    /// another one. Returns the share that was processed on its application's CPU.
    fn share(&self) -> Result<f64> {
        let read = || [0, 1].map(|i| self.counts[i].load(Ordering::Relaxed));
        let before = read();
        for _ in 0..PACKETS {
            let so_far = read()[1];
            for socket in &self.outside {
                send(socket.as_raw_fd(), &[b'x'; 64], MsgFlags::empty())?;
            }
            until("the packets are received", || {
                Ok((read()[1] >= so_far + u64::from(CONNECTIONS)).then_some(()))
            })?;
        }
        let after = read();
        Ok((after[0] - before[0]) as f64 / (after[1] - before[1]) as f64)
    }
}

#[test]
fn as_many_packets_follow_as_under_kernel_rfs() -> Result<()> {
    in_lab!();
    let Some(world) = World::new(test_name!())? else {
        return Ok(());
    };
    let dut = &world.bed.link.dut;
    let cpus = mask(&[POLLING_CPU, OTHER_CPU]);
    for (transport, pairs) in [
        ("TCP", world.tcp_to_container(CONNECTIONS)?),
        ("UDP", world.udp_to_container(CONNECTIONS)?),
    ] {
        let applications = Applications::start(&world, pairs)?;
        let kernel = Active::start(dut, Mode::KernelRfs, Some(&cpus))?;
        applications.share()?;
        let by_kernel = applications.share()?;
        kernel.stop()?;
        let steered = |follow_nat, enough: fn(f64) -> bool| {
            let options = Options {
                policy: Policy::RFS,
                follow_nat,
                ..world.bed.options(&[POLLING_CPU, OTHER_CPU])
            };
            let active = Active::steer(dut, options)?;
            // The first packets of a flow teach where its application is.
            applications.share()?;
            let share = until("enough packets are on the right CPU", || {
                let share = applications.share()?;
                Ok(enough(share).then_some(share))
            })?;
            active.stop()?;
            anyhow::Ok(share)
        };
        let with = steered(true, |share| share > 0.9)?;
        let without = steered(false, |_| true)?;
        println!(
            "{transport} on its application's CPU: kernel RFS {by_kernel:.3}, with --follow-nat \
             {with:.3}, without {without:.3}"
        );
        // By hash, half of them; 26 of 32 with a probability of 1 in 4,000.
        assert!(without < 0.8, "{without}");
    }
    Ok(())
}

/// A hash that sockets could not compute is learnt from the packets.
#[test]
fn a_symmetric_hash_is_followed() -> Result<()> {
    in_lab!();
    let Some(world) = World::new(test_name!())? else {
        return Ok(());
    };
    for mode in [RxMode::Native, RxMode::Softirq] {
        let (app, send) = world.application(one(world.tcp_to_container(1))?)?;
        let options = Options {
            hash: Hash::Symmetric,
            ..world.options(mode, true)
        };
        let active = Active::steer(&world.bed.link.dut, options)?;
        follows(&active, &app, send)?;
        active.stop()?;
    }
    Ok(())
}

/// Sockets don't know it.
#[test]
fn the_devices_hash_is_not_followed() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    for follow_nat in [true, false] {
        let options = Options {
            policy: Policy::RFS,
            follow_nat,
            hash: Hash::Device,
            ..bed.options(&[OTHER_CPU])
        };
        let error = Active::steer(&bed.link.dut, options);
        let error = format!("{:#}", error.map(drop).unwrap_err());
        assert!(error.contains("leave --hash device"), "{error}");
    }
    Ok(())
}
