// SPDX-License-Identifier: MIT OR Apache-2.0
//! A backlog whose thread does not get its CPU: a real-time thread occupies it.

use std::mem::offset_of;
use std::time::Duration;

use crate::helpers::maps::map_of;
use crate::helpers::threads::{cpumaps, kthreads};
use anyhow::{Context, Result, bail};
use libbpf_rs::{MapCore, MapFlags};
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::slow::slow;
use rxlab::testing::testbed::*;
use rxsteer::api::status::{Backlog, Queue};
use rxsteer::daemon::options::Options;
use rxsteer::host::sched::Class;
use rxsteer::types::backlog_wait;

/// Flows that begin one after the other, each with a frame. Between two of them is a frame of a flow
/// that goes on.
const NR_FLOWS: u32 = 32_768;

/// Frames per second: the backlog never fills up.
const RATE: u64 = 4_000;

/// Frames by which a location is judged.
const FEW: u64 = 400;

/// Frames of these that may be elsewhere: counters are read while they change, and now and then a
/// new flow shares the slot of one whose frames wait.
const TOLERANCE: u64 = 8;

/// Time for which the CPU is occupied, a round. The kernel limits real-time threads: now and then
/// ordinary ones run for some milliseconds, and a round without a stall is repeated.
const OCCUPIED: Duration = Duration::from_secs(2);
const ROUNDS: u32 = 5;

fn queue(active: &Active<'_>) -> Result<Queue> {
    Ok(status(active)?.devices[0].queues[0].clone())
}

/// The backlog of the CPU that is occupied.
fn backlog(active: &Active<'_>) -> Result<Backlog> {
    let backlogs = queue(active)?.backlogs;
    let backlog = backlogs.into_iter().find(|b| b.cpu == OTHER_CPU);
    Ok(backlog.unwrap_or_default())
}

/// Waits until this share of the frames received, in percent, is at a location; returns false if
/// `over` before.
fn share(
    active: &Active<'_>,
    percent: u64,
    of: fn(&Queue) -> u64,
    mut over: impl FnMut() -> Result<bool>,
) -> Result<bool> {
    until("the packets are where they are expected", || {
        let before = queue(active)?;
        let after = until("more packets", || {
            let now = queue(active)?;
            Ok((now.received > before.received + FEW).then_some(now))
        })?;
        let expected = (after.received - before.received) * percent / 100;
        let there = of(&after) - of(&before);
        Ok(match there.abs_diff(expected) <= TOLERANCE {
            true => Some(true),
            false => over()?.then_some(false),
        })
    })
}

/// Occupies the CPU until the backlog is stalled.
fn stall(active: &Active<'_>) -> Result<Hog> {
    for _ in 0..ROUNDS {
        let hog = Hog::real_time(OTHER_CPU, OCCUPIED)?;
        let stalled = until("a stall, or the end of the round", || {
            let stalled = backlog(active)?.stalled;
            Ok((stalled || !hog.runs()).then_some(stalled))
        })?;
        if stalled {
            return Ok(hog);
        }
    }
    bail!("the CPU is occupied, and no stall is reported")
}

/// Returns how many frames of the flow that goes on were overtaken; `None` if the CPU was free again
/// before the locations could be seen.
fn overtaken(guarded: bool) -> Result<Option<u64>> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows {
        flood: 1,
        ..UdpFlows::to(dut, NR_FLOWS)
    };
    let options = Options {
        unguarded: !guarded,
        ..bed.options(&[OTHER_CPU])
    };
    let sink = bed.receiver_in_order(&flows)?;
    let active = Active::steer(dut, options)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(RATE);
    let wire = Generator::start(&bed.link, POLLING_CPU, &paced)?;
    let [inline, redirected]: [fn(&Queue) -> u64; 2] = [|q| q.inline, |q| q.sums.redirected];
    let never = || Ok(false);
    let recovered = || Ok(!backlog(&active)?.stalled);

    share(&active, 100, redirected, never)?;
    assert!(!backlog(&active)?.stalled);
    let hog = stall(&active)?;
    // New flows are inline; the flow with frames in the backlog stays, unless nothing guards it.
    let percent = if guarded { 50 } else { 100 };
    let avoided = share(&active, percent, inline, || Ok(!hog.runs()))?;
    drop(hog);
    let moved = share(&active, 100, inline, recovered)?;
    until("it recovers", || Ok(recovered()?.then_some(())))?;
    share(&active, 100, redirected, never)?;

    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    let queue = at_rest(&active, 0, sent.sent)?;
    assert_eq!((queue.sums.lost, queue.dropped()), (0, 0), "{queue:?}");
    active.stop()?;
    until("all received", || {
        Ok((sink.received() + sink.dropped()? >= sent.sent).then_some(()))
    })?;
    let report = sink.stop()?;
    assert_eq!(report.dropped, 0, "{report:?}");
    Ok((avoided && moved).then_some(report.reordered))
}

fn overtaken_in_a_round(guarded: bool) -> Result<u64> {
    for _ in 0..ROUNDS {
        if let Some(overtaken) = overtaken(guarded)? {
            return Ok(overtaken);
        }
    }
    bail!("new flows went to the stalled backlog in {ROUNDS} rounds")
}

#[test]
fn new_flows_avoid_a_backlog_without_progress() -> Result<()> {
    in_lab!(alone: "a real-time thread takes a CPU from all others");
    let overtaken = overtaken_in_a_round(true)?;
    assert_eq!(overtaken, 0, "overtaken: {overtaken}");
    // The control.
    assert!(overtaken_in_a_round(false)? > 0);
    Ok(())
}

/// Samples in this bucket and the next one are of half a second and more.
const LONG: usize = 19;

/// Number of long samples and of all samples of the backlog of the CPU that is occupied.
fn samples(active: &Active<'_>) -> Result<[u64; 2]> {
    let waits = backlog(active)?.waits;
    Ok([waits.buckets[LONG..].iter().sum(), waits.samples()])
}

/// A number of the samples of the first queue's backlog for a CPU, as the kernel side has it.
fn counted(cpu: u32, offset: usize) -> Result<u64> {
    let map = map_of(std::process::id(), "backlog_waits")?;
    let value = map.lookup(&cpu.to_ne_bytes(), MapFlags::ANY)?;
    let value = value.context("an array has all elements")?;
    Ok(u64::from_ne_bytes(value[offset..offset + 8].try_into()?))
}

#[test]
fn a_stall_is_seen_as_a_long_wait() -> Result<()> {
    in_lab!(alone: "a real-time thread takes a CPU from all others");
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let active = Active::steer(dut, bed.options(&[OTHER_CPU]))?;
    let paced = GeneratorConfig::lossless(Frames::Udp(UdpFlows::to(dut, 10)), None).at(RATE);
    let wire = Generator::start(&bed.link, POLLING_CPU, &paced)?;
    // The control: while the thread has its CPU, waits are short.
    until("twenty short waits", || {
        let [long, all] = samples(&active)?;
        let now = until("samples", || {
            let now = samples(&active)?;
            Ok((now[1] >= all + 20).then_some(now))
        })?;
        Ok((now[0] == long).then_some(()))
    })?;
    let [before, _] = samples(&active)?;
    let mut is_seen = false;
    for _ in 0..ROUNDS {
        let hog = stall(&active)?;
        is_seen = until("a long wait, or the end of the round", || {
            let is_seen = samples(&active)?[0] > before;
            Ok((is_seen || !hog.runs()).then_some(is_seen))
        })?;
        drop(hog);
        until("it recovers", || {
            Ok((!backlog(&active)?.stalled).then_some(()))
        })?;
        is_seen = is_seen || samples(&active)?[0] > before;
        if is_seen {
            break;
        }
    }
    assert!(is_seen, "{:?}", backlog(&active)?.waits);

    let sent = wire.stop()?;
    at_rest(&active, 0, sent.sent)?;
    // Nothing was lost: each sample that began is in a bucket.
    let backlog = backlog(&active)?;
    let begun = counted(OTHER_CPU, offset_of!(backlog_wait, nr_begun))?;
    assert_eq!(
        counted(OTHER_CPU, offset_of!(backlog_wait, nr_left_out))?,
        0
    );
    assert_eq!(backlog.waits.samples(), begun, "{backlog:?}");
    let due = backlog.terms.redirected.div_ceil(64);
    assert!((20..=due).contains(&begun), "{backlog:?}");
    active.stop()
}

/// Scheduling policy and nice value of a thread.
fn class(thread: u32) -> (i32, i32) {
    // SAFETY: no memory is involved.
    unsafe {
        (
            libc::sched_getscheduler(thread as i32),
            libc::getpriority(libc::PRIO_PROCESS, thread),
        )
    }
}

/// The thread of the only backlog, which frames reach.
fn thread(active: &Active<'_>) -> Result<u32> {
    until("the backlog delivers", || {
        Ok((backlog(active)?.terms.delivered > 0).then_some(()))
    })?;
    let threads = kthreads(&cpumaps(std::process::id())?)?;
    Ok(*threads.first().context("it has a thread")?)
}

#[test]
fn threads_have_the_class_of_the_option() -> Result<()> {
    in_lab!();
    for (option, expected) in [
        (Class::Nice(-7), (libc::SCHED_OTHER, -7)),
        (Class::default(), (libc::SCHED_OTHER, 5)),
        (Class::Batch, (libc::SCHED_BATCH, 5)),
        (Class::Fifo, (libc::SCHED_FIFO, 5)),
    ] {
        let bed = Testbed::new(&LinkConfig::default())?;
        let options = Options {
            backlog_sched: option,
            ..bed.options(&[OTHER_CPU])
        };
        let active = Active::steer(&bed.link.dut, options)?;
        bed.warm_up(&active, &UdpFlows::to(&bed.link.dut, 10))?;
        // The class is set after the backlog was made.
        let thread = thread(&active)?;
        until(&option.to_string(), || {
            Ok((class(thread) == expected).then_some(()))
        })?;
        active.stop()?;
    }
    Ok(())
}

/// Time that a packet costs at this rate: with a real-time thread, all of the CPU's time.
const COST: Duration = Duration::from_millis(1);

#[test]
fn a_real_time_thread_has_a_budget() -> Result<()> {
    in_lab!(alone: "a real-time thread takes a CPU from all others");
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let options = Options {
        backlog_sched: Class::Fifo,
        // What waits at the end takes the thread a tenth of a second.
        backlog: Some(100),
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(UdpFlows::to(dut, 10)), None).at(RATE);
    let wire = Generator::start(&bed.link, POLLING_CPU, &paced)?;
    let thread = thread(&active)?;
    let becomes =
        |what: &str, policy| until(what, || Ok((class(thread).0 == policy).then_some(())));
    becomes("a real-time thread", libc::SCHED_FIFO)?;
    // The control: with little to do it stays one, for ten intervals and more.
    let before = queue(&active)?.received;
    until("a second of frames", || {
        assert_eq!(class(thread).0, libc::SCHED_FIFO);
        Ok((queue(&active)?.received > before + RATE).then_some(()))
    })?;
    slow(dut, COST)?;
    for _ in 0..3 {
        becomes(
            "an ordinary thread, for half of an interval",
            libc::SCHED_OTHER,
        )?;
        becomes("a real-time thread again", libc::SCHED_FIFO)?;
    }
    wire.stop()?;
    active.stop()
}
