// SPDX-License-Identifier: MIT OR Apache-2.0
//! A CPU that runs no ordinary threads, because a real-time thread occupies it, holds up neither the
//! start nor the end.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::netns::bind;
use rxlab::testing::testbed::*;

/// Time for which a round's hog occupies the CPU.
const OCCUPIED: Duration = Duration::from_secs(3);

/// By so much later in each round rxsteer starts. The kernel's 50 ms come at a certain time after the hog
/// began: rounds that all took as long as the first would meet them again and again.
const LATER: Duration = Duration::from_millis(100);

/// The kernel limits real-time threads: ordinary ones may run for 50 ms in a second. A round in which
/// they did so at the wrong time shows nothing, and is repeated.
const ROUNDS: u32 = 10;

/// `rxsteer run`, killed on drop.
struct Rxsteer {
    child: Child,
    log: mpsc::Receiver<String>,
}

impl Rxsteer {
    /// Starts it; `args` after the device.
    fn run(bed: &Testbed, args: &[&str]) -> Result<Self> {
        let dut = &bed.link.dut;
        let mut child = dut
            .netns
            .command(env!("CARGO_BIN_EXE_rxsteer"))?
            .args(["run", &dut.name, "--mode=native"])
            .args(args)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let stderr = BufReader::new(child.stderr.take().context("it was piped")?);
        let (write, log) = mpsc::channel();
        thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = write.send(line);
            }
        });
        Ok(Self { child, log })
    }

    /// The log up to the first line with `text`.
    fn until(&self, text: &str) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        while !lines
            .last()
            .is_some_and(|line: &String| line.contains(text))
        {
            let line = self.log.recv_timeout(Duration::from_secs(60));
            lines.push(line.with_context(|| format!("no {text:?} after {lines:?}"))?);
        }
        Ok(lines)
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.pid() as i32), Signal::SIGTERM)?;
        let status = until("rxsteer ends", || Ok(self.child.try_wait()?))?;
        assert!(status.success(), "{status}");
        Ok(())
    }
}

impl Drop for Rxsteer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An ordinary thread that waits to run on a CPU.
struct Canary(Arc<AtomicBool>);

impl Canary {
    fn new(cpu: u32) -> Result<Self> {
        let arrived = Arc::new(AtomicBool::new(false));
        let arrives = arrived.clone();
        let (tell, tid) = mpsc::channel();
        let (go, may_go) = mpsc::channel();
        thread::spawn(move || {
            let _ = tell.send(nix::unistd::gettid());
            let go: Result<(), _> = may_go.recv();
            arrives.store(go.is_ok(), Ordering::Relaxed);
        });
        bind(tid.recv()?, cpu)?;
        go.send(())?;
        Ok(Self(arrived))
    }

    fn waits(&self) -> bool {
        !self.0.load(Ordering::Relaxed)
    }
}

/// The line that reports a CPU whose thread has not arrived.
fn reports(log: &[String]) -> bool {
    log.iter()
        .any(|line| line.contains(&format!("CPU {OTHER_CPU} has not run a thread")))
}

#[test]
fn a_start_does_not_wait_for_the_cpu() -> Result<()> {
    in_lab!(alone: "a real-time thread takes a CPU from all others");
    let bed = Testbed::new(&LinkConfig::default())?;
    let cpus = format!("--rps-cpus={OTHER_CPU}");
    for round in 0..ROUNDS {
        let hog = Hog::real_time(OTHER_CPU, OCCUPIED)?;
        thread::sleep(LATER * round);
        let run = Rxsteer::run(&bed, &[&cpus])?;
        let log = run.until("steering")?;
        let occupied = hog.runs();
        drop(hog);
        run.stop()?;
        if reports(&log) {
            assert!(occupied, "{log:?}");
            // The control: a CPU that runs threads is not reported.
            let run = Rxsteer::run(&bed, &[&cpus])?;
            let log = run.until("steering")?;
            assert!(!reports(&log), "{log:?}");
            return run.stop();
        }
    }
    anyhow::bail!("no start went on without the CPU's thread")
}

/// Whether the thread that makes backlogs for the CPU waits in the kernel.
fn maker_waits(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten();
    let name = format!("(make-{OTHER_CPU}) D ");
    tasks.flatten().any(|task| {
        let stat = fs::read_to_string(task.path().join("stat"));
        stat.is_ok_and(|stat| stat.contains(&name))
    })
}

#[test]
fn an_end_does_not_wait_for_the_cpu() -> Result<()> {
    in_lab!(alone: "a real-time thread takes a CPU from all others");
    let bed = Testbed::new(&LinkConfig::default())?;
    let flows = UdpFlows::to(&bed.link.dut, 100);
    let args = [
        &format!("--rps-cpus={OTHER_CPU}")[..],
        "--policy=rps",
        "--flow-limit=0",
    ];
    for _ in 0..ROUNDS {
        let run = Rxsteer::run(&bed, &args)?;
        run.until("steering")?;
        let hog = Hog::real_time(OTHER_CPU, OCCUPIED)?;
        let canary = Canary::new(OTHER_CPU)?;
        bed.send(Frames::Udp(flows.clone()), 200)?;
        let waited = until("the backlog's thread waits", || {
            let waits = maker_waits(run.pid());
            Ok((waits || !hog.runs()).then_some(waits))
        })?;
        run.stop()?;
        if waited && canary.waits() && hog.runs() {
            drop(hog);
            // The control: now the thread arrives.
            return until("the thread arrives", || Ok((!canary.waits()).then_some(())));
        }
    }
    anyhow::bail!("the end came only after an ordinary thread had run on the CPU")
}
