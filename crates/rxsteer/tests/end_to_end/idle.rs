// SPDX-License-Identifier: MIT OR Apache-2.0
//! Policies that depend on the load of CPUs, on real packets: an idle CPU near a busy application
//! is used, and packets stay INLINE while the polling CPU has room.
//!
//! Some tests need an idle CPU besides the polling CPU and the application's, that is, three CPUs:
//! `make guest TEST=idle` provides them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use rxlab::bench::setup::mode::Active;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::witness::Witness;
use rxlab::testing::app::{App, connected};
use rxlab::testing::has_to_wait;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, lab, on_idle_cpus, status, until};
use rxlab::{in_lab, test_name};
use rxsteer::api::status::Queue;
use rxsteer::daemon::options::{Options, RpsCpus};
use rxsteer::datapath::load::Pressure;
use rxsteer::datapath::policy::Policy;
use rxsteer::host::setting::Setting;
use rxsteer::host::topology::Topology;

const RFS_IDLE: Policy = Policy {
    idle: true,
    ..Policy::RFS
};

const RFS_ADAPT: Policy = Policy {
    adapt: true,
    ..Policy::RFS
};

/// A lab on a machine with at least `cpus` CPUs.
fn lab_of(test: &str, cpus: usize) -> Option<impl Sized> {
    let online = Topology::host().online().map_or(0, |cpus| cpus.len());
    if online < cpus {
        rxlab::testing::not_run(test, &format!("this machine has {online} CPUs, not {cpus}"));
        return None;
    }
    lab(test)
}

/// One flow to an application on CPU 1 that either polls its socket or sleeps.
struct Scene {
    bed: Testbed,
    flows: UdpFlows,
    polls: Arc<AtomicBool>,
    _app: App,
}

impl Scene {
    fn new() -> Result<Self> {
        let bed = Testbed::new(&LinkConfig::default())?;
        let dut = &bed.link.dut;
        let flows = UdpFlows::to(dut, 1);
        let socket = connected(&dut.netns, &flows)?;
        let polls = Arc::new(AtomicBool::new(false));
        let polling = polls.clone();
        let mut buffer = [0; 2048];
        let mut before = false;
        let take = move || {
            let now = polling.load(Ordering::Relaxed);
            if now != before {
                socket.set_nonblocking(now)?;
                before = now;
            }
            socket.recv(&mut buffer)
        };
        let app = App::start(&dut.netns, Box::new(take))?;
        app.move_to(OTHER_CPU)?;
        Ok(Self {
            bed,
            flows,
            polls,
            _app: app,
        })
    }

    fn polls(&self, polls: bool) {
        self.polls.store(polls, Ordering::Relaxed);
    }

    /// RPS alone keeps all flows INLINE.
    /// Flows may go to every CPU.
    fn options(&self, policy: Policy) -> Result<Options> {
        let online = Topology::host().online()?;
        Ok(Options {
            policy,
            rps_cpus: RpsCpus::Mask(online),
            ..self.bed.options(&[])
        })
    }

    fn steer(&self, policy: Policy) -> Result<Active<'_>> {
        Active::steer(&self.bed.link.dut, self.options(policy)?)
    }

    /// Sends 20 packets; returns the CPUs that processed them.
    fn processed_by(&self, active: &Active<'_>) -> Result<Vec<u32>> {
        let before = places(&queue(active)?);
        self.bed.send(Frames::Udp(self.flows.clone()), 20)?;
        let after = until("the packets are received", || {
            let q = queue(active)?;
            let now = places(&q);
            let all = now.values().sum::<u64>() == before.values().sum::<u64>() + 20;
            Ok((all && q.sums.queued == 0).then_some(now))
        })?;
        let more = |(cpu, n): (u32, u64)| (n > *before.get(&cpu).unwrap_or(&0)).then_some(cpu);
        Ok(after.into_iter().filter_map(more).collect())
    }

    /// Sends until rxsteer reports that the polling CPU is busy.
    fn until_busy(&self, active: &Active<'_>) -> Result<()> {
        until("the polling CPU is busy", || {
            self.processed_by(active)?;
            let load = queue(active)?.load;
            Ok(load.filter(|l| l.pressure != Pressure::Relaxed).map(drop))
        })
    }

    /// Sends until one CPU that is `right` processes all packets of a batch.
    fn comes_to(
        &self,
        active: &Active<'_>,
        what: &str,
        right: impl Fn(u32) -> bool,
    ) -> Result<u32> {
        let mut last = Vec::new();
        until(what, || {
            last = self.processed_by(active)?;
            Ok(match last[..] {
                [cpu] if right(cpu) => Some(cpu),
                _ => None,
            })
        })
        .with_context(|| format!("processed by {last:?}"))
    }
}

fn queue(active: &Active<'_>) -> Result<Queue> {
    Ok(status(active)?.devices[0].queues[0].clone())
}

/// Frames by the CPU that processed them; INLINE frames count for the polling CPU.
fn places(q: &Queue) -> BTreeMap<u32, u64> {
    let backlogs = q.backlogs.iter().map(|b| (b.cpu, b.terms.redirected));
    [(POLLING_CPU, q.inline)]
        .into_iter()
        .chain(backlogs)
        .collect()
}

/// Whether the polling CPU is the only one that shares a cache with the application's: packets of a
/// busy application then stay INLINE as long as that CPU has room.
fn only_the_polling_cpu_is_near(test: &str) -> bool {
    let near = Topology::host().cache_siblings(OTHER_CPU);
    let only = near.is_some_and(|near| {
        near.contains(POLLING_CPU)
            && near
                .iter()
                .all(|cpu| [OTHER_CPU, POLLING_CPU].contains(&cpu))
    });
    if only {
        rxlab::testing::not_run(
            test,
            "of all CPUs only the one that polls shares a cache with the application's",
        );
    }
    only
}

#[test]
fn a_busy_consumers_packets_go_to_an_idle_cpu_near_it() -> Result<()> {
    let test = test_name!();
    let Some(_guard) = lab_of(test, 3) else {
        return Ok(());
    };
    let near = Topology::host().cache_siblings(OTHER_CPU);
    let others = |cpu| cpu != OTHER_CPU && cpu != POLLING_CPU;
    if only_the_polling_cpu_is_near(test) {
        return Ok(());
    }
    let scene = Scene::new()?;
    let active = scene.steer(RFS_IDLE)?;
    scene.comes_to(
        &active,
        "a sleeping consumer's packets are on its CPU",
        |c| c == OTHER_CPU,
    )?;

    scene.polls(true);
    let chosen = scene.comes_to(&active, "they go elsewhere while it polls", others)?;
    if let Some(near) = near.filter(|near| near.iter().any(others)) {
        assert!(
            near.contains(chosen),
            "CPU {chosen} shares no cache: {near}"
        );
    }
    // Each call of the application updates the table.
    let moves = queue(&active)?.moves;
    for _ in 0..30 {
        assert_eq!(scene.processed_by(&active)?, [chosen]);
    }
    assert_eq!(queue(&active)?.moves, moves, "the flow stays where it is");

    scene.polls(false);
    scene.comes_to(&active, "they come back when it sleeps", |c| c == OTHER_CPU)?;
    active.stop()?;

    // Without +idle the packets stay.
    scene.polls(true);
    let active = scene.steer(Policy::RFS)?;
    scene.comes_to(&active, "plain RFS", |c| c == OTHER_CPU)?;
    for _ in 0..30 {
        assert_eq!(scene.processed_by(&active)?, [OTHER_CPU]);
    }
    active.stop()
}

#[test]
fn with_all_cpus_busy_the_flow_stays_with_its_application() -> Result<()> {
    in_lab!(alone: "its CPUs have to be as busy as it says");
    on_idle_cpus(test_name!(), || {
        let scene = Scene::new()?;
        let active = scene.steer(RFS_IDLE)?;
        let online = Topology::host().online()?;
        let _hogs = online
            .iter()
            .filter(|&cpu| cpu != OTHER_CPU)
            .map(|cpu| match cpu {
                // The generator runs on that CPU.
                POLLING_CPU => Hog::partly(cpu),
                _ => Hog::new(cpu),
            })
            .collect::<Result<Vec<_>>>()?;
        scene.until_busy(&active)?;
        scene.polls(true);
        scene.comes_to(&active, "it follows its application", |c| c == OTHER_CPU)?;
        let moves = queue(&active)?.moves;
        for _ in 0..30 {
            ensure!(scene.processed_by(&active)? == [OTHER_CPU]);
        }
        ensure!(queue(&active)?.moves == moves);
        active.stop()
    })
}

/// If the polling CPU is the only idle one, the flow stays there and costs no redirect.
#[test]
fn a_busy_consumers_packets_stay_where_they_are_received() -> Result<()> {
    in_lab!(alone: "its CPUs have to be idle");
    on_idle_cpus(test_name!(), || {
        let scene = Scene::new()?;
        let active = scene.steer(RFS_IDLE)?;
        let _hogs = Topology::host()
            .online()?
            .iter()
            .filter(|&cpu| cpu != OTHER_CPU && cpu != POLLING_CPU)
            .map(Hog::new)
            .collect::<Result<Vec<_>>>()?;
        scene.comes_to(&active, "its consumer sleeps", |c| c == OTHER_CPU)?;
        scene.polls(true);
        scene.comes_to(&active, "its consumer is busy", |c| c == POLLING_CPU)?;
        let moves = queue(&active)?.moves;
        for _ in 0..30 {
            ensure!(scene.processed_by(&active)? == [POLLING_CPU]);
        }
        ensure!(queue(&active)?.moves == moves);

        // The polling CPU becomes busy.
        let _hog = Hog::partly(POLLING_CPU)?;
        scene.until_busy(&active)?;
        scene.polls(false);
        scene.comes_to(&active, "its consumer sleeps again", |c| c == OTHER_CPU)?;
        scene.polls(true);
        for _ in 0..30 {
            ensure!(scene.processed_by(&active)? == [OTHER_CPU]);
        }
        active.stop()
    })
}

#[test]
fn a_chosen_cpu_may_go_offline() -> Result<()> {
    let test = test_name!();
    if has_to_wait(test, "it takes a CPU offline") {
        return Ok(());
    }
    let Some(_guard) = lab_of(test, 3) else {
        return Ok(());
    };
    if only_the_polling_cpu_is_near(test) {
        return Ok(());
    }
    let scene = Scene::new()?;
    let active = scene.steer(RFS_IDLE)?;
    scene.polls(true);
    let others = |cpu| cpu != OTHER_CPU && cpu != POLLING_CPU;
    let chosen = scene.comes_to(&active, "an idle CPU is chosen", others)?;
    let path = format!("/sys/devices/system/cpu/cpu{chosen}/online");
    let Ok(online) = Setting::keep(&path) else {
        rxlab::testing::not_run(test, "this machine's CPUs can't go offline");
        return Ok(());
    };
    let frames = Frames::Udp(scene.flows.clone());
    let witness = Witness::new(&scene.bed.link.dut, &frames)?;
    let paced = GeneratorConfig::lossless(frames, None).at(20_000);
    let wire = Generator::start(&scene.bed.link, 0, &paced)?;
    let before = queue(&active)?;
    online.set("0")?;
    until("the flow is elsewhere", || {
        let q = queue(&active)?;
        let on_chosen = |q: &Queue| places(q).get(&chosen).copied();
        let (then, now) = (on_chosen(&q), {
            std::thread::sleep(std::time::Duration::from_millis(50));
            queue(&active)?
        });
        Ok(
            (now.received > q.received && on_chosen(&now) == then && now.moves > before.moves)
                .then_some(()),
        )
    })?;
    online.set("1")?;
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    until("all is delivered", || {
        let q = queue(&active)?;
        let account = [q.sums.lost, q.sums.dropped, q.sums.shed];
        assert_eq!((account, q.imbalance()), ([0; 3], None), "{q:?}");
        Ok((q.sums.queued == 0).then_some(()))
    })?;
    assert!(witness.seen() > sent.sent / 2, "{}", witness.seen());
    assert_eq!(witness.reordered(), 0, "reordered: {}", witness.reordered());
    active.stop()
}

#[test]
fn while_the_polling_cpu_has_room_nothing_leaves_it() -> Result<()> {
    in_lab!(alone: "its CPUs have to be idle");
    on_idle_cpus(test_name!(), || {
        let scene = Scene::new()?;
        let active = scene.steer(RFS_ADAPT)?;
        for _ in 0..30 {
            ensure!(scene.processed_by(&active)? == [POLLING_CPU]);
        }
        ensure!(queue(&active)?.moves == 0);
        active.stop()?;

        let active = scene.steer(Policy::RFS)?;
        scene.comes_to(&active, "plain RFS takes it away", |c| c == OTHER_CPU)?;
        active.stop()
    })
}

/// Many flows leave under a flood, and all return to INLINE after it.
#[test]
fn flows_leave_a_saturated_cpu_and_return() -> Result<()> {
    in_lab!(alone: "its CPUs have to be idle");
    on_idle_cpus(test_name!(), || {
        let bed = Testbed::new(&LinkConfig::default())?;
        let dut = &bed.link.dut;
        let flows = UdpFlows::to(dut, 256);
        // No application receives: CPU 1 has nothing else to do.
        let options = Options {
            policy: Policy {
                adapt: true,
                ..Policy::RPS
            },
            ..bed.options(&[POLLING_CPU, OTHER_CPU])
        };
        let frames = Frames::Udp(flows.clone());
        let witness = Witness::new(dut, &frames)?;
        let active = Active::steer(dut, options)?;
        let flood = GeneratorConfig::flood(frames.clone());
        let flood = Generator::start(&bed.link, POLLING_CPU, &flood)?;
        until("flows leave the saturated CPU", || {
            let q = queue(&active)?;
            Ok((q.moves > 0 && q.sums.redirected > 1000).then_some(()))
        })?;
        flood.stop()?;
        let q = until("all is delivered", || {
            let q = queue(&active)?;
            Ok((q.sums.queued == 0).then_some(q))
        })?;
        assert_eq!(q.imbalance(), None, "{q:?}");
        assert!(witness.seen() > 1000, "{}", witness.seen());
        assert_eq!(witness.reordered(), 0, "reordered: {}", witness.reordered());
        until("all flows are INLINE again", || {
            let before = queue(&active)?;
            bed.send(frames.clone(), 256)?;
            let now = queue(&active)?;
            Ok((now.sums.redirected == before.sums.redirected).then_some(()))
        })?;
        active.stop()
    })
}
