// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frames that a driver drops after the program has redirected them (docs/order.md, "Proof
//! blocked"). The drivers of a lab drop none, so the tests move the count as such a driver leaves
//! it: `tail` is ahead of what will ever come out of the backlog.

use std::mem::offset_of;

use crate::helpers::maps::map_of;
use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::{End, LinkConfig};
use rxlab::testing::testbed::*;
use rxsteer::api::client;
use rxsteer::api::set::Change;
use rxsteer::api::status::Queue;
use rxsteer::daemon::options::Options;
use rxsteer::datapath::backlogs::LIMIT_MAX;
use rxsteer::types::{backlog, rx_queue};

const NR_FLOWS: u32 = 20;

/// Lets `n` frames vanish on the way into queue 0's backlog for [`OTHER_CPU`], without traffic: the
/// program writes the same elements.
fn vanish(active: &Active<'_>, n: u64) -> Result<()> {
    until("the backlog is at rest", || {
        Ok((queue(active)?.sums.queued == 0).then_some(()))
    })?;
    add("rx_queues", 0, offset_of!(rx_queue, nr_received), n)?;
    add("backlogs", OTHER_CPU, offset_of!(backlog, tail), n)
}

/// Adds to a counter at an offset in an element of one of rxsteer's arrays.
fn add(array: &str, index: u32, at: usize, n: u64) -> Result<()> {
    let array = map_of(std::process::id(), array)?;
    let key = index.to_ne_bytes();
    let mut value = array
        .lookup(&key, MapFlags::ANY)?
        .context("no such element")?;
    let counter = u64::from_ne_bytes(value[at..at + 8].try_into()?) + n;
    value[at..at + 8].copy_from_slice(&counter.to_ne_bytes());
    Ok(array.update(&key, &value, MapFlags::ANY)?)
}

fn set(dut: &End, change: Change) -> Result<()> {
    dut.netns.run(|| client::set(change))?;
    Ok(())
}

/// The queue's counters, both of whose sums close.
fn queue(active: &Active<'_>) -> Result<Queue> {
    let queue = status(active)?.devices[0].queues[0].clone();
    assert_eq!(queue.imbalance(), None, "{queue:?}");
    Ok(queue)
}

/// Steers [`NR_FLOWS`] flows to [`OTHER_CPU`], with room for `limit` frames, and then runs `test`.
fn steered(
    limit: u32,
    test: impl FnOnce(&Testbed, &Active<'_>, &UdpFlows) -> Result<()>,
) -> Result<()> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, NR_FLOWS);
    let options = Options {
        backlog: Some(limit),
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    bed.warm_up(&active, &flows)?;
    // The control: nothing has vanished.
    assert_eq!(queue(&active)?.sums.vanished, 0);
    test(&bed, &active, &flows)?;
    active.stop()
}

#[test]
fn flows_leave_a_backlog_in_order_after_frames_vanished() -> Result<()> {
    in_lab!();
    steered(LIMIT_MAX, |bed, active, flows| {
        let dut = &bed.link.dut;
        vanish(active, 3)?;
        let sink = bed.receiver_in_order(flows)?;
        let paced = GeneratorConfig::lossless(Frames::Udp(flows.clone()), None).at(20_000);
        let wire = Generator::start(&bed.link, POLLING_CPU, &paced)?;
        let redirected =
            || Ok::<_, anyhow::Error>(status(active)?.devices[0].queues[0].sums.redirected);
        let before = redirected()?;
        until("each flow has frames behind those that vanished", || {
            Ok((redirected()? > before + 1_000).then_some(()))
        })?;
        set(dut, Change::rps_cpus(&dut.name, None, "0"))?;
        until("every flow has left", || {
            let before = redirected()?;
            let sent = wire.sent();
            until("each flow has sent", || {
                Ok((wire.sent() > sent + 10 * u64::from(NR_FLOWS)).then_some(()))
            })?;
            Ok((redirected()? == before).then_some(()))
        })?;
        let sent = wire.stop()?;
        assert_eq!(sent.lost, 0);
        let now = queue(active)?;
        assert_eq!((now.sums.vanished, now.sums.queued), (3, 0), "{now:?}");
        received_in_order(sink, sent.sent)
    })
}

#[test]
fn a_backlog_full_of_frames_that_vanished_has_room_again() -> Result<()> {
    in_lab!();
    const LIMIT: u32 = 64;
    steered(LIMIT, |bed, active, flows| {
        let mut vanished = 0;
        let dropped = || {
            let before = queue(active)?;
            bed.send(Frames::Udp(flows.clone()), NR_FLOWS.into())?;
            Ok::<_, anyhow::Error>(queue(active)?.dropped() - before.dropped())
        };
        until("a full backlog drops frames", || {
            // The daemon may find what is missing before the next packet.
            vanish(active, LIMIT.into())?;
            vanished += u64::from(LIMIT);
            Ok((dropped()? > 0).then_some(()))
        })?;
        until("the backlog takes every frame", || {
            Ok((dropped()? == 0).then_some(()))
        })?;
        let now = queue(active)?;
        assert_eq!(now.sums.vanished, vanished, "{now:?}");
        Ok(())
    })
}

/// Without packets, user space finds them.
#[test]
fn table_sizes_change_after_frames_vanished() -> Result<()> {
    in_lab!();
    steered(LIMIT_MAX, |bed, active, _| {
        vanish(active, 3)?;
        let sizes = Change {
            rps_flow_cnt: Some(1 << 12),
            ..Change::default()
        };
        set(&bed.link.dut, sizes)?;
        let now = queue(active)?;
        assert_eq!((now.sums.vanished, now.sums.queued), (3, 0), "{now:?}");
        Ok(())
    })
}

/// Else the backlog would count as used: it is never taken down, and its CPU can't go offline.
#[test]
fn frames_that_vanished_are_found_without_packets() -> Result<()> {
    in_lab!();
    steered(LIMIT_MAX, |_, active, _| {
        vanish(active, 3)?;
        until("they are found", || {
            Ok((queue(active)?.sums.vanished == 3).then_some(()))
        })
    })
}
