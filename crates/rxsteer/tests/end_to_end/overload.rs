// SPDX-License-Identifier: MIT OR Apache-2.0
//! Under overload, one flow that floods a queue does not displace the other flows if large flows are limited
//! (`--flow-limit`); by default none is.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::receiver::{Receiver, ReceiverConfig};
use rxlab::testing::testbed::*;
use rxsteer::daemon::options::Options;
use rxsteer::datapath::backlogs::LIMIT_MAX;
use rxsteer::host::sched::Class;

const NR_MODEST: u32 = 1_000;

/// Frames of the flooding flow for each one of a modest flow.
const FLOOD: u32 = 4;

/// Frames of the modest flows in a round. A backlog half filled by the flood has room for all of
/// them.
const MODEST: u64 = 6_000;
const _: () = assert!(MODEST < LIMIT_MAX as u64 / 2);

/// Frames per second of all flows: more than a thread with little CPU time dequeues.
const RATE: u64 = 1_000_000;

/// Sends rounds of frames into one backlog with a thread that gets little CPU time, until the flow
/// limit drops frames or, if it is 0, until modest flows lose some.
fn overload(flow_limit: u32) -> Result<()> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let modest = UdpFlows::to(dut, NR_MODEST);
    let flows = UdpFlows {
        flood: FLOOD,
        ..modest.clone()
    };
    let options = Options {
        flow_limit,
        // The lowest priority: the hog comes first in whatever group of threads it is.
        backlog_sched: Class::Nice(19),
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    let sink = bed.receiver_in_order(&modest)?;
    let local = SocketAddr::new(flows.daddr, flows.dport);
    let flood_sink = ReceiverConfig {
        peer: Some(flows.source(NR_MODEST)),
        ..ReceiverConfig::new(local)
    };
    let flood_sink = Receiver::start(&dut.netns, &flood_sink)?;

    let mut received = bed.warm_up(&active, &modest)?.received;
    let mut sent_by_modest = received;
    until("an overload that tells", || {
        let count = MODEST * u64::from(1 + FLOOD);
        let hog = Hog::new(OTHER_CPU)?;
        let config = GeneratorConfig::lossless(Frames::Udp(flows.clone()), Some(count)).at(RATE);
        let sent = Generator::start(&bed.link, POLLING_CPU, &config)?.wait()?;
        drop(hog);
        assert_eq!((sent.sent, sent.lost), (count, 0));
        received += count;
        sent_by_modest += MODEST;
        let queue = at_rest(&active, 0, received)?;
        until("all datagrams received", || {
            let taken = sink.received() + flood_sink.received();
            let passed = queue.inline + queue.sums.delivered;
            Ok((taken + sink.dropped()? + flood_sink.dropped()? >= passed).then_some(()))
        })?;
        assert_eq!(sink.dropped()?, 0);
        let lost = sent_by_modest - sink.received();
        if flow_limit == 0 {
            assert_eq!(queue.sums.limited, 0, "{queue:?}");
            return Ok((lost > 0).then_some(()));
        }
        assert_eq!((queue.sums.dropped, lost), (0, 0), "{queue:?}");
        Ok((queue.sums.limited > 0).then_some(()))
    })?;
    active.stop()
}

/// Percentage above which a flow of these tests is large.
const FLOW_LIMIT: u32 = 12;

#[test]
fn modest_flows_lose_nothing_to_one_that_floods() -> Result<()> {
    in_lab!();
    overload(FLOW_LIMIT)?;
    // The control.
    overload(0)
}

/// Flows of equal size, each with more than [`FLOW_LIMIT`] percent of the frames.
const NR_EQUAL: u32 = 8;

/// Frames of the equal flows in a round: more than half of a backlog, and less than the whole.
const EQUAL: u64 = LIMIT_MAX as u64 * 3 / 4;

/// The longest time for which the thread of the equal flows' backlog gets no CPU time.
const OCCUPIED: Duration = Duration::from_secs(1);

/// Sends rounds of frames of the equal flows into one backlog with a thread that does not run,
/// until more than half of the backlog was queued; returns the backlog's frames that were dropped
/// although there was room.
fn equal(flow_limit: u32) -> Result<u64> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, NR_EQUAL);
    let options = Options {
        flow_limit,
        backlog_sched: Class::Nice(19),
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    let _sink = bed.receiver_in_order(&flows)?;
    let mut received = bed.warm_up(&active, &flows)?.received;
    let mut limited = 0;
    until("a backlog that is more than half full", || {
        let hog = Hog::real_time(OTHER_CPU, OCCUPIED)?;
        let config = GeneratorConfig::lossless(Frames::Udp(flows.clone()), Some(EQUAL)).at(RATE);
        let sent = Generator::start(&bed.link, POLLING_CPU, &config)?.wait()?;
        let queued = status(&active)?.devices[0].queues[0].sums.queued;
        drop(hog);
        assert_eq!((sent.sent, sent.lost), (EQUAL, 0));
        received += EQUAL;
        let sums = at_rest(&active, 0, received)?.sums;
        assert_eq!(sums.dropped, 0, "{sums:?}");
        limited = sums.limited;
        let half = queued > LIMIT_MAX as u64 / 2;
        Ok((half || limited > 0).then_some(()))
    })?;
    active.stop()?;
    Ok(limited)
}

/// None of eight flows is larger than the others, nor dropped while there is room.
#[test]
fn equal_flows_lose_nothing_while_there_is_room() -> Result<()> {
    in_lab!(alone: "a real-time thread takes a CPU from all others");
    assert_eq!(equal(Options::new([""; 0]).flow_limit)?, 0);
    // The control.
    assert!(equal(FLOW_LIMIT)? > 0);
    Ok(())
}
