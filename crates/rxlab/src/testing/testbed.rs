// SPDX-License-Identifier: MIT OR Apache-2.0
//! Setup of end-to-end tests: a link into a NIC that is polled on one CPU; waiting for conditions.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rxsteer::api::status::{Queue, Status};
use rxsteer::daemon::options::{Mode, Options, RpsCpus};
use rxsteer::datapath::backlogs::LIMIT_MAX;
use rxsteer::datapath::policy::Policy;
use rxsteer::host::cpu_times::{busy_shares, cpu_times};
use rxsteer::host::cpumask::CpuMask;
use rxsteer::host::netdev;

use crate::bench::setup::mode::Active;
use crate::lab;
use crate::lab::frame::{Frames, UdpFlows};
use crate::lab::generator::{Generator, GeneratorConfig};
use crate::lab::link::{Link, LinkConfig};
use crate::lab::netns::Netns;
use crate::lab::nic::Nic;
use crate::lab::receiver::{Receiver, ReceiverConfig};
use crate::testing::app::App;

/// The CPU that polls every queue, unless a test says otherwise.
pub const POLLING_CPU: u32 = 0;

/// The second CPU that tests need.
pub const OTHER_CPU: u32 = 1;

/// Limit on waiting for a condition. No test depends on the time that it takes; in an emulated
/// machine, loading the programs takes 20 s.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Serializes labs: what follows in the test runs alone. Ends the test as not run, with a report,
/// if this machine allows no lab or has one CPU; with `napi`, also if its kernel does not list the
/// NAPI instances of a veth. The report names the function, or the argument.
///
/// `in_lab!(alone: WHY)` is for a test that needs the CPUs for itself or changes the host: `make test`
/// runs no other at the same time.
#[macro_export]
macro_rules! in_lab {
    () => {
        $crate::in_lab!($crate::test_name!());
    };
    (alone: $why:literal) => {
        if $crate::testing::has_to_wait($crate::test_name!(), $why) {
            return Ok(());
        }
        $crate::in_lab!();
    };
    (napi) => {
        $crate::in_lab!();
        if !$crate::testing::testbed::instances_are_told($crate::test_name!()) {
            return Ok(());
        }
    };
    ($name:expr) => {
        // One of them puts back what the test changes.
        [
            option_env!("CARGO_BIN_EXE_rxsteer"),
            option_env!("CARGO_BIN_EXE_rxlab"),
        ]
        .into_iter()
        .flatten()
        .for_each(rxsteer::host::guardian::run_by);
        let Some(_lab) = $crate::testing::testbed::lab($name) else {
            return Ok(());
        };
    };
}

/// For [`in_lab!`].
pub fn lab(test: &str) -> Option<MutexGuard<'static, ()>> {
    static SERIAL: Mutex<()> = Mutex::new(());
    let guard = SERIAL.lock().unwrap_or_else(|poison| poison.into_inner());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let reason = match lab::can_run() {
        Ok(()) if cpus > 1 => return Some(guard),
        Ok(()) => "this machine has one CPU".to_owned(),
        Err(error) => format!("{error:#}"),
    };
    super::not_run(test, &reason);
    None
}

/// Whether the kernel lists the NAPI instances of a veth.
pub fn instances_are_told(test: &str) -> bool {
    const LO: u32 = 1; // any device does
    let told = !matches!(netdev::napis(LO), Ok(None));
    if !told {
        super::not_run(
            test,
            "before Linux 6.8 a veth does not show its NAPI instances",
        );
    }
    told
}

/// Repeats `answer` until it returns Some; fails after `TIMEOUT`.
pub fn until<T>(what: &str, mut answer: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(answer) = answer()? {
            return Ok(answer);
        }
        if start.elapsed() > TIMEOUT {
            bail!("still not after {TIMEOUT:?}: {what}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs a test of what rxsteer does while [`POLLING_CPU`] and [`OTHER_CPU`] are idle. If it returns an error,
/// and other programs keep a CPU busy, nothing is shown: it is reported as not run, with the error. What holds
/// on any CPU, such as the order, is to be asserted instead: a panic is a failure.
pub fn on_idle_cpus(test: &str, body: impl FnOnce() -> Result<()>) -> Result<()> {
    const LOOK: Duration = Duration::from_millis(500);
    const BUSY: f64 = 0.25;
    let Err(error) = body() else {
        return Ok(());
    };
    let (start, before) = (Instant::now(), cpu_times()?);
    std::thread::sleep(LOOK);
    let shares = busy_shares(&before, &cpu_times()?, start.elapsed().as_secs_f64());
    if shares.values().all(|share| *share < BUSY) {
        return Err(error);
    }
    super::spoilt(test, &format!("other programs use the CPUs: {error:#}"));
    Ok(())
}

/// A link into a NIC.
pub struct Testbed {
    pub link: Link,
    pub nic: Nic,
}

impl Testbed {
    pub fn new(config: &LinkConfig) -> Result<Self> {
        Self::between(&Netns::new("tester")?, &Netns::new("dut")?, config)
    }

    /// Another link between the same two hosts; `config.id` must differ.
    pub fn between(tester: &Netns, dut: &Netns, config: &LinkConfig) -> Result<Self> {
        let link = Link::new(tester, dut, config)?;
        let nic = Nic::new(&link.dut, &vec![POLLING_CPU; config.queues as usize])?;
        Ok(Self { link, nic })
    }

    /// Makes the link again after it was deleted, with the same names.
    pub fn make_again(&mut self, config: &LinkConfig) -> Result<()> {
        self.link = self.link.again(config)?;
        self.nic = Nic::new(&self.link.dut, &vec![POLLING_CPU; config.queues as usize])?;
        Ok(())
    }

    /// RPS in native mode, with backlogs for everything that a test sends, and tables so large that
    /// hardly two flows share an entry.
    pub fn options(&self, cpus: &[u32]) -> Options {
        Options {
            policy: Policy::RPS,
            flow_limit: 0,
            mode: Mode::Native,
            rps_cpus: RpsCpus::Mask(mask(cpus)),
            backlog: Some(LIMIT_MAX),
            rps_sock_flow_entries: 1 << 22,
            rps_flow_cnt: 1 << 18,
            ..Options::new([self.link.dut.name.as_str()])
        }
    }

    /// A receiver that counts datagrams by the CPU that processed them, with room for everything
    /// that a test sends.
    pub fn receiver_by_cpu(&self, flows: &UdpFlows) -> Result<Receiver> {
        Receiver::start(
            &self.link.dut.netns,
            &ReceiverConfig {
                threads: vec![None, None],
                by_cpu: true,
                rcvbuf: 64 << 20,
                ..ReceiverConfig::new(SocketAddr::new(flows.daddr, flows.dport))
            },
        )
    }

    /// A receiver with one socket that checks the order of its datagrams. Datagrams that are in
    /// order there were delivered in order.
    pub fn receiver_in_order(&self, flows: &UdpFlows) -> Result<Receiver> {
        let config = ReceiverConfig {
            check_order: true,
            rcvbuf: 64 << 20,
            ..ReceiverConfig::new(SocketAddr::new(flows.daddr, flows.dport))
        };
        Receiver::start(&self.link.dut.netns, &config)
    }

    /// Sends exactly `count` frames into queue 0, without loss.
    pub fn send(&self, frames: Frames, count: u64) -> Result<()> {
        let paced = GeneratorConfig::lossless(frames, Some(count)).at(200_000);
        let report = Generator::start(&self.link, 0, &paced)?.wait()?;
        assert_eq!((report.sent, report.lost), (count, 0));
        Ok(())
    }

    /// Sends until every flow is where rxsteer wants it, for masks without the polling CPU. The
    /// frames of the first poll, and those before a backlog exists, are processed inline.
    pub fn warm_up(&self, active: &Active<'_>, flows: &UdpFlows) -> Result<Queue> {
        let mut before = at_rest(active, 0, 0)?;
        until("all flows where rxsteer wants them", || {
            self.send(Frames::Udp(flows.clone()), flows.nr_flows.into())?;
            let now = at_rest(active, 0, before.received + u64::from(flows.nr_flows))?;
            let inline = now.inline - before.inline;
            before = now.clone();
            Ok((inline == 0).then_some(now))
        })
    }
}

pub fn mask(cpus: &[u32]) -> CpuMask {
    cpus.iter().copied().collect()
}

/// The status, however long an overloaded machine takes for the answer.
pub fn status(active: &Active<'_>) -> Result<Status> {
    until("rxsteer answers", || match active.status() {
        Err(error) if format!("{error:#}").contains("did not answer") => Ok(None),
        status => Ok(Some(status?.expect("rxsteer keeps account"))),
    })
}

/// Counters of a device's queue 0 once `received` frames have come and none is under way. Fails
/// unless both of its sums close.
pub fn at_rest(active: &Active<'_>, device: usize, received: u64) -> Result<Queue> {
    queue_at_rest(active, device, 0, received)
}

/// Like [`at_rest`], for any queue.
pub fn queue_at_rest(
    active: &Active<'_>,
    device: usize,
    queue: usize,
    received: u64,
) -> Result<Queue> {
    let mut last = Queue::default();
    let queue = until("all frames received, and none queued", || {
        last = status(active)?.devices[device].queues[queue].clone();
        Ok((last.received >= received && last.sums.queued == 0).then(|| last.clone()))
    })
    .map_err(|error| error.context(format!("{last:?}")))?;
    assert_eq!(queue.received, received, "{queue:?}");
    assert_eq!(queue.imbalance(), None, "{queue:?}");
    Ok(queue)
}

/// Waits until `count` datagrams were received or dropped, and stops the receiver. Fails if some
/// were dropped; returns the received datagrams by thread.
pub fn received(receiver: Receiver, count: u64) -> Result<Vec<u64>> {
    until("all datagrams received", || {
        Ok((receiver.received() + receiver.dropped()? >= count).then_some(()))
    })?;
    let report = receiver.stop()?;
    assert_eq!(report.dropped, 0, "{report:?}");
    Ok(report.received)
}

/// As [`received`]; fails also if some datagrams were out of order.
pub fn received_in_order(receiver: Receiver, count: u64) -> Result<()> {
    until("all datagrams received", || {
        Ok((receiver.received() + receiver.dropped()? >= count).then_some(()))
    })?;
    let report = receiver.stop()?;
    assert_eq!((report.reordered, report.dropped), (0, 0), "{report:?}");
    Ok(())
}

/// Frames processed inline, and in the backlog of [`OTHER_CPU`].
pub fn places(q: &Queue) -> [u64; 2] {
    let backlog = q.backlogs.iter().find(|b| b.cpu == OTHER_CPU);
    [q.inline, backlog.map_or(0, |b| b.terms.redirected)]
}

/// Whether all packets that `send` sends are processed at `cpu`, [`POLLING_CPU`] or [`OTHER_CPU`].
pub fn all_at(active: &Active<'_>, cpu: u32, mut send: impl FnMut() -> Result<()>) -> Result<bool> {
    let queue = || Ok::<_, anyhow::Error>(status(active)?.devices[0].queues[0].clone());
    let before = queue()?;
    send()?;
    let after = until("the packets are received", || {
        let now = queue()?;
        Ok((now.received > before.received && now.sums.queued == 0).then_some(now))
    })?;
    let [inline, redirected] = [0, 1].map(|i| places(&after)[i] - places(&before)[i]);
    let elsewhere = if cpu == POLLING_CPU {
        redirected
    } else {
        inline
    };
    Ok(elsewhere == 0 && inline + redirected > 0)
}

/// The flow follows its application until that ends; then it is RPS's again, whose mask is
/// [`OTHER_CPU`].
pub fn follows_until_it_ends(
    active: &Active<'_>,
    app: App,
    mut send: impl FnMut() -> Result<()>,
) -> Result<()> {
    for cpu in [OTHER_CPU, POLLING_CPU] {
        app.move_to(cpu)?;
        until("the flow follows", || {
            Ok(all_at(active, cpu, &mut send)?.then_some(()))
        })?;
    }
    drop(app);
    until("the flow is RPS's again", || {
        Ok(all_at(active, OTHER_CPU, &mut send)?.then_some(()))
    })
}

/// The flow does not follow its application to [`POLLING_CPU`], but stays at RPS's only CPU,
/// [`OTHER_CPU`].
pub fn follows_not(
    active: &Active<'_>,
    app: &App,
    mut send: impl FnMut() -> Result<()>,
) -> Result<()> {
    app.move_to(POLLING_CPU)?;
    until("the flow is at the CPU of its hash", || {
        Ok(all_at(active, OTHER_CPU, &mut send)?.then_some(()))
    })?;
    for _ in 0..10 {
        if !all_at(active, OTHER_CPU, &mut send)? {
            bail!("the flow follows");
        }
    }
    Ok(())
}

/// The flow follows its application to each CPU.
pub fn follows(active: &Active<'_>, app: &App, mut send: impl FnMut() -> Result<()>) -> Result<()> {
    for cpu in [OTHER_CPU, POLLING_CPU, OTHER_CPU] {
        app.move_to(cpu)?;
        until(&format!("the flow follows to CPU {cpu}"), || {
            Ok(all_at(active, cpu, &mut send)?.then_some(()))
        })?;
    }
    Ok(())
}
