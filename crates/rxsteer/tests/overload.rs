// SPDX-License-Identifier: MIT OR Apache-2.0
//! Under overload, one flow that floods a queue does not displace the other flows.

use std::net::SocketAddr;

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
use rxsteer::datapath::FLOW_LIMIT;
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

#[test]
fn modest_flows_lose_nothing_to_one_that_floods() -> Result<()> {
    in_lab!();
    overload(FLOW_LIMIT)?;
    // The control.
    overload(0)
}
