// SPDX-License-Identifier: MIT OR Apache-2.0
//! More than a CPU can use: who floods a queue does not take the others' place.

use std::net::SocketAddr;

use anyhow::Result;
use rxlab::bench::setup::mode::Active;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::Generator;
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::receiver::{Receiver, ReceiverConfig};
use rxlab::testing::testbed::*;
use rxsteer::daemon::options::Options;
use rxsteer::datapath::FLOW_LIMIT;
use rxsteer::datapath::backlogs::LIMIT_MAX;

/// Flows with little to say, and frames of one that floods for each of theirs. Not many: a flow is
/// large only while 32 frames of others come within two turns, 20 ms, also from a slow generator.
const NR_MODEST: u32 = 1_000;
const FLOOD: u32 = 4;

/// Frames of the modest flows in a round. A backlog that the flood has half filled has room for all of
/// them, and for what the flood sends, after each of ten pauses, until the others are seen again.
const MODEST: u64 = 6_000;
const _: () = assert!(MODEST + 10 * 32 * (FLOOD as u64) < LIMIT_MAX as u64 / 2);

/// Frames per second of all flows: more than a thread takes off that hardly runs.
const RATE: u64 = 1_000_000;

/// Sends into one backlog whose thread hardly runs, round after round, until frames are dropped
/// since the flow limit says so, if there is one, or until modest flows lose some.
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
        // Whatever group of threads the hog is in, it comes first.
        backlog_nice: 19,
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
        let config = lossless(Frames::Udp(flows.clone()), Some(count), RATE);
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
    let Some(_guard) = lab("modest_flows_lose_nothing_to_one_that_floods") else {
        return Ok(());
    };
    overload(FLOW_LIMIT)?;
    // The control.
    overload(0)
}
