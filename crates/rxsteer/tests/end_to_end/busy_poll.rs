// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering with applications that poll the device's queue: polls find their packets, and packets
//! of other applications go where they belong.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::Func;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::lab::snmp;
use rxlab::lab::sockets;
use rxlab::testing::app::{App, Take, connected, soon};
use rxlab::testing::testbed::{
    OTHER_CPU, POLLING_CPU, Testbed, all_at, at_rest, places, status, until,
};
use rxsteer::api::client;
use rxsteer::api::flows::{Entry, Query, Reason};
use rxsteer::daemon::options::Options;
use rxsteer::datapath::load::Pressure;
use rxsteer::datapath::policy::Policy;
use rxsteer::host::polling::Polling;
use rxsteer::host::setting::Setting;

const OFF: Polling = Polling {
    usecs: 0,
    prefer: false,
};

/// Longer than an application waits for a packet in these tests.
const ON: Polling = Polling {
    usecs: 5000,
    prefer: false,
};

/// The function with which a program reads an unconnected socket's polling.
const CAST: &str = "bpf_cast_to_kern_ctx";

/// How an application waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// In the read call.
    Read,
    /// In epoll_wait().
    Epoll,
}

/// A waiting application with its polling switches.
struct Waiting {
    take: Take,
    socket: OwnedFd,
    epoll: Option<Epoll>,
}

impl Waiting {
    fn new(wait: Wait, socket: OwnedFd, mut read: Take) -> Result<Option<Self>> {
        let mut this = Self {
            socket: socket.try_clone()?,
            take: Box::new(|| Ok(0)),
            epoll: None,
        };
        if wait == Wait::Read {
            this.take = read;
            return Ok(Some(this));
        }
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        if Polling::of_epoll(&epoll.0).is_err() {
            return Ok(None);
        }
        epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        this.epoll = Some(Epoll(epoll.0.try_clone()?));
        this.take = Box::new(move || {
            let mut events = [EpollEvent::empty(); 1];
            match epoll.wait(&mut events, EpollTimeout::from(5u8))? {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                _ => read(),
            }
        });
        Ok(Some(this))
    }
}

/// The socket and epoll instance of a waiting application, to switch polling.
struct Poller(OwnedFd, Option<Epoll>);

impl Poller {
    fn set(&self, polling: Polling) -> Result<()> {
        polling.set_socket(&self.0)?;
        if let Some(epoll) = &self.1 {
            polling.set_epoll(&epoll.0)?;
        }
        Ok(())
    }
}

/// Packets that applications found by polling.
fn found(bed: &Testbed) -> Result<u64> {
    let counters = snmp::tcp(&bed.link.dut.netns)?;
    counters
        .get("BusyPollRxPackets")
        .copied()
        .context("no BusyPollRxPackets")
}

/// The flow is INLINE while its application polls, and on the application's CPU before and after.
fn polls(bed: &Testbed, waiting: Waiting, mut send: impl FnMut() -> Result<()>) -> Result<()> {
    let poller = Poller(waiting.socket, waiting.epoll);
    let app = App::start(&bed.link.dut.netns, waiting.take)?;
    app.move_to(OTHER_CPU)?;
    // RPS alone also selects the application's CPU.
    let options = Options {
        policy: Policy::RFS,
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(&bed.link.dut, options)?;
    let query = Query {
        limit: 10,
        ..Query::default()
    };
    for _ in 0..2 {
        poller.set(OFF)?;
        until("the flow follows its application", || {
            Ok(all_at(&active, OTHER_CPU, &mut send)?.then_some(()))
        })?;
        let before = found(bed)?;
        ensure!(all_at(&active, OTHER_CPU, &mut send)?);
        ensure!(found(bed)? == before, "polls without being enabled");

        poller.set(ON)?;
        until("its application's polls find it", || {
            let before = found(bed)?;
            let inline = all_at(&active, POLLING_CPU, &mut send)?;
            Ok((inline && found(bed)? > before).then_some(()))
        })?;
        // On a slow machine one query may not read all slots.
        until("the reason is shown", || {
            let flows = bed.link.dut.netns.run(|| client::flows(query.clone()))?;
            let polls = |flow: &Entry| flow.reason == Reason::BusyPoll;
            Ok(flows.flows.iter().any(polls).then_some(()))
        })?;
    }
    drop(app);
    let queue = &status(&active)?.devices[0].queues[0];
    ensure!(queue.imbalance().is_none(), "{queue:?}");
    active.stop()
}

fn ipv6() -> LinkConfig {
    LinkConfig {
        ipv6: true,
        ..Default::default()
    }
}

#[test]
fn udp() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&ipv6())?;
    let dut = &bed.link.dut;
    for flows in [UdpFlows::to(dut, 1), UdpFlows::to_ipv6(dut, 1)] {
        for (wait, connected) in [
            (Wait::Read, true),
            (Wait::Read, false),
            (Wait::Epoll, true),
            (Wait::Epoll, false),
        ] {
            let what = format!("{wait:?}, connected: {connected}, from {}", flows.saddr);
            if !connected
                && Btf::from_vmlinux()?
                    .type_by_name::<Func<'_>>(CAST)
                    .is_none()
            {
                rxlab::testing::not_run(
                    &format!("udp ({what})"),
                    "before Linux 6.2 it is not known",
                );
                continue;
            }
            let socket = dut.netns.run(|| {
                let socket = UdpSocket::bind(SocketAddr::new(flows.daddr, flows.dport))?;
                if connected {
                    socket.connect(SocketAddr::new(flows.saddr, flows.sport))?;
                }
                soon(socket)
            })?;
            let fd = socket.as_fd().try_clone_to_owned()?;
            let mut buffer = [0; 2048];
            let read = move || socket.recv_from(&mut buffer).map(|(len, _)| len);
            let Some(waiting) = Waiting::new(wait, fd, Box::new(read))? else {
                rxlab::testing::not_run(
                    &format!("udp ({what})"),
                    "no epoll parameters before Linux 6.9",
                );
                continue;
            };
            // An epoll instance starts polling with the first packets, and stops when one is late.
            let paced = GeneratorConfig::lossless(Frames::Udp(flows.clone()), Some(100)).at(10_000);
            polls(&bed, waiting, || {
                let sent = Generator::start(&bed.link, 0, &paced)?.wait()?;
                ensure!((sent.sent, sent.lost) == (100, 0), "{sent:?}");
                Ok(())
            })
            .context(what)?;
        }
    }
    Ok(())
}

#[test]
fn tcp() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&ipv6())?;
    let (dut, tester) = (&bed.link.dut, &bed.link.tester);
    for local in [IpAddr::from(dut.ipv4), dut.ipv6.into()] {
        for wait in [Wait::Read, Wait::Epoll] {
            let what = format!("{wait:?}, {local}");
            let listener = dut.netns.run(|| Ok(TcpListener::bind((local, 0))?))?;
            let address = listener.local_addr()?;
            let mut client = tester.netns.run(|| Ok(TcpStream::connect(address)?))?;
            client.set_nodelay(true)?;
            let (mut server, _) = listener.accept()?;
            server.set_read_timeout(Some(Duration::from_millis(5)))?;
            let fd = server.as_fd().try_clone_to_owned()?;
            let mut buffer = [0; 2048];
            let read = move || server.read(&mut buffer);
            let Some(waiting) = Waiting::new(wait, fd, Box::new(read))? else {
                rxlab::testing::not_run(
                    &format!("tcp ({what})"),
                    "no epoll parameters before Linux 6.9",
                );
                continue;
            };
            polls(&bed, waiting, || {
                for _ in 0..20 {
                    client.write_all(&[b'x'; 64])?;
                }
                Ok(())
            })
            .context(what)?;
        }
    }
    Ok(())
}

/// Waits for packets in poll(), which polls no queue by the socket's setting alone.
fn in_poll(socket: UdpSocket) -> Take {
    let mut buffer = [0; 2048];
    Box::new(move || {
        let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(5u8))? {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => socket.recv(&mut buffer),
        }
    })
}

/// All sockets inherit the host's polling time, those that never poll, too: their flows follow the
/// application. The control: a socket that has asked for another time is INLINE.
#[test]
fn the_hosts_polling_time_is_no_request() -> Result<()> {
    in_lab!(alone: "it sets the host's busy_read");
    let host = Setting::keep("/proc/sys/net/core/busy_read")?;
    host.set(&ON.usecs.to_string())?;
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 1);
    let socket = connected(&dut.netns, &flows)?;
    ensure!(Polling::of_socket(&socket)? == ON, "not inherited");
    let same = socket.try_clone()?;
    let app = App::start(&dut.netns, in_poll(socket))?;
    app.move_to(OTHER_CPU)?;
    let options = Options {
        policy: Policy::RFS,
        ..bed.options(&[POLLING_CPU, OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    let goes_to = |cpu, why| {
        let mut send = || bed.send(Frames::Udp(flows.clone()), 20);
        until(why, || Ok(all_at(&active, cpu, &mut send)?.then_some(())))
    };
    goes_to(OTHER_CPU, "the flow follows: the time is the host's")?;
    let longer = Polling {
        usecs: 2 * ON.usecs,
        ..ON
    };
    longer.set_socket(&same)?;
    goes_to(POLLING_CPU, "the flow is INLINE: the time is the socket's")?;
    host.set(&longer.usecs.to_string())?;
    goes_to(
        OTHER_CPU,
        "the flow follows again: the time has become the host's",
    )?;
    drop(app);
    active.stop()
}

/// poll() polls the queue only if both the host's setting and the socket's allow it.
#[test]
fn poll_asks_the_whole_host() -> Result<()> {
    in_lab!(alone: "it sets the host's busy_poll");
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 1);
    let socket = connected(&dut.netns, &flows)?;
    ON.set_socket(&socket)?;
    let app = App::start(&dut.netns, in_poll(socket))?;
    app.move_to(OTHER_CPU)?;
    let options = Options {
        policy: Policy::RFS,
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), Some(100)).at(10_000);
    let finds = || {
        let before = found(&bed)?;
        Generator::start(&bed.link, 0, &paced)?.wait()?;
        Ok::<_, anyhow::Error>(found(&bed)? - before)
    };
    let host = Setting::keep("/proc/sys/net/core/busy_poll")?;
    host.set("0")?;
    for _ in 0..10 {
        ensure!(finds()? == 0, "the socket alone");
    }
    host.set(&ON.usecs.to_string())?;
    until(
        "its polls find packets",
        || Ok((finds()? > 0).then_some(())),
    )?;
    drop(app);
    active.stop()
}

/// `rxsteer run`, killed on drop.
struct Run(Child);

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Rules in the configuration of `run` let this process's sockets poll; `status` shows the
/// counters, and the sockets are restored at the end.
#[test]
fn by_configuration() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 1);
    let socket = connected(&dut.netns, &flows)?;
    let polling = socket.as_fd().try_clone_to_owned()?;
    let mut buffer = [0; 2048];
    let app = App::start(&dut.netns, Box::new(move || socket.recv(&mut buffer)))?;
    app.move_to(OTHER_CPU)?;

    let file = tempfile::NamedTempFile::new()?;
    let pid = std::process::id();
    let text = format!(
        "devices = [{:?}]\npolicy = \"rfs\"\nrps-cpus = \"1\"\n[[busy_poll]]\npid = {pid}\nusecs = {}\n",
        dut.name, ON.usecs
    );
    std::fs::write(file.path(), text)?;
    let mut command = dut.netns.command(env!("CARGO_BIN_EXE_rxsteer"))?;
    command.arg("run").arg("--config").arg(file.path());
    let mut run = Run(command.stderr(Stdio::null()).spawn()?);
    until("the socket polls", || {
        Ok((Polling::of_socket(&polling)? == ON).then_some(()))
    })?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), Some(100)).at(10_000);
    let application = until("its polls find packets", || {
        Generator::start(&bed.link, 0, &paced)?.wait()?;
        let polling = dut.netns.run(client::busy_poll)?.context("it is there")?;
        let application = polling.applications.into_iter().find(|a| a.pid == pid);
        Ok(application.filter(|a| a.found > 0 && a.won_seconds.is_some()))
    })?;
    ensure!(application.polls >= application.found, "{application:?}");
    ensure!(application.packets >= application.found, "{application:?}");
    ensure!(application.sockets > 0, "{application:?}");
    ensure!(application.usecs == ON.usecs, "{application:?}");
    ensure!(application.polling_seconds > 0.0, "{application:?}");
    ensure!(application.won_seconds > Some(0.0), "{application:?}");
    ensure!(application.wake_up_us > Some(0.0), "{application:?}");
    ensure!(!application.in_vain, "{application:?}");
    let mut status = dut.netns.command(env!("CARGO_BIN_EXE_rxsteer"))?;
    let status = status.arg("status").output()?;
    let text = String::from_utf8(status.stdout)?;
    ensure!(
        text.contains("policy rfs") && text.contains("busy polling"),
        "{text}"
    );

    kill(Pid::from_raw(run.0.id() as i32), Signal::SIGTERM)?;
    ensure!(run.0.wait()?.success());
    ensure!(Polling::of_socket(&polling)? == OFF);
    Ok(())
}

/// Only one application polls the queue at a time, and finds the packets of both.
#[test]
fn two_applications_poll_one_queue() -> Result<()> {
    in_lab!();
    const COUNT: u64 = 2000;
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 2);
    let sockets = sockets::connected(&dut.netns, &flows, 1 << 20)?;
    let taken = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let mut apps = Vec::new();
    for (n, socket) in sockets.into_iter().enumerate() {
        let socket = soon(UdpSocket::from(socket))?;
        ON.set_socket(&socket)?;
        let (mut buffer, taken) = ([0; 2048], taken[n].clone());
        let take = move || {
            let len = socket.recv(&mut buffer)?;
            taken.fetch_add(1, Ordering::Relaxed);
            Ok(len)
        };
        let app = App::start(&dut.netns, Box::new(take))?;
        app.move_to([POLLING_CPU, OTHER_CPU][n])?;
        apps.push(app);
    }
    let options = Options {
        policy: Policy::RFS,
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    let before = found(&bed)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), Some(2 * COUNT)).at(10_000);
    let sent = Generator::start(&bed.link, 0, &paced)?.wait()?;
    ensure!((sent.sent, sent.lost) == (2 * COUNT, 0), "{sent:?}");
    until("both have all that came", || {
        let all = taken.iter().all(|n| n.load(Ordering::Relaxed) == COUNT);
        Ok(all.then_some(()))
    })?;
    ensure!(found(&bed)? > before, "no poll found anything");
    drop(apps);
    let queue = &status(&active)?.devices[0].queues[0];
    ensure!(queue.imbalance().is_none(), "{queue:?}");
    active.stop()
}

/// Holds also under a policy that leaves flows INLINE while there is room.
#[test]
fn others_leave_the_polls_of_an_application() -> Result<()> {
    in_lab!();
    const COUNT: u64 = 100;
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 2);
    let mut apps = Vec::new();
    let mut sockets = Vec::new();
    for (socket, cpu) in sockets::connected(&dut.netns, &flows, 1 << 20)?
        .into_iter()
        .zip([POLLING_CPU, OTHER_CPU])
    {
        let socket = soon(UdpSocket::from(socket))?;
        sockets.push(socket.try_clone()?);
        let mut buffer = [0; 2048];
        let app = App::start(&dut.netns, Box::new(move || socket.recv(&mut buffer)))?;
        app.move_to(cpu)?;
        apps.push(app);
    }
    let options = Options {
        policy: "rfs+adapt".parse().expect("a policy"),
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), Some(2 * COUNT)).at(10_000);
    let mut sent = 0;
    // Frames processed INLINE, and frames in the other CPU's backlog.
    let mut send = || {
        let before = places(&at_rest(&active, 0, sent)?);
        // The generator runs on the other CPU, so that the polling application keeps its own.
        Generator::start(&bed.link, OTHER_CPU, &paced)?.wait()?;
        sent += 2 * COUNT;
        let after = places(&at_rest(&active, 0, sent)?);
        Ok::<_, anyhow::Error>([0, 1].map(|i| after[i] - before[i]))
    };
    // Control: without polling both flows stay, since there is room.
    for _ in 0..10 {
        ensure!(send()? == [2 * COUNT, 0]);
    }
    ON.set_socket(&sockets[0])?;
    until("the other flow leaves, and only that", || {
        let left = send()? == [COUNT, COUNT];
        let load = status(&active)?.devices[0].queues[0].load.clone();
        let polled = load.is_some_and(|load| load.pressure == Pressure::Polled);
        Ok((left && polled).then_some(()))
    })?;
    drop(apps);
    active.stop()
}
