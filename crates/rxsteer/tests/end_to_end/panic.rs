// SPDX-License-Identifier: MIT OR Apache-2.0
//! A panic of a thread of `rxsteer run` ends it as SIGTERM does, and a log without a reader does not
//! end it.

use crate::helpers::process::*;
use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::testing::not_run;
use rxlab::testing::testbed::*;

/// The end of a rxsteer whose backlog held frames, under traffic.
struct End {
    ended: Ended,
    /// Packets that were received after a later one of their flow.
    overtaken: u64,
}

/// Runs rxsteer with RXSTEER_PANIC set, and ends it by `end` once frames are queued.
fn end_of(panic: &str, end: impl FnOnce(&Testbed, &Rxsteer) -> Result<()>) -> Result<End> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    // Each flow sends once a millisecond: less than a thread needs for the backlog.
    let flows = UdpFlows::to(dut, 50);
    let sink = bed.receiver_in_order(&flows)?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(50_000);
    let wire = Generator::start(&bed.link, 0, &paced)?;
    let args = roomy(&dut.name, &["--rps-cpus=1", "--policy=rps"]);
    let mut command = Rxsteer::command(&dut.netns, &args)?;
    command.env("RXSTEER_PANIC", panic);
    let rxsteer = Rxsteer::spawn(&dut.netns, command, true)?;
    let rxsteer = rxsteer.map_err(|ended| anyhow::anyhow!("{ended:?}"))?;
    redirects(&rxsteer)?;
    let congestion = Congestion::of(&rxsteer)?;
    end(&bed, &rxsteer)?;
    sends(&wire, 5_000)?;
    drop(congestion);
    let ended = rxsteer.ended()?;
    assert_eq!(attached(&bed)?, None);
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    // A kill leaves no account, and drops nothing at a backlog that holds all.
    let dropped = account(&ended.log).map_or(0, |account| account.dropped + account.shed);
    let arrive = sent.sent - dropped;
    until("all datagrams received", || {
        Ok((sink.received() + sink.dropped()? >= arrive).then_some(()))
    })
    .with_context(|| format!("{} of {arrive}; {ended:?}", sink.received()))?;
    let overtaken = sink.stop()?.reordered;
    Ok(End { ended, overtaken })
}

#[test]
fn a_panic_returns_every_flow_inline() -> Result<()> {
    in_lab!();
    if !cfg!(debug_assertions) {
        not_run(
            "a_panic_returns_every_flow_inline",
            "only debug builds provoke panics",
        );
        return Ok(());
    }
    for panic in ["serving", "other"] {
        let End { ended, overtaken } = end_of(panic, |_, running| {
            // Its answer may never come.
            rxsteer(&running.netns, &["flows"])?;
            Ok(())
        })?;
        assert_eq!(ended.code, Some(1), "{panic}: {ended:?}");
        for what in ["panicked at", "provoked", "daemon/panics.rs", "inline"] {
            assert!(ended.log.contains(what), "{panic}: no {what}: {ended:?}");
        }
        assert!(!ended.log.contains("overtake"), "{panic}: {ended:?}");
        assert_eq!(overtaken, 0, "{panic}: overtaken: {overtaken}, {ended:?}");
    }
    Ok(())
}

/// The control: an end that brings no flow home.
#[test]
fn after_a_kill_the_same_packets_are_overtaken() -> Result<()> {
    in_lab!();
    // The thread may get its CPU just then, and empty the backlog before any packet passes it.
    until("packets are overtaken", || {
        let End { ended, overtaken } = end_of("", |bed, running| {
            running.signal(Signal::SIGKILL)?;
            until("the program is gone", || {
                Ok(attached(bed)?.is_none().then_some(()))
            })
        })?;
        assert_eq!(ended.code, None, "{ended:?}");
        Ok((overtaken > 0).then_some(()))
    })
}

#[test]
fn a_log_without_a_reader_ends_nothing() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let command = Rxsteer::command(&dut.netns, &roomy(&dut.name, &["--rps-cpus=1"]))?;
    let running = Rxsteer::spawn(&dut.netns, command, false)?;
    let running = running.map_err(|ended| anyhow::anyhow!("{ended:?}"))?;
    // Each change is logged.
    for cpus in ["0", "1"] {
        let set = rxsteer(&dut.netns, &["set", &dut.name, "--rps-cpus", cpus])?;
        assert!(set.status.success(), "{set:?}");
        assert_eq!(running.status()?.devices[0].queues[0].rps_cpus, cpus);
    }
    assert_eq!(running.stop(Signal::SIGTERM)?.code, Some(0));
    Ok(())
}
