// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer poll`: which sockets of which processes poll, for how long, and the restore when it
//! ends or is killed. The application is this process, or a `sleep` that inherited a socket.

use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::lab::netns::Netns;
use rxlab::testing::testbed::until;
use rxlab::{in_lab, test_name};
use rxsteer::host::polling::Polling;

const RXSTEER: &str = env!("CARGO_BIN_EXE_rxsteer");

/// linux/capability.h
const CAP_SYS_PTRACE: libc::c_ulong = 19;

const OFF: Polling = Polling {
    usecs: 0,
    prefer: false,
};

const ON: Polling = Polling {
    usecs: 50,
    prefer: false,
};

/// `rxsteer poll`, killed on drop.
struct Poll(Child);

impl Poll {
    fn start(args: &[&str]) -> Result<Self> {
        Ok(Self(Self::command(args).spawn()?))
    }

    fn command(args: &[&str]) -> Command {
        let mut command = Command::new(RXSTEER);
        command.arg("poll").args(["--usecs", "50"]).args(args);
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// Started without the right to trace a process with more capabilities.
    fn confined(args: &[&str]) -> Result<Self> {
        let mut command = Self::command(args);
        let drop_capability = || {
            // SAFETY: the call takes numbers only.
            let done = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0) };
            nix::errno::Errno::result(done)
                .map(drop)
                .map_err(Into::into)
        };
        // SAFETY: the closure makes one system call.
        unsafe { command.pre_exec(drop_capability) };
        Ok(Self(command.spawn()?))
    }

    /// For this process's sockets.
    fn own(args: &[&str]) -> Result<Self> {
        let pid = std::process::id().to_string();
        Self::start(&[&["--pid", &pid], args].concat())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.0.id() as i32), signal)?)
    }

    /// Waits for its end and for that of the child that restores sockets: both write to the log.
    fn ended(mut self) -> Result<(Option<i32>, String)> {
        let mut log = String::new();
        let mut stderr = self.0.stderr.take().context("it is read once")?;
        stderr.read_to_string(&mut log)?;
        Ok((self.0.wait()?.code(), log))
    }
}

impl Drop for Poll {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// In each network namespace one `rxsteer poll` may run.
fn netns() -> Result<Netns> {
    Netns::new("host")
}

fn of(socket: &impl AsFd) -> Result<Polling> {
    Ok(Polling::of_socket(socket)?)
}

fn becomes(socket: &impl AsFd, polling: Polling) -> Result<()> {
    until("the socket is set", || {
        Ok((of(socket)? == polling).then_some(()))
    })
}

/// A process that inherited a socket and does nothing with it.
struct Sleeper(Child);

impl Sleeper {
    fn with(socket: OwnedFd) -> Result<Self> {
        Self::of_user(0, socket)
    }

    fn of_user(uid: u32, socket: OwnedFd) -> Result<Self> {
        let mut command = Command::new("sleep");
        command.arg("1000").uid(uid).stdin(Stdio::from(socket));
        Ok(Self(command.spawn()?))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sockets and epoll instances of an application, of every kind.
struct Sockets {
    udp: UdpSocket,
    udp6: UdpSocket,
    listener: TcpListener,
    before: (TcpStream, TcpStream),
    /// Not selected by rules.
    _unix: UnixDatagram,
    epoll: Epoll,
    /// Watches no socket.
    other_epoll: Epoll,
    /// Has the wanted settings from the start.
    so: UdpSocket,
}

fn connected(listener: &TcpListener) -> Result<(TcpStream, TcpStream)> {
    let client = TcpStream::connect(listener.local_addr()?)?;
    Ok((client, listener.accept()?.0))
}

impl Sockets {
    fn open() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let this = Self {
            udp: UdpSocket::bind("127.0.0.1:0")?,
            udp6: UdpSocket::bind("[::1]:0")?,
            before: connected(&listener)?,
            listener,
            _unix: UnixDatagram::unbound()?,
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            other_epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            so: UdpSocket::bind("127.0.0.1:0")?,
        };
        this.epoll
            .add(&this.udp, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        ON.set_socket(&this.so)?;
        Ok(this)
    }

    /// Settings of the sockets that a rule selects, without `so`.
    fn polling(&self) -> Result<Vec<Polling>> {
        Ok(vec![
            of(&self.udp)?,
            of(&self.udp6)?,
            of(&self.listener)?,
            of(&self.before.0)?,
            of(&self.before.1)?,
        ])
    }

    fn all_become(&self, polling: Polling) -> Result<()> {
        until("all sockets are set", || {
            Ok(self.polling()?.iter().all(|p| *p == polling).then_some(()))
        })
    }
}

/// Settings of an epoll instance; `None` before Linux 6.9.
fn of_epoll(epoll: &Epoll) -> Option<Polling> {
    Polling::of_epoll(&epoll.0).ok()
}

fn all_is_put_back(signal: Signal) -> Result<()> {
    let sockets = Sockets::open()?;
    let poll = Poll::own(&[])?;
    sockets.all_become(ON)?;
    let later = UdpSocket::bind("127.0.0.1:0")?;
    becomes(&later, ON)?;
    let own = UdpSocket::bind("127.0.0.1:0")?;
    becomes(&own, ON)?;
    // An accepted connection inherits the settings of its listener, before it is found.
    let accepted = connected(&sockets.listener)?;
    ensure!(of(&accepted.1)? == ON);
    let epolls = [of_epoll(&sockets.epoll), of_epoll(&sockets.other_epoll)];
    if epolls[1].is_some() {
        until("the epoll instance is set", || {
            Ok((of_epoll(&sockets.epoll) == Some(ON)).then_some(()))
        })?;
        ensure!(of_epoll(&sockets.other_epoll) == Some(OFF));
    }
    // Settings that the application makes itself stay.
    let other = Polling { usecs: 7, ..OFF };
    other.set_socket(&own)?;

    poll.signal(signal)?;
    let (code, log) = poll.ended()?;
    let expected = (signal != Signal::SIGKILL).then_some(0);
    ensure!(code == expected, "{code:?}: {log}");
    for polling in sockets.polling()? {
        ensure!(polling == OFF, "{polling:?}: {log}");
    }
    ensure!(of(&later)? == OFF);
    ensure!(of(&accepted.1)? == OFF, "{log}");
    ensure!(of(&own)? == other);
    ensure!(of(&sockets.so)? == ON);
    ensure!(of_epoll(&sockets.epoll).is_none_or(|polling| polling == OFF));
    Ok(())
}

#[test]
fn sockets_of_a_process_poll_until_it_is_stopped() -> Result<()> {
    in_lab!();
    netns()?.run(|| all_is_put_back(Signal::SIGTERM))
}

#[test]
fn sockets_are_put_back_when_it_is_killed() -> Result<()> {
    in_lab!();
    netns()?.run(|| all_is_put_back(Signal::SIGKILL))
}

/// The socket is still open in a process without a rule.
#[test]
fn a_socket_that_was_passed_on_is_put_back() -> Result<()> {
    in_lab!();
    netns()?.run(|| {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        let first = Sleeper::with(socket.try_clone()?.into())?;
        let poll = Poll::start(&["--pid", &first.pid()])?;
        becomes(&socket, ON)?;
        let _second = Sleeper::with(socket.try_clone()?.into())?;
        drop(first);
        let (code, log) = poll.ended()?;
        ensure!(code == Some(0), "{log}");
        ensure!(log.contains("have ended"), "{log}");
        ensure!(of(&socket)? == OFF, "{log}");
        Ok(())
    })
}

/// A descriptor that is a socket, an epoll instance or a file by turns, as a busy server reuses
/// numbers: each search may list one and find another.
#[test]
fn descriptors_that_change_end_nothing() -> Result<()> {
    in_lab!();
    netns()?.run(|| {
        let mut slot = OwnedFd::from(UdpSocket::bind("127.0.0.1:0")?);
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        let epoll = Epoll::new(EpollCreateFlags::empty())?;
        let file = std::fs::File::open("/dev/null")?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for other in [socket.as_fd(), epoll.0.as_fd(), file.as_fd()] {
                        nix::unistd::dup2(other, &mut slot).expect("the slot is open");
                    }
                }
            });
            let tried = || {
                let mut poll = Poll::own(&[])?;
                // A new socket is found by a new search.
                for _ in 0..30 {
                    let new = UdpSocket::bind("127.0.0.1:0")?;
                    until("the socket is set, or the search ends", || {
                        let ended = poll.0.try_wait()?.is_some();
                        Ok((ended || of(&new)? == ON).then_some(()))
                    })?;
                }
                poll.signal(Signal::SIGTERM)?;
                let (code, log) = poll.ended()?;
                ensure!(code == Some(0) && !log.contains("before Linux"), "{log}");
                Ok(())
            };
            let tried = tried();
            stop.store(true, Ordering::Relaxed);
            tried
        })
    })
}

#[test]
fn others_are_left_alone() -> Result<()> {
    in_lab!();
    netns()?.run(|| {
        let [one, two] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let (_one, other) = (
            Sleeper::with(one.try_clone()?.into())?,
            Sleeper::with(two.try_clone()?.into())?,
        );
        let port =
            |socket: &UdpSocket| Ok::<_, std::io::Error>(socket.local_addr()?.port().to_string());
        for args in [
            vec!["--pid".to_owned(), other.pid()],
            vec![
                "--comm".to_owned(),
                "sleep".to_owned(),
                "--port".to_owned(),
                port(&two)?,
            ],
            vec![
                "--exe".to_owned(),
                std::fs::canonicalize(format!("/proc/{}/exe", other.pid()))?
                    .to_string_lossy()
                    .into_owned(),
                "--port".to_owned(),
                port(&two)?,
            ],
            vec!["--port".to_owned(), port(&two)?],
        ] {
            let args: Vec<_> = args.iter().map(String::as_str).collect();
            let poll = Poll::start(&args)?;
            becomes(&two, ON)?;
            ensure!(of(&one)? == OFF, "{args:?}");
            poll.signal(Signal::SIGTERM)?;
            let (code, log) = poll.ended()?;
            ensure!(code == Some(0), "{log}");
            ensure!(of(&two)? == OFF);
        }
        Ok(())
    })
}

/// Any user can give a process any name.
#[test]
fn a_name_alone_selects_processes_of_root() -> Result<()> {
    in_lab!();
    netns()?.run(|| {
        const NOBODY: &str = "65534";
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        let port = socket.local_addr()?.port();
        let _sleeper = Sleeper::of_user(NOBODY.parse()?, socket.try_clone()?.into())?;
        let number = port.to_string();
        let name = ["--comm", "sleep", "--port", &number];
        let poll = Poll::start(&name)?;
        // When the second is found, one search at least has seen all processes.
        for address in ["127.0.0.2", "127.0.0.3"] {
            let roots = UdpSocket::bind((address, port))?;
            let _sleeper = Sleeper::with(roots.try_clone()?.into())?;
            becomes(&roots, ON)?;
        }
        ensure!(of(&socket)? == OFF);
        poll.signal(Signal::SIGTERM)?;
        let (_, log) = poll.ended()?;
        ensure!(log.contains("--user 65534"), "{log}");

        for user in [NOBODY, "nobody"] {
            let poll = Poll::start(&[&name[..], &["--user", user]].concat())?;
            becomes(&socket, ON)?;
            poll.signal(Signal::SIGTERM)?;
            poll.ended()?;
            ensure!(of(&socket)? == OFF);
        }
        Ok(())
    })
}

/// No packet arrives: all waits end with sleep.
#[test]
fn polling_pauses_without_packets() -> Result<()> {
    in_lab!();
    netns()?.run(|| {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        socket.set_read_timeout(Some(Duration::from_millis(1)))?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _ = socket.recv(&mut [0; 1]);
                }
            });
            let tried = || {
                let poll = Poll::own(&["--adaptive"])?;
                for polling in [ON, OFF, ON] {
                    becomes(&socket, polling)?;
                }
                poll.signal(Signal::SIGTERM)?;
                let (code, log) = poll.ended()?;
                ensure!(code == Some(0), "{log}");
                ensure!(of(&socket)? == OFF, "{log}");
                Ok(())
            };
            let tried = tried();
            stop.store(true, Ordering::Relaxed);
            tried
        })
    })
}

#[test]
fn errors_are_reported() -> Result<()> {
    in_lab!();
    netns()?.run(|| {
        let mut child = Command::new("true").spawn()?;
        let gone = child.id().to_string();
        child.wait()?;
        for (args, code, why) in [
            (&["--pid", &gone][..], 1, "there is no process"),
            (&[], 2, "required"),
            (&["--comm", "a-name-of-17-chars"], 1, "15 characters"),
            (
                &["--comm", "x", "--user", "no-such-user"],
                2,
                "there is no user",
            ),
            (&["--exe", "nginx"], 1, "whole path"),
        ] {
            let (ended, log) = Poll::start(args)?.ended()?;
            ensure!(
                ended == Some(code) && log.contains(why),
                "{args:?}: {ended:?}, {log}"
            );
        }
        Ok(())
    })
}

/// Packets come by lo, which has no NAPI instances.
#[test]
fn polls_in_vain_are_reported() -> Result<()> {
    in_lab!();
    netns()?.run(|| {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        socket.set_read_timeout(Some(Duration::from_millis(1)))?;
        let poll = Poll::own(&[])?;
        becomes(&socket, ON)?;
        let status = until("it is in vain", || {
            let _ = socket.recv(&mut [0; 1]);
            let mut status = Command::new(RXSTEER);
            let text = String::from_utf8(status.arg("status").output()?.stdout)?;
            Ok(text
                .contains("none of its waits has polled")
                .then_some(text))
        })?;
        let line = format!("process {} (", std::process::id());
        ensure!(status.contains(&line), "{status}");
        poll.signal(Signal::SIGTERM)?;
        let (code, log) = poll.ended()?;
        ensure!(code == Some(0) && log.contains("`rxsteer napi`"), "{log}");
        Ok(())
    })
}

/// A cgroup (v2), removed on drop; it must be empty then.
struct Cgroup(PathBuf);

impl Cgroup {
    /// `None` if cgroup v2 is not mounted.
    fn new() -> Result<Option<Self>> {
        let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(Path::new);
        let Some(mount) = mounts
            .iter()
            .find(|mount| mount.join("cgroup.procs").exists())
        else {
            return Ok(None);
        };
        let path = mount.join(format!("rxsteer-test-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Some(Self(path)))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_cgroup_has_its_processes() -> Result<()> {
    in_lab!();
    netns()?.run(|| {
        let test = test_name!();
        let Some(cgroup) = Cgroup::new()? else {
            rxlab::testing::not_run(test, "no cgroup v2 hierarchy is mounted");
            return Ok(());
        };
        let [one, two] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let inside = Sleeper::with(one.try_clone()?.into())?;
        let _outside = Sleeper::with(two.try_clone()?.into())?;
        let poll = Poll::start(&["--cgroup", &cgroup.0.to_string_lossy()])?;
        // A process that joins later is found as well.
        std::fs::write(cgroup.0.join("cgroup.procs"), inside.pid())?;
        becomes(&one, ON)?;
        ensure!(of(&two)? == OFF);
        poll.signal(Signal::SIGTERM)?;
        let (code, log) = poll.ended()?;
        ensure!(code == Some(0), "{log}");
        ensure!(of(&one)? == OFF, "{log}");
        Ok(())
    })
}

#[test]
fn a_process_that_may_not_be_touched_is_reported() -> Result<()> {
    in_lab!();
    netns()?.run(|| {
        let test = test_name!();
        let status = std::fs::read_to_string("/proc/self/status")?;
        let capabilities = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
        let capabilities = u64::from_str_radix(capabilities.context("CapEff")?.trim(), 16)?;
        if capabilities >> CAP_SYS_PTRACE & 1 == 0 {
            rxlab::testing::not_run(
                test,
                "without CAP_SYS_PTRACE no process has more capabilities",
            );
            return Ok(());
        }
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        let sleeper = Sleeper::with(socket.try_clone()?.into())?;
        let (code, log) = Poll::confined(&["--pid", &sleeper.pid()])?.ended()?;
        ensure!(
            code == Some(1) && log.contains("may not be touched"),
            "{log}"
        );
        ensure!(of(&socket)? == OFF);

        // A rule for several processes continues with the others.
        let port = socket.local_addr()?.port().to_string();
        let mut poll = Poll::confined(&["--comm", "sleep", "--port", &port])?;
        let mut stderr = BufReader::new(poll.0.stderr.as_mut().context("it is piped")?);
        let mut line = String::new();
        while !line.contains("may not be touched") {
            line.clear();
            ensure!(stderr.read_line(&mut line)? > 0, "it has ended");
        }
        poll.signal(Signal::SIGTERM)?;
        let (code, log) = poll.ended()?;
        ensure!(code == Some(0), "{log}");
        ensure!(of(&socket)? == OFF);
        Ok(())
    })
}

#[test]
fn the_host_is_put_back() -> Result<()> {
    in_lab!(alone: "it sets the host's busy_poll");
    const FILE: &str = "/proc/sys/net/core/busy_poll";
    let host = || Ok::<_, std::io::Error>(std::fs::read_to_string(FILE)?.trim().to_owned());
    let before = host()?;
    ensure!(before != "50", "another process lets the host poll");
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let poll = Poll::own(&["--host-wide"])?;
        until("the host polls", || Ok((host()? == "50").then_some(())))?;
        poll.signal(signal)?;
        let (_, log) = poll.ended()?;
        ensure!(host()? == before, "{signal}: {log}");
    }
    Ok(())
}
