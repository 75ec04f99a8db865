// SPDX-License-Identifier: MIT OR Apache-2.0
//! The faults, one by one.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rxlab::lab::hog::Hog;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, until};

use super::world::{MASKS, POLICIES, Struck, UNDER_WAY, World};
use crate::helpers::descriptors::{POLLED, limit_descriptors};
use crate::helpers::process::{attached, rxsteer, sums};
use crate::helpers::threads::{cpumaps, kthreads};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// SIGTERM while frames wait, and a new start.
    Stop,
    /// SIGKILL, and a new start.
    Kill,
    /// Other policies, masks and table sizes by `rxsteer set`.
    Set,
    /// A CPU goes offline and comes back.
    Offline,
    /// Other work, of any priority, takes a CPU.
    Hog,
    /// Another program switches kernel RPS on and off.
    KernelRps,
    /// rxsteer may open no more files.
    Descriptors,
    /// The device gets another number of receive queues.
    Queues,
    /// The device is deleted, and made again with the same name.
    Device,
}

impl Fault {
    pub const ALL: [Self; 9] = [
        Self::Stop,
        Self::Kill,
        Self::Set,
        Self::Offline,
        Self::Hog,
        Self::KernelRps,
        Self::Descriptors,
        Self::Queues,
        Self::Device,
    ];

    /// Returns when rxsteer runs again, and everything else is as before.
    pub fn strike(self, world: &mut World) -> Result<Struck> {
        match self {
            Self::Stop => stop(world),
            Self::Kill => kill(world),
            Self::Set => set(world),
            Self::Offline => offline(world),
            Self::Hog => hog(world),
            Self::KernelRps => kernel_rps(world),
            Self::Descriptors => descriptors(world),
            Self::Queues => queues(world),
            Self::Device => device(world),
        }
    }
}

fn pause(world: &mut World, most: usize) {
    sleep(Duration::from_millis(world.random.below(most) as u64));
}

/// Frames wait for [`OTHER_CPU`] from now on.
fn busy(world: &mut World) -> Result<Hog> {
    let hog = Hog::new(OTHER_CPU)?;
    pause(world, 30);
    Ok(hog)
}

fn stop(world: &mut World) -> Result<Struck> {
    let life = world.life.take().context("rxsteer runs")?;
    let hog = busy(world)?;
    life.rxsteer.signal(Signal::SIGTERM)?;
    pause(world, 50);
    drop(hog);
    let missing = life.stop()?;
    pause(world, 30);
    world.start()?;
    Ok(Struck {
        missing: Some(missing),
        gap: true,
        ..Struck::default()
    })
}

fn kill(world: &mut World) -> Result<Struck> {
    let life = world.life.take().context("rxsteer runs")?;
    let cpumaps = cpumaps(life.rxsteer.child.id())?;
    let hog = busy(world)?;
    let begin = world.sent().saturating_sub(UNDER_WAY);
    let ended = life.rxsteer.stop(Signal::SIGKILL)?;
    ensure!(ended.code.is_none(), "not killed: {ended:?}");
    drop(hog);
    until("the program and the threads are gone", || {
        let gone = attached(&world.bed)?.is_none() && kthreads(&cpumaps)?.is_empty();
        Ok(gone.then_some(()))
    })?;
    let end = world.sent() + UNDER_WAY;
    pause(world, 30);
    world.start()?;
    Ok(Struck {
        // Order is not promised across a kill, and its account is lost.
        breaks: Some(begin..end),
        gap: true,
        ..Struck::default()
    })
}

/// `rxsteer set`; fails with its message.
fn run_set(world: &World, args: &[&str]) -> Result<()> {
    let output = rxsteer(&world.bed.link.dut.netns, &[&["set"], args].concat())?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "set {args:?}: {stderr}");
    Ok(())
}

fn set_policy(world: &mut World) -> Result<()> {
    let policy = format!("--policy={}", world.random.of(&POLICIES));
    run_set(world, &[&policy])
}

fn set(world: &mut World) -> Result<Struck> {
    run_set(world, &["--policy=off"])?;
    pause(world, 30);
    set_policy(world)?;
    world.storm(2)?;
    let name = world.bed.link.dut.name.clone();
    let mask = format!("--rps-cpus={}", world.random.of(&MASKS));
    run_set(world, &[&name, &mask])?;
    let hog = busy(world)?;
    let size = world.random.of(&[0, 1024, 4096, 65_536]);
    let sizes = [
        format!("--rps-flow-cnt={size}"),
        format!("--rps-sock-flow-entries={}", 8 * size),
    ];
    let resized = run_set(world, &[&sizes[0], &sizes[1]]);
    drop(hog);
    let refused = resized.err().map(|e| e.to_string()).unwrap_or_default();
    // Each wait for the kernel's threads takes seconds beside such work.
    let late = refused.contains("may still make the change");
    // Tables stay as they are if that takes too long.
    ensure!(
        refused.is_empty() || late || refused.contains("did not drain"),
        "{refused}"
    );
    until("rxsteer answers", || {
        Ok(world.life()?.rxsteer.status().is_ok().then_some(()))
    })?;
    Ok(Struck::harmless())
}

fn offline(world: &mut World) -> Result<Struck> {
    let Some(online) = world.online.take() else {
        return Ok(Struck::harmless());
    };
    online.set("0")?;
    let steps = 1 + world.random.below(10);
    let stormed = world.storm(steps);
    online.set("1")?;
    world.online = Some(online);
    stormed?;
    Ok(Struck::harmless())
}

fn hog(world: &mut World) -> Result<Struck> {
    let cpu = *world.random.of(&[POLLING_CPU, OTHER_CPU]);
    let time = Duration::from_millis(20 + world.random.below(300) as u64);
    let hog = match world.random.below(3) {
        0 => Hog::new(cpu)?,
        1 => Hog::partly(cpu)?,
        _ => Hog::real_time(cpu, time)?,
    };
    sleep(time / 2);
    world.storm(2)?;
    sleep(time / 2);
    drop(hog);
    Ok(Struck::harmless())
}

fn kernel_rps(world: &mut World) -> Result<Struck> {
    let dut = &world.bed.link.dut;
    let path = format!("/sys/class/net/{}/queues/rx-0/rps_cpus", dut.name);
    let write = |mask: &str| dut.netns.run(|| Ok(fs::write(&path, mask)?));
    let reports = || {
        let unsteered = &world.life()?.rxsteer.status()?.devices[0].unsteered;
        anyhow::Ok(unsteered.iter().any(|why| why.contains("kernel RPS is on")))
    };
    let begin = world.sent().saturating_sub(UNDER_WAY);
    write("2")?;
    until("kernel RPS is reported", || Ok(reports()?.then_some(())))?;
    write("0")?;
    until("kernel RPS is not reported", || {
        Ok((!reports()?).then_some(()))
    })?;
    Ok(Struck {
        // The report says that flows may lose their order.
        breaks: Some(begin..world.sent() + UNDER_WAY),
        ..Struck::harmless()
    })
}

fn descriptors(world: &mut World) -> Result<Struck> {
    let pid = world.life()?.rxsteer.child.id();
    let before = limit_descriptors(pid, POLLED)?;
    // It can't be asked meanwhile, and backlogs can't be created.
    pause(world, 300);
    let hog = busy(world)?;
    drop(hog);
    limit_descriptors(pid, before)?;
    let rxsteer = &mut world.life.as_mut().context("rxsteer runs")?.rxsteer;
    until("rxsteer answers again", || {
        let ended = rxsteer.child.try_wait()?;
        ensure!(ended.is_none(), "rxsteer has ended: {ended:?}");
        Ok(rxsteer.status().is_ok().then_some(()))
    })?;
    Ok(Struck::harmless())
}

/// As by `ethtool -L`. For more queues than before rxsteer starts anew.
fn queues(world: &mut World) -> Result<Struck> {
    let steered = world.life()?.queues()?.len();
    let then = 3 - world.queues;
    world.set_queues(then)?;
    pause(world, 30);
    // The driver drops what waits in the queues.
    let overtaken = world.end_traffic()?;
    until("all queues are steered", || {
        let all = steered.max(then as usize);
        Ok((world.life()?.queues().ok().map(|q| q.len()) == Some(all)).then_some(()))
    })?;
    begin_again(world, overtaken)
}

/// Traffic and accounts begin again.
fn begin_again(world: &mut World, overtaken: u64) -> Result<Struck> {
    let before = world.before()?;
    world.send()?;
    Ok(Struck {
        again: Some((overtaken, before)),
        ..Struck::harmless()
    })
}

fn device(world: &mut World) -> Result<Struck> {
    // The kernel does not hold a device for the frames in a cpumap.
    run_set(world, &["--policy=off"])?;
    let mut last = u64::MAX;
    until("nothing is redirected", || {
        let sums = sums(&world.life()?.queues()?);
        let rests = last == sums.redirected && sums.queued == 0;
        last = sums.redirected;
        sleep(Duration::from_millis(50));
        Ok(rests.then_some(()))
    })?;
    world.bed.link.delete()?;
    let overtaken = world.end_traffic()?;
    until("it is said that the device is gone", || {
        let status = world.life()?.rxsteer.status();
        let gone =
            status.is_ok_and(|s| s.devices[0].unsteered.iter().any(|w| w.contains("is gone")));
        Ok(gone.then_some(()))
    })?;
    pause(world, 30);
    world.make_device()?;
    let ifindex = world.bed.link.dut.ifindex;
    until("the new one is steered", || {
        let Ok(status) = world.life()?.rxsteer.status() else {
            return Ok(None);
        };
        let new = &status.devices[0];
        Ok((new.ifindex == ifindex && new.mode == "native").then_some(()))
    })?;
    set_policy(world)?;
    begin_again(world, overtaken)
}
