// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering of real packets: every frame is accounted for.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::lab::receiver::{Receiver, ReceiverConfig};
use rxlab::testing::testbed::*;
use rxsteer::api::client;
use rxsteer::api::set::Change;
use rxsteer::api::status::{Queue, Terms};
use rxsteer::daemon::options::{Mode, Options};
use rxsteer::datapath::policy::Policy;

/// Not a multiple of any batch or burst.
const COUNT: u64 = 5_003;

/// Number of flows in most tests.
const NR_FLOWS: u32 = 2_000;

/// The queue's counters since `before`.
fn since(now: &Queue, before: &Queue) -> Queue {
    Queue {
        received: now.received - before.received,
        inline: now.inline - before.inline,
        sums: Terms {
            redirected: now.sums.redirected - before.sums.redirected,
            dropped: now.sums.dropped - before.sums.dropped,
            shed: now.sums.shed - before.sums.shed,
            limited: now.sums.limited - before.sums.limited,
            delivered: now.sums.delivered - before.sums.delivered,
            lost: now.sums.lost - before.sums.lost,
            vanished: now.sums.vanished - before.sums.vanished,
            queued: now.sums.queued,
            would_redirect: now.sums.would_redirect - before.sums.would_redirect,
        },
        inline_ports: now.inline_ports - before.inline_ports,
        no_flow_truncated: now.no_flow_truncated - before.no_flow_truncated,
        no_flow_unknown: now.no_flow_unknown - before.no_flow_unknown,
        moves: now.moves - before.moves,
        held: now.held - before.held,
        ..Queue::default()
    }
}

fn frame(dmac: [u8; 6], ether_type: u16, rest: &[u8]) -> Frames {
    let mut frame = dmac.to_vec();
    frame.extend([2, 0, 0, 0, 0, 1]);
    frame.extend(ether_type.to_be_bytes());
    frame.extend(rest);
    Frames::Raw(frame)
}

/// Frames of every kind; a mask without the polling CPU gives each kind one destination.
fn every_frame_is_accounted_for(mode: Mode) -> Result<()> {
    let bed = Testbed::new(&LinkConfig {
        ipv6: true,
        ..Default::default()
    })?;
    let options = Options {
        mode,
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(&bed.link.dut, options)?;
    let dut = &bed.link.dut;
    let ipv4 = UdpFlows::to(dut, NR_FLOWS);
    let ipv6 = UdpFlows::to_ipv6(dut, NR_FLOWS);
    let tagged = |flows: &UdpFlows, tags: &[(u16, u16)]| UdpFlows {
        tags: tags.to_vec(),
        ..flows.clone()
    };
    let vlan = tagged(&ipv4, &[(0x8100, 10)]);
    let qinq = tagged(&ipv6, &[(0x88a8, 10), (0x8100, 20)]);
    let before = bed.warm_up(&active, &ipv4)?;

    let sinks = [bed.receiver_by_cpu(&ipv4)?, bed.receiver_by_cpu(&ipv6)?];
    let counts = [COUNT, COUNT + 1, COUNT + 2, COUNT + 3];
    let mut total = before.received;
    for (flows, count) in [ipv4, ipv6, vlan, qinq].into_iter().zip(counts) {
        bed.send(Frames::Udp(flows), count)?;
        total += count;
        at_rest(&active, 0, total)?;
    }
    let (arp, truncated) = (301, 207);
    bed.send(frame(dut.mac, 0x0806, &[0; 46]), arp)?;
    // An IPv4 header without the UDP header that it announces.
    let ip = [
        0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 198, 18, 0, 9, 198, 18, 0, 1,
    ];
    bed.send(frame(dut.mac, 0x0800, &ip), truncated)?;
    let now = at_rest(&active, 0, total + arp + truncated)?;

    let steered: u64 = counts.iter().sum();
    let expected = Queue {
        received: steered + arp + truncated,
        sums: Terms {
            redirected: steered,
            delivered: steered,
            ..Default::default()
        },
        no_flow_unknown: arp,
        no_flow_truncated: truncated,
        ..Default::default()
    };
    assert_eq!(since(&now, &before), expected);
    let [four, six] = sinks;
    // No VLAN device exists: tagged frames end in the stack.
    assert_eq!(
        rxlab::testing::testbed::received(four, counts[0])?,
        [0, counts[0]]
    );
    assert_eq!(
        rxlab::testing::testbed::received(six, counts[1])?,
        [0, counts[1]]
    );
    active.stop()
}

#[test]
fn every_frame_is_accounted_for_in_native_mode() -> Result<()> {
    in_lab!();
    every_frame_is_accounted_for(Mode::Native)
}

/// Flows from or to ports with hardware time stamps stay inline, beside others that move; all move
/// without such ports.
#[test]
fn flows_of_inline_ports_stay_inline() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let to = |dport| UdpFlows {
        dport,
        ..UdpFlows::to(dut, 16)
    };
    let from_ntp = UdpFlows {
        sport: 123,
        ..UdpFlows::to(dut, 16)
    };
    let options = bed.options(&[OTHER_CPU]);
    let active = Active::steer(dut, options.clone())?;
    let mut before = bed.warm_up(&active, &to(320))?;
    assert_eq!(before.inline_ports, 0);
    let expected = Queue {
        received: COUNT,
        inline: COUNT,
        inline_ports: COUNT,
        ..Queue::default()
    };
    for flows in [to(319), from_ntp] {
        bed.send(Frames::Udp(flows), COUNT)?;
        let now = at_rest(&active, 0, before.received + COUNT)?;
        assert_eq!(since(&now, &before), expected);
        before = now;
    }
    active.stop()?;

    let options = Options {
        inline_ports: Vec::new(),
        ..options
    };
    let active = Active::steer(dut, options)?;
    assert_eq!(bed.warm_up(&active, &to(319))?.inline_ports, 0);
    active.stop()
}

/// 4096 flows with a mask: returns the queue and the sink's packets by CPU.
fn shares(options: impl FnOnce(&Testbed) -> Options) -> Result<(Queue, Vec<u64>)> {
    let bed = Testbed::new(&LinkConfig::default())?;
    let flows = UdpFlows::to(&bed.link.dut, 4096);
    let active = Active::steer(&bed.link.dut, options(&bed))?;
    // The first poll of a queue is always inline; two more rounds move the flows.
    for rounds in 1..=3 {
        bed.send(Frames::Udp(flows.clone()), 4096)?;
        at_rest(&active, 0, rounds * 4096)?;
    }
    let before = at_rest(&active, 0, 3 * 4096)?;
    let sink = bed.receiver_by_cpu(&flows)?;
    let count = 2 * 4096;
    bed.send(Frames::Udp(flows), count)?;
    let now = at_rest(&active, 0, before.received + count)?;
    let got = received(sink, count)?;
    active.stop()?;
    Ok((since(&now, &before), got))
}

#[test]
fn a_mask_of_two_cpus_gives_each_its_share() -> Result<()> {
    in_lab!();
    let (queue, got) = shares(|bed| bed.options(&[POLLING_CPU, OTHER_CPU]))?;
    // Each CPU has half of the slots. One standard deviation of 4096 flows is 32 flows, or 64
    // frames.
    assert!(queue.inline.abs_diff(4096) < 6 * 64, "{queue:?}");
    assert_eq!(queue.inline + queue.sums.redirected, 8192);
    assert_eq!(got, [queue.inline, queue.sums.redirected]);
    Ok(())
}

/// The queue's counters in every test with 8192 frames, all inline.
fn all_inline() -> Queue {
    Queue {
        received: 8192,
        inline: 8192,
        ..Queue::default()
    }
}

#[test]
fn a_mask_of_the_polling_cpu_redirects_nothing() -> Result<()> {
    in_lab!();
    let (queue, got) = shares(|bed| bed.options(&[POLLING_CPU]))?;
    assert_eq!(queue, all_inline());
    assert_eq!(got, [8192, 0]);
    Ok(())
}

#[test]
fn policy_off_redirects_nothing() -> Result<()> {
    in_lab!();
    let (queue, got) = shares(|bed| Options {
        policy: Policy::OFF,
        ..bed.options(&[OTHER_CPU])
    })?;
    assert_eq!(queue, all_inline());
    assert_eq!(got, [8192, 0]);
    Ok(())
}

#[test]
fn a_dry_run_moves_nothing_and_says_what_would_move() -> Result<()> {
    in_lab!();
    let dry_run = |cpus: &[u32]| {
        shares(|bed| Options {
            dry_run: true,
            ..bed.options(cpus)
        })
    };
    let (mut queue, got) = dry_run(&[OTHER_CPU])?;
    assert_eq!(got, [8192, 0]);
    assert_eq!(queue.sums.would_redirect, 8192);
    queue.sums.would_redirect = 0;
    assert_eq!(queue, all_inline());

    let (queue, got) = dry_run(&[POLLING_CPU])?;
    assert_eq!(got, [8192, 0]);
    assert_eq!(queue, all_inline());

    let (queue, got) = dry_run(&[POLLING_CPU, OTHER_CPU])?;
    assert_eq!(got, [8192, 0]);
    assert_eq!(queue.inline, 8192);
    // As in a_mask_of_two_cpus_gives_each_its_share.
    let would = queue.sums.would_redirect;
    assert!(would.abs_diff(4096) < 6 * 64, "{queue:?}");
    Ok(())
}

#[test]
fn a_mask_change_moves_the_flows_in_order() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let flows = UdpFlows::to(dut, 200);
    let sink = bed.receiver_in_order(&flows)?;
    let active = Active::steer(dut, bed.options(&[POLLING_CPU]))?;
    let paced = GeneratorConfig::lossless(Frames::Udp(flows), None).at(50_000);
    let wire = Generator::start(&bed.link, 0, &paced)?;
    let set = |cpus: &str| {
        dut.netns
            .run(|| client::set(Change::rps_cpus(&dut.name, None, cpus)))
    };
    let now = || Ok::<_, anyhow::Error>(status(&active)?.devices[0].queues[0].clone());
    // A thousand consecutive frames all have the same location.
    let only = |inline: bool| {
        let mut before = now()?;
        until("new packets go only to the new CPUs", || {
            let now = now()?;
            let changed = if inline {
                now.sums.redirected != before.sums.redirected
            } else {
                now.inline != before.inline
            };
            if changed {
                before = now;
                return Ok(None);
            }
            Ok((now.received > before.received + 1_000).then_some(()))
        })
        .with_context(|| format!("{:?}", now()))
    };
    only(true)?;
    for _ in 0..20 {
        set("1")?;
        only(false)?;
        set("0-0")?;
        only(true)?;
    }
    // Again without time to settle.
    for _ in 0..100 {
        set("1")?;
        set("0-1")?;
        set("0-0")?;
    }
    let sent = wire.stop()?;
    assert_eq!(sent.lost, 0);
    let queue = at_rest(&active, 0, sent.sent)?;
    assert!(queue.moves > 40 * 100, "{queue:?}");
    assert_eq!(queue.sums.lost, 0, "{queue:?}");
    let passed = queue.inline + queue.sums.delivered;
    assert_eq!(passed + queue.sums.dropped + queue.sums.shed, sent.sent);
    until("all datagrams received", || {
        Ok((sink.received() + sink.dropped()? >= passed).then_some(()))
    })?;
    let report = sink.stop()?;
    assert_eq!(report.received[0] + report.dropped, passed, "{report:?}");
    assert_eq!(report.reordered, 0, "{report:?} {queue:?}");
    active.stop()
}

/// The control of the test above: the sink detects packets out of order.
#[test]
fn the_sink_sees_what_is_out_of_order() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let flows = UdpFlows::to(&bed.link.dut, 200);
    let sink = bed.receiver_in_order(&flows)?;
    // The second generator starts from 0: all its frames, and no others, are out of order.
    for count in [COUNT, COUNT - 1_000] {
        bed.send(Frames::Udp(flows.clone()), count)?;
    }
    until("all datagrams received", || {
        Ok((sink.received() == 2 * COUNT - 1_000).then_some(()))
    })?;
    assert_eq!(sink.stop()?.reordered, COUNT - 1_000);
    Ok(())
}

/// The kernel's ring must never be full, since it would drop frames outside of the flows' accounts.
#[test]
fn a_full_backlog_drops_in_xdp_and_nowhere_else() -> Result<()> {
    in_lab!();
    for limit in [16, 512] {
        let bed = Testbed::new(&LinkConfig::default())?;
        let flows = UdpFlows::to(&bed.link.dut, NR_FLOWS);
        let options = Options {
            backlog: Some(limit),
            ..bed.options(&[OTHER_CPU])
        };
        let active = Active::steer(&bed.link.dut, options)?;
        let local = SocketAddr::new(flows.daddr, flows.dport);
        let sink = Receiver::start(&bed.link.dut.netns, &ReceiverConfig::new(local))?;
        let hog = Hog::new(OTHER_CPU)?;
        let flood = GeneratorConfig::flood(Frames::Udp(flows));
        let wire = Generator::start(&bed.link, 0, &flood)?;
        until("the backlog was full a thousand times", || {
            let sums = &status(&active)?.devices[0].queues[0].sums;
            Ok((sums.dropped + sums.lost > 1_000).then_some(()))
        })?;
        let sent = wire.stop()?;
        drop(hog);
        let queue = at_rest(&active, 0, sent.sent - sent.lost)?;
        assert_eq!(queue.sums.lost, 0, "{queue:?}");
        assert_eq!(queue.sums.shed, 0, "{queue:?}");
        assert!(queue.sums.dropped > 1_000, "{queue:?}");
        assert!(queue.sums.delivered > 0, "{queue:?}");
        let passed = queue.inline + queue.sums.delivered;
        until("all datagrams received", || {
            Ok((sink.received() + sink.dropped()? >= passed).then_some(()))
        })?;
        let report = sink.stop()?;
        assert_eq!(report.received[0] + report.dropped, passed, "limit {limit}");
        active.stop()?;
    }
    Ok(())
}

#[test]
fn every_queue_has_a_mask_and_an_account_of_its_own() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig {
        queues: 2,
        ..Default::default()
    })?;
    let flows = UdpFlows::to(&bed.link.dut, NR_FLOWS);
    let options = Options {
        queues: vec!["1=0-0".parse()?],
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(&bed.link.dut, options)?;
    let before = bed.warm_up(&active, &flows)?;
    let sink = bed.receiver_by_cpu(&flows)?;
    let counts = [COUNT, COUNT / 2];
    let wires = [0, 1].map(|cpu: usize| {
        let frames = Frames::Udp(flows.clone());
        let config = GeneratorConfig::lossless(frames, Some(counts[cpu])).at(100_000);
        Generator::start(&bed.link, cpu as u32, &config)
    });
    for (wire, count) in wires.into_iter().zip(counts) {
        let report = wire?.wait()?;
        assert_eq!((report.sent, report.lost), (count, 0));
    }
    let first = queue_at_rest(&active, 0, 0, before.received + counts[0])?;
    let second = queue_at_rest(&active, 0, 1, counts[1])?;
    assert_eq!((&*first.rps_cpus, &*second.rps_cpus), ("1", "0"));
    assert_eq!(since(&first, &before), all_redirected(counts[0]));
    assert_eq!((second.received, second.inline), (counts[1], counts[1]));
    assert!(second.backlogs.is_empty(), "{second:?}");
    assert_eq!(
        received(sink, counts[0] + counts[1])?,
        [counts[1], counts[0]]
    );
    active.stop()
}

fn all_redirected(count: u64) -> Queue {
    Queue {
        received: count,
        sums: Terms {
            redirected: count,
            delivered: count,
            ..Terms::default()
        },
        ..Queue::default()
    }
}

#[test]
fn two_devices_are_steered_by_one() -> Result<()> {
    in_lab!();
    let first = Testbed::new(&LinkConfig::default())?;
    let (tester, dut) = (&first.link.tester.netns, &first.link.dut.netns);
    let id = |id| LinkConfig {
        id,
        ..Default::default()
    };
    let second = Testbed::between(tester, dut, &id(1))?;
    let name = &second.link.dut.name;
    let mut options = Options {
        queues: vec![format!("{name}:0=0-0").parse()?],
        ..first.options(&[OTHER_CPU])
    };
    options.devices.push(name.clone());
    let active = Active::steer(&first.link.dut, options)?;
    let flows = [&first, &second].map(|bed| UdpFlows::to(&bed.link.dut, NR_FLOWS));
    let before = first.warm_up(&active, &flows[0])?;
    let sinks = [
        first.receiver_by_cpu(&flows[0])?,
        second.receiver_by_cpu(&flows[1])?,
    ];
    first.send(Frames::Udp(flows[0].clone()), COUNT)?;
    second.send(Frames::Udp(flows[1].clone()), COUNT + 1)?;
    let now = at_rest(&active, 0, before.received + COUNT)?;
    assert_eq!(since(&now, &before), all_redirected(COUNT));
    let now = at_rest(&active, 1, COUNT + 1)?;
    assert_eq!((now.received, now.inline), (COUNT + 1, COUNT + 1));
    let [a, b] = sinks;
    assert_eq!(received(a, COUNT)?, [0, COUNT]);
    assert_eq!(received(b, COUNT + 1)?, [COUNT + 1, 0]);

    // Only the second device's mask changes.
    dut.run(|| client::set(Change::rps_cpus(name, Some(0), "1")))?;
    let masks: Vec<_> = status(&active)?
        .devices
        .iter()
        .map(|device| device.queues[0].rps_cpus.clone())
        .collect();
    assert_eq!(masks, ["1", "1"]);
    let sink = second.receiver_by_cpu(&flows[1])?;
    let mut sent = COUNT + 1;
    until("the second device's flows have moved", || {
        let before = at_rest(&active, 1, sent)?;
        second.send(Frames::Udp(flows[1].clone()), COUNT)?;
        sent += COUNT;
        let now = at_rest(&active, 1, sent)?;
        Ok((since(&now, &before) == all_redirected(COUNT)).then_some(()))
    })?;
    assert!(received(sink, sent - COUNT - 1)?[1] >= COUNT);
    active.stop()
}

/// Datagrams of several pages, one at a time so that the ring is never full.
fn jumbo_frames_arrive_whole(mode: Mode) -> Result<()> {
    let bed = Testbed::new(&LinkConfig {
        mtu: 9000,
        ..Default::default()
    })?;
    let (tester, dut) = (&bed.link.tester, &bed.link.dut);
    let options = Options {
        mode,
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    let receiver = dut.netns.run(|| Ok(UdpSocket::bind((dut.ipv4, 9))?))?;
    receiver.set_read_timeout(Some(Duration::from_secs(30)))?;
    let senders = tester.netns.run(|| {
        (0..20)
            .map(|_| {
                let socket = UdpSocket::bind((tester.ipv4, 0))?;
                socket.connect((dut.ipv4, 9))?;
                Ok(socket)
            })
            .collect::<Result<Vec<_>>>()
    })?;
    // The largest payload behind IPv4 and UDP headers, and smaller ones.
    let lengths = [8972, 8971, 4096, 5000, 3000, 1];
    let mut sent = 0;
    let mut send_all = || -> Result<u64> {
        for sender in &senders {
            for len in lengths {
                let payload: Vec<u8> = (0..len).map(|i| (i * 31 + sent as usize) as u8).collect();
                assert_eq!(sender.send(&payload)?, len);
                sent += 1;
                let mut got = vec![0; 10_000];
                let (got_len, from) = receiver.recv_from(&mut got)?;
                assert_eq!(from, sender.local_addr()?);
                assert!(got[..got_len] == payload, "datagram {sent} of {len} bytes");
            }
        }
        Ok(sent)
    };
    // Repeat until all flows are at their wanted locations.
    let mut before = Queue::default();
    until("all frames of a round redirected", || {
        let now = at_rest(&active, 0, send_all()?)?;
        let round = since(&now, &before);
        before = now;
        Ok((round == all_redirected(round.received)).then_some(()))
    })?;
    active.stop()
}

#[test]
fn jumbo_frames_arrive_whole_in_native_mode() -> Result<()> {
    in_lab!();
    jumbo_frames_arrive_whole(Mode::Native)
}
