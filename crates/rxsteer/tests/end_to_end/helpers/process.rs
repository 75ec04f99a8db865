// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer run` as a process, its end and its log.

use std::fs;
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::lab::generator::Generator;
use rxlab::lab::hog::Hog;
use rxlab::lab::netns::Netns;
use rxlab::lab::receiver::Receiver;
use rxlab::lab::run_ns;
use rxlab::testing::testbed::*;
use rxsteer::api::client;
use rxsteer::api::status::{self, Queue, Status, Terms};
use rxsteer::host::device::{AttachedXdp, Device};

use super::threads::{cpumaps, kthreads, renice};

pub const RXSTEER: &str = env!("CARGO_BIN_EXE_rxsteer");

/// `rxsteer run` as a process in a namespace, killed on drop.
pub struct Rxsteer {
    pub netns: Netns,
    pub child: Child,
    log: Option<JoinHandle<String>>,
}

/// Exit status and log.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub log: String,
}

/// Arguments that make the tables alone decide, in native mode: policy rfs. Unless `args` have
/// another policy, mode or limit.
pub fn plain(args: &[&str]) -> Vec<&'static str> {
    let unless_set = |option: &str, default| {
        let set = args.iter().any(|arg| arg.starts_with(option));
        (!set).then_some(default)
    };
    let policy = unless_set("--policy=", "--policy=rfs");
    let mode = unless_set("--mode=", "--mode=native");
    let limit = unless_set("--flow-limit=", "--flow-limit=0");
    let options = [policy, mode, limit];
    options.into_iter().flatten().collect()
}

impl Rxsteer {
    /// The command that starts it.
    pub fn command(netns: &Netns, args: &[&str]) -> Result<Command> {
        let mut command = netns.command(RXSTEER)?;
        command.arg("run").args(plain(args)).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Ok(command)
    }

    /// Returns once it steers, or with its exit status and log if it ended.
    pub fn start(netns: &Netns, args: &[&str]) -> Result<std::result::Result<Self, Ended>> {
        Self::spawn(netns, Self::command(netns, args)?, true)
    }

    /// As [`Self::start`], by this command; its log has a reader only with `log_is_read`.
    pub fn spawn(
        netns: &Netns,
        mut command: Command,
        log_is_read: bool,
    ) -> Result<std::result::Result<Self, Ended>> {
        let mut child = command.stderr(Stdio::piped()).spawn()?;
        let mut stderr = child.stderr.take().context("it was piped")?;
        let log = std::thread::spawn(move || {
            let mut log = String::new();
            if log_is_read {
                let _ = stderr.read_to_string(&mut log);
            }
            log
        });
        let mut this = Self {
            netns: netns.clone(),
            child,
            log: Some(log),
        };
        let pid = this.child.id();
        let steers = until("rxsteer steers, or ends", || {
            let answer = this.netns.run(client::status).is_ok_and(|s| s.pid == pid);
            let ended = this.child.try_wait()?.is_some();
            Ok((answer || ended).then_some(!ended))
        })?;
        Ok(if steers { Ok(this) } else { Err(this.ended()?) })
    }

    /// As [`Self::start`]; it must steer.
    pub fn steering(netns: &Netns, args: &[&str]) -> Result<Self> {
        Self::start(netns, args)?.map_err(|ended| anyhow::anyhow!("{ended:?}"))
    }

    pub fn status(&self) -> Result<Status> {
        self.netns.run(client::status)
    }

    /// Packets that all queues have received.
    pub fn received(&self) -> Result<u64> {
        Ok(queues(&self.status()?).map(|queue| queue.received).sum())
    }

    /// Sums over all queues.
    pub fn sums(&self) -> Result<Terms> {
        Ok(sums(queues(&self.status()?)))
    }

    /// A device, if it is in the status, with its queues, which another device may show.
    pub fn device(&self, name: &str) -> Result<Option<status::Device>> {
        let devices = self.status()?.devices;
        let named = |name: &str| devices.iter().find(|d| d.device == name).cloned();
        let mut device = named(name);
        if let Some(device) = &mut device
            && let Some(account) = device.queues_of.as_deref().and_then(named)
        {
            device.queues = account.queues;
        }
        Ok(device)
    }

    /// The sums once nothing is queued and the account of each queue closes. While packets are on
    /// their way it does not: its counters are read one after the other.
    pub fn at_rest(&self) -> Result<Terms> {
        until("nothing is queued, and the accounts close", || {
            let status = self.status()?;
            let rests = |queue: &Queue| queue.sums.queued == 0 && queue.imbalance().is_none();
            Ok(queues(&status).all(rests).then(|| sums(queues(&status))))
        })
        .with_context(|| format!("{:?}", self.status()))
    }

    /// CPU time of all threads.
    pub fn cpu_time(&self) -> Result<Duration> {
        let mut ns = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let task = task?.file_name().into_string().expect("a number");
            ns += run_ns(Pid::from_raw(task.parse()?))?;
        }
        Ok(Duration::from_nanos(ns))
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.child.id() as i32), signal)?)
    }

    /// Waits until it has ended.
    pub fn ended(mut self) -> Result<Ended> {
        until("rxsteer ends", || Ok(self.child.try_wait()?))?;
        let code = self.child.wait()?.code();
        let log = self.log.take().context("it is read once")?;
        let log = log.join().expect("the reader does not panic");
        Ok(Ended { code, log })
    }

    /// Kills its child processes, of which there is one at least, and then it.
    pub fn kill_with_children(mut self) -> Result<()> {
        let pid = self.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        ensure!(!children.trim().is_empty(), "it has no child process");
        for child in children.split_whitespace() {
            kill(Pid::from_raw(child.parse()?), Signal::SIGKILL)?;
        }
        self.signal(Signal::SIGKILL)?;
        self.child.wait()?;
        Ok(())
    }

    pub fn stop(self, signal: Signal) -> Result<Ended> {
        self.signal(signal)?;
        self.ended()
    }
}

impl Drop for Rxsteer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn queues(status: &Status) -> impl Iterator<Item = &Queue> {
    status.devices.iter().flat_map(|device| &device.queues)
}

/// Sums over these queues.
pub fn sums<'a>(queues: impl IntoIterator<Item = &'a Queue>) -> Terms {
    let mut sums = Terms::default();
    queues.into_iter().for_each(|queue| sums += &queue.sums);
    sums
}

/// Runs another command to its end.
pub fn rxsteer(netns: &Netns, args: &[&str]) -> Result<Output> {
    Ok(netns.command(RXSTEER)?.args(args).output()?)
}

/// The counters of a queue in the final log lines.
#[derive(Debug)]
pub struct Account {
    pub received: u64,
    pub redirected: u64,
    pub dropped: u64,
    pub shed: u64,
    pub lost: u64,
}

/// The account of the first queue 0 in the log; both of its sums close.
pub fn account(log: &str) -> Result<Account> {
    let line = log.lines().find(|line| line.contains("queue 0: received "));
    account_of(line.with_context(|| format!("no account in {log}"))?)
}

/// The accounts of all queues; a rxsteer that started anew has several for each.
pub fn accounts(log: &str) -> Result<Vec<Account>> {
    let lines = log.lines().filter(|line| is_account(line));
    lines.map(account_of).collect()
}

fn is_account(line: &str) -> bool {
    line.contains(": received ") && line.contains(" queue ")
}

fn account_of(line: &str) -> Result<Account> {
    let (_, terms) = line.split_once(": received ").context("not an account")?;
    let numbers: Vec<u64> = terms
        .split(|c: char| !c.is_ascii_digit())
        .filter(|word| !word.is_empty())
        .map(|word| Ok(word.parse()?))
        .collect::<Result<_>>()?;
    let [
        received,
        inline,
        redirected,
        dropped,
        shed,
        limited,
        no_flow,
        delivered,
        lost,
        vanished,
        queued,
    ] = numbers[..]
    else {
        bail!("eleven terms, not {line:?}");
    };
    assert_eq!(
        received,
        inline + redirected + dropped + shed + limited + no_flow,
        "{line:?}"
    );
    assert_eq!(redirected, delivered + lost + vanished + queued, "{line:?}");
    Ok(Account {
        received,
        redirected,
        dropped,
        shed,
        lost: lost + vanished,
    })
}

pub fn attached(bed: &Testbed) -> Result<Option<AttachedXdp>> {
    let dut = &bed.link.dut;
    dut.netns.run(|| Ok(Device::open(&dut.name)?.xdp))
}

/// All datagrams sent and not counted as dropped arrive in order.
pub fn all_arrive_in_order(sink: Receiver, count: u64) -> Result<()> {
    until("all datagrams received", || {
        Ok((sink.received() + sink.dropped()? >= count).then_some(()))
    })
    .with_context(|| format!("{} of {count}", sink.received()))?;
    let report = sink.stop()?;
    assert_eq!(report.received[0] + report.dropped, count, "{report:?}");
    assert_eq!(report.reordered, 0, "{report:?}");
    Ok(())
}

/// Options under which backlogs never overflow.
pub fn roomy<'a>(device: &'a str, rest: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec![device, "--mode=native", "--backlog=16368"];
    args.extend(rest);
    args
}

/// Frames wait in the backlogs for [`OTHER_CPU`], whose threads have too little time. After this
/// value's end they have it.
pub struct Congestion {
    kthreads: Vec<u32>,
    _hog: Hog,
}

impl Congestion {
    /// Returns once more than 500 frames are queued. There must be backlogs, and traffic for them.
    pub fn of(rxsteer: &Rxsteer) -> Result<Self> {
        let kthreads = kthreads(&cpumaps(rxsteer.child.id())?)?;
        let hog = Hog::new(OTHER_CPU)?;
        renice(&kthreads, 19)?;
        let congestion = Self {
            kthreads,
            _hog: hog,
        };
        until("packets are queued", || {
            let queue = &rxsteer.status()?.devices[0].queues[0];
            Ok((queue.sums.queued > 500).then_some(()))
        })?;
        Ok(congestion)
    }
}

impl Drop for Congestion {
    fn drop(&mut self) {
        let _ = renice(&self.kthreads, 0);
    }
}

/// Returns once packets are redirected.
pub fn redirects(rxsteer: &Rxsteer) -> Result<()> {
    until("packets are redirected", || {
        let queue = &rxsteer.status()?.devices[0].queues[0];
        Ok((queue.sums.redirected > 0).then_some(()))
    })
    .with_context(|| format!("{:?}", rxsteer.status()))
}

/// Returns once the generator has sent `count` more frames.
pub fn sends(wire: &Generator, count: u64) -> Result<()> {
    let sent = wire.sent();
    until("more packets have come", || {
        Ok((wire.sent() > sent + count).then_some(()))
    })
}
