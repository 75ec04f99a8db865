// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control socket: which answers a client believes, and that a slow client holds up no other.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::helpers::descriptors::{POLLED, limit_descriptors};
use crate::helpers::user::mount_run;
use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
};
use nix::unistd::Pid;
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::netns::{Netns, Thread};
use rxlab::lab::run_ns;
use rxlab::testing::testbed::{POLLING_CPU, Testbed, until};
use rxsteer::api::client;
use rxsteer::api::control::Request;
use rxsteer::api::explain::{Explanations, NAMES_MAX, Name, Question};
use rxsteer::datapath::flow::FlowHash;

const RXSTEER: &str = env!("CARGO_BIN_EXE_rxsteer");
const FOLDER: &str = "/run/rxsteer";
const ROOT: u32 = 0;
const NOBODY: u32 = 65534;

fn socket_of(netns: &Netns) -> Result<PathBuf> {
    Ok(Path::new(FOLDER).join(format!("net-{}.sock", netns.inode()?)))
}

/// `rxsteer status` as root.
fn status(netns: &Netns) -> Result<(Output, String)> {
    let output = netns.command(RXSTEER)?.arg("status").output()?;
    let stderr = String::from_utf8(output.stderr.clone())?;
    Ok((output, stderr))
}

/// Makes the calling thread alone one of this user, without capabilities unless that is root.
fn become_user(uid: u32) -> Result<()> {
    // SAFETY: no pointers. The C library's function would change all threads.
    let ret = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
    Errno::result(ret)?;
    Ok(())
}

/// Answers every request with the same bytes, until it is dropped.
struct Answerer {
    stop: Arc<AtomicBool>,
    thread: Option<Thread<()>>,
    path: Option<PathBuf>,
}

impl Answerer {
    /// `listening` runs in the namespace on the thread that answers.
    fn start(
        netns: &Netns,
        answer: Vec<u8>,
        listening: impl FnOnce() -> Result<Vec<UnixListener>> + Send + 'static,
    ) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let (tell, started) = std::sync::mpsc::channel();
        let thread = netns.spawn(None, "answerer", move || {
            let listeners = listening();
            let _ = tell.send(listeners.as_ref().map(drop).map_err(|e| format!("{e:#}")));
            for listener in listeners.iter().flatten().cycle() {
                if seen.load(Ordering::Relaxed) {
                    break;
                }
                match listener.accept() {
                    Ok((stream, _)) => {
                        let _ = BufReader::new(&stream).read_line(&mut String::new());
                        let _ = (&stream).write_all(&answer);
                    }
                    Err(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
                }
            }
        })?;
        started.recv()?.map_err(anyhow::Error::msg)?;
        Ok(Self {
            stop,
            thread: Some(thread),
            path: None,
        })
    }

    /// At the control socket's place, made by root, but served by `uid`.
    fn at_the_socket(netns: &Netns, uid: u32, answer: &[u8]) -> Result<Self> {
        let path = socket_of(netns)?;
        let at = path.clone();
        let mut this = Self::start(netns, answer.to_vec(), move || {
            match fs::create_dir(FOLDER) {
                Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e.into()),
                Err(_) => {}
                Ok(()) => fs::set_permissions(FOLDER, fs::Permissions::from_mode(0o700))?,
            }
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
            bind(socket.as_raw_fd(), &UnixAddr::new(&at)?)?;
            become_user(uid)?;
            listen(&socket, Backlog::new(8)?)?;
            Ok(vec![socket.into()])
        })?;
        this.path = Some(path);
        Ok(this)
    }
}

impl Drop for Answerer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

/// Abstract names, which every user can take, are not asked. The real one is, by root alone.
#[test]
fn a_user_cannot_answer_for_rxsteer() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let path = socket_of(&dut.netns)?;
    let at = path.clone();
    let answer = b"{\"Err\":\"of an impostor\"}\n".to_vec();
    let impostor = Answerer::start(&dut.netns, answer, move || {
        become_user(NOBODY)?;
        ensure!(
            UnixListener::bind(&at).is_err(),
            "anybody can make {}",
            at.display()
        );
        ["rxsteer", "rxsteer-poll"]
            .map(|name| {
                let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
                listener.set_nonblocking(true)?;
                Ok(listener)
            })
            .into_iter()
            .collect()
    })?;
    let (output, stderr) = status(&dut.netns)?;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stderr.contains("no rxsteer is running"), "{stderr}");

    let active = Active::steer(dut, bed.options(&[POLLING_CPU]))?;
    let (output, _) = status(&dut.netns)?;
    assert!(output.status.success(), "{output:?}");
    let mode = |path: &Path| Ok::<_, anyhow::Error>(fs::metadata(path)?.permissions().mode());
    assert_eq!(mode(&path)? & 0o777, 0o600);
    assert_eq!(mode(Path::new(FOLDER))? & 0o777, 0o700);
    let refused = dut.netns.run(|| {
        become_user(NOBODY)?;
        Ok(format!("{:#}", client::status().unwrap_err()))
    })?;
    assert!(refused.contains("only root"), "{refused}");
    active.stop()?;
    drop(impostor);
    Ok(())
}

/// Only root's answers are shown to root, without what a terminal would obey, and not without end.
#[test]
fn who_answers_is_examined_and_what() -> Result<()> {
    in_lab!();
    let netns = Netns::new("dut")?;
    let answer = b"{\"Err\":\"an answer\\u001b[2J, with an escape\"}\n";
    let nobody = Answerer::at_the_socket(&netns, NOBODY, answer)?;
    let (output, stderr) = status(&netns)?;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stderr.contains("not believed"), "{stderr}");
    assert!(!stderr.contains("an answer"), "{stderr}");
    drop(nobody);

    let root = Answerer::at_the_socket(&netns, ROOT, answer)?;
    let (_, stderr) = status(&netns)?;
    assert!(
        stderr.contains("an answer\\u{1b}[2J, with an escape"),
        "{stderr}"
    );
    drop(root);

    let mut endless = vec![b'x'; 65 << 20];
    endless.push(b'\n');
    let _root = Answerer::at_the_socket(&netns, ROOT, &endless)?;
    let (_, stderr) = status(&netns)?;
    assert!(stderr.contains("more than 64 MiB"), "{stderr}");
    Ok(())
}

/// Clients that send nothing, or half a request, are still connected when others have their answers.
#[test]
fn slow_clients_hold_up_nobody() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let active = Active::steer(dut, bed.options(&[POLLING_CPU]))?;
    let path = socket_of(&dut.netns)?;
    let slow: Vec<UnixStream> = [&b""[..], b"\"sta", b""]
        .iter()
        .map(|bytes| {
            let mut stream = UnixStream::connect(&path)?;
            stream.write_all(bytes)?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        })
        .collect::<Result<_>>()?;
    let waits = |mut stream: &UnixStream| {
        let read = stream.read(&mut [0; 1]);
        read.is_err_and(|e| e.kind() == ErrorKind::WouldBlock)
    };
    let (output, _) = status(&dut.netns)?;
    assert!(output.status.success(), "{output:?}");
    assert!(slow.iter().all(waits));

    // What is no text, or no request, is answered too.
    for request in [&b"\"\xff\xfe\"\n"[..], b"\"no-request\"\n", b"{\n"] {
        let mut stream = UnixStream::connect(&path)?;
        stream.write_all(request)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        assert!(answer.contains("not a request"), "{answer:?}");
    }
    until("slow clients are given up", || {
        Ok((!slow.iter().any(waits)).then_some(()))
    })?;
    active.stop()
}

/// The line that answers a request.
fn reply_of(stream: &UnixStream) -> Result<String> {
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply)?;
    Ok(reply)
}

/// The most memory that a process has had, bytes.
fn peak(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kib.context("VmHWM in kB")?.parse::<u64>()? << 10)
}

/// A question about so many flows, by their hashes.
fn question(flows: usize) -> Result<Vec<u8>> {
    let hash = |i| Name::Hash(FlowHash(i as u32));
    let question = Question {
        names: (0..flows).map(hash).collect(),
        limit: 10_000_000,
        ..Question::default()
    };
    let mut line = serde_json::to_vec(&Request::Explain(question))?;
    line.push(b'\n');
    Ok(line)
}

/// What is asked takes little memory: requests and questions that are too long are refused, in words.
#[test]
fn questions_take_little_memory() -> Result<()> {
    in_lab!();
    const MOST: u64 = 32 << 20;
    let bed = Testbed::new(&LinkConfig::default())?;
    let mut child = run(&bed)?;
    let path = socket_of(&bed.link.dut.netns)?;
    let ask = |request: &[u8]| {
        let mut stream = UnixStream::connect(&path)?;
        // The server may not take all of it.
        let _ = stream.write_all(request);
        reply_of(&stream)
    };
    let before = peak(child.id())?;
    let long = ask(&question(1_200_000)?)?;
    let many = ask(&question(NAMES_MAX + 1)?)?;
    // The control: the most that can be asked is answered.
    let most = ask(&question(NAMES_MAX)?)?;
    let taken = peak(child.id())? - before;
    println!("{} MiB", taken >> 20);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM)?;
    child.wait()?;
    assert!(taken < MOST, "{taken} bytes");
    assert!(long.contains("more than 1 MiB"), "{:.200}", long);
    assert!(many.contains("4096 can be asked about"), "{:.200}", many);
    let most: Result<Explanations, String> = serde_json::from_str(&most)?;
    let most = most.map_err(anyhow::Error::msg)?;
    assert_eq!((most.flows.len(), most.total), (NAMES_MAX, NAMES_MAX));
    Ok(())
}

/// Above the most clients, and far above it: each that is refused reads why.
#[test]
fn who_is_refused_is_told() -> Result<()> {
    in_lab!();
    const CLIENTS: usize = 32;
    const REFUSED: usize = 100;
    let bed = Testbed::new(&LinkConfig::default())?;
    let netns = &bed.link.dut.netns;
    let mut child = run(&bed)?;
    let path = socket_of(netns)?;
    let connect = || Ok::<_, anyhow::Error>(UnixStream::connect(&path)?);
    let waiting: Vec<_> = (0..CLIENTS).map(|_| connect()).collect::<Result<_>>()?;
    // Clients that write at once, and those that do after the server has answered.
    for _ in 0..REFUSED {
        let mut at_once = connect()?;
        at_once.write_all(b"\"status\"\n")?;
        let reply = reply_of(&at_once)?;
        assert!(reply.contains("too many ask at once"), "{reply:?}");

        let error = netns.run(client::counters).expect_err("there are too many");
        let error = format!("{error:#}");
        assert!(error.contains("too many ask at once"), "{error}");
    }
    // The control: with one less, the next one is served.
    drop(waiting);
    until("a client is served", || {
        Ok(netns.run(client::counters).ok().map(drop))
    })?;
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM)?;
    child.wait()?;
    Ok(())
}

/// The id of the thread that accepts clients.
fn accepting_thread(pid: u32) -> Result<Pid> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?;
        if fs::read_to_string(task.path().join("comm"))? == "control\n" {
            let name = task.file_name().into_string().expect("a number");
            return Ok(Pid::from_raw(name.parse()?));
        }
    }
    anyhow::bail!("no thread of {pid} accepts clients")
}

/// A client that can't be accepted waits, and costs no CPU time.
#[test]
fn without_descriptors_clients_wait() -> Result<()> {
    const TIME: Duration = Duration::from_secs(1);
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let mut child = run(&bed)?;
    let thread = accepting_thread(child.id())?;
    let before = limit_descriptors(child.id(), POLLED)?;
    let mut client = UnixStream::connect(socket_of(&bed.link.dut.netns)?)?;
    client.write_all(b"\"no-request\"\n")?;
    let used = run_ns(thread)?;
    std::thread::sleep(TIME);
    let used = Duration::from_nanos(run_ns(thread)? - used);
    limit_descriptors(child.id(), before)?;
    let mut answer = String::new();
    client.read_to_string(&mut answer)?;
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM)?;
    child.wait()?;
    assert!(answer.contains("not a request"), "{answer:?}");
    assert!(used < TIME / 20, "{used:?} of CPU time in {TIME:?}");
    Ok(())
}

/// Starts `rxsteer run`; returns when it answers.
fn run(bed: &Testbed) -> Result<Child> {
    let dut = &bed.link.dut;
    let child = dut
        .netns
        .command(RXSTEER)?
        .args(["run", &dut.name])
        .stderr(Stdio::null())
        .spawn()?;
    until("rxsteer answers", || {
        let status = dut.netns.run(client::status);
        Ok(status.is_ok_and(|s| s.pid == child.id()).then_some(()))
    })?;
    Ok(child)
}

#[test]
fn the_sockets_of_killed_ones_are_removed() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let netns = &bed.link.dut.netns;
    let path = socket_of(netns)?;
    let end = |mut child: Child, signal| -> Result<()> {
        kill(Pid::from_raw(child.id() as i32), signal)?;
        child.wait().context("it ends")?;
        Ok(())
    };
    end(run(&bed)?, Signal::SIGKILL)?;
    assert!(path.exists(), "nobody could remove it");
    let (_, stderr) = status(netns)?;
    assert!(stderr.contains("no rxsteer is running"), "{stderr}");

    // Those of other namespaces go too, unless somebody listens.
    let [dead, live] = ["dead", "live"].map(|name| Path::new(FOLDER).join(format!("test-{name}")));
    drop(UnixListener::bind(&dead)?);
    let listener = UnixListener::bind(&live)?;
    let second = run(&bed)?;
    let left = [&dead, &live].map(|path| path.exists());
    drop(listener);
    fs::remove_file(&live)?;
    assert_eq!(left, [false, true]);

    // The control: a socket that is served is not replaced.
    let third = netns.command(RXSTEER)?.args(["run", "lo"]).output()?;
    let stderr = String::from_utf8(third.stderr)?;
    let pid = format!("(process {})", second.id());
    assert!(stderr.contains(&pid), "{stderr}");
    end(second, Signal::SIGTERM)?;
    assert!(!path.exists(), "it removes its socket");
    Ok(())
}

/// A rxsteer that runs in a mount namespace with a `/run` of its own, as in a container. Killed on drop.
struct Apart(Child);

impl Apart {
    /// Returns once it steers, as its log says, or has ended; and that log.
    fn start(netns: &Netns, mode: &str, device: &str) -> Result<(Self, String)> {
        let script = "mount -t tmpfs none /run && exec \"$0\" \"$@\"";
        let mut command = netns.command("unshare")?;
        command.args(["--mount", "sh", "-c", script, RXSTEER, "run"]);
        command.args(["--mode", mode, device]);
        let mut this = Self(command.stderr(Stdio::piped()).spawn()?);
        let stderr = this.0.stderr.take().context("it was piped")?;
        let mut log = String::new();
        for line in BufReader::new(stderr).lines() {
            log += &line?;
            if log.contains(STEERS) {
                break;
            }
        }
        Ok((this, log))
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Of the log of a process that steers.
const STEERS: &str = "stop with Ctrl-C";

#[test]
fn two_that_see_no_common_file_do_not_steer_one_namespace() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let other = Testbed::new(&LinkConfig::default())?;
    let (dut, elsewhere) = (&bed.link.dut, &other.link.dut);
    for (first_mode, second_mode, device) in [
        ("native", "softirq", &*dut.name),
        ("softirq", "native", &*dut.name),
        // Nothing is attached to a device that the two have in common.
        ("softirq", "softirq", "none*"),
    ] {
        let (first, log) = Apart::start(&dut.netns, first_mode, &dut.name)?;
        assert!(log.contains(STEERS), "{log}");
        let (_second, log) = Apart::start(&dut.netns, second_mode, device)?;
        assert!(
            log.contains("another rxsteer steers in this network"),
            "{log}"
        );

        // Controls: it starts in another namespace, and here once the first was killed.
        let (_third, log) = Apart::start(&elsewhere.netns, second_mode, &elsewhere.name)?;
        assert!(log.contains(STEERS), "{log}");
        drop(first);
        let (_fourth, log) = Apart::start(&dut.netns, second_mode, device)?;
        assert!(log.contains(STEERS), "{log}");
    }
    Ok(())
}

#[test]
fn what_is_no_socket_is_left_alone() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let netns = &bed.link.dut.netns;
    mount_run(netns)?;
    let [folder, file] = ["folder", "file"].map(|name| Path::new(FOLDER).join(name));
    netns.run(|| {
        fs::create_dir_all(&folder)?;
        Ok(fs::write(&file, "")?)
    })?;
    let mut child = run(&bed)?;
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM)?;
    assert!(child.wait()?.success());
    assert!(netns.run(|| Ok(folder.is_dir() && file.is_file()))?);
    Ok(())
}
