// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer flows` and `rxsteer explain` about real flows.

mod asking;
mod tunnels;

use crate::helpers::threads::cpumaps;
use anyhow::{Context, Result, ensure};
use asking::*;
use rxlab::bench::setup::mode::Active;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::hog::Hog;
use rxlab::lab::link::LinkConfig;
use rxlab::testing::app::App;
use rxlab::testing::testbed::{OTHER_CPU, POLLING_CPU, Testbed, at_rest, mask, status, until};
use rxsteer::api::client;
use rxsteer::api::explain::{Drops, Name, Unknown, Wait};
use rxsteer::api::flows::{Entry, Location, Reason};
use rxsteer::api::set::Change;
use rxsteer::cli::explain;
use rxsteer::cli::explain::{Answer, Target, render};
use rxsteer::daemon::options::{Options, RpsCpus};
use rxsteer::datapath::RPS_FLOW_CNT;
use rxsteer::datapath::load::Pressure;
use rxsteer::datapath::policy::Policy;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn a_sockets_flow_is_found_by_all_its_names() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig {
        ipv6: true,
        ..Default::default()
    })?;
    let dut = &bed.link.dut;
    for udp in [UdpFlows::to(dut, 1), UdpFlows::to_ipv6(dut, 1)].map(own) {
        let app = app(&dut.netns, bind(&dut.netns, &udp, true)?)?;
        app.move_to(OTHER_CPU)?;
        let active = Active::steer(dut, options(&bed))?;
        settle_at(&bed, &udp, Location::Cpu(OTHER_CPU))?;
        let received = rest(&active)?;

        let list = flows(&dut.netns, 10)?;
        assert_eq!((list.total, list.slots % u64::from(RPS_FLOW_CNT)), (1, 0));
        let [entry] = &list.flows[..] else {
            panic!("{list:?}");
        };
        let expected = Entry {
            flow: Some(flow_of(&udp)),
            hash: entry.hash,
            device: dut.name.clone(),
            queue: 0,
            location: Location::Cpu(OTHER_CPU),
            wanted: Location::Cpu(OTHER_CPU),
            reason: Reason::Application,
            application_cpu: Some(OTHER_CPU),
            application_offline: false,
            polling_cpu: Some(POLLING_CPU),
            base: None,
            packets: received as u32,
            dropped: 0,
            moves: 1,
            idle_seconds: entry.idle_seconds,
            shed: false,
        };
        assert_eq!(entry, &expected);

        let names = [
            flow_of(&udp).to_string(),
            entry.hash.to_string(),
            format!("port:{}", udp.dport),
            udp.dport.to_string(),
            format!("pid:{}", app.tid),
        ];
        for name in &names {
            let answer = explain(&dut.netns, name)?;
            let (explanation, seen) = one(&answer)?;
            assert_eq!(explanation.name(), Name::Flow(flow_of(&udp)), "{name}");
            assert_eq!(explanation.application.cpu, Some(OTHER_CPU), "{name}");
            assert_eq!(explanation.application.unknown, None, "{name}");
            let expected = Entry {
                idle_seconds: seen.entry.idle_seconds,
                ..expected.clone()
            };
            assert_eq!((&seen.entry, &seen.waits), (&expected, &None), "{name}");
            assert_eq!(seen.rps, Location::Cpu(OTHER_CPU), "{name}");
            let bare = *name == udp.dport.to_string();
            assert_eq!(answer.notes.len(), usize::from(bare), "{answer:?}");
        }

        // The same as text and as JSON.
        let text = command(&dut.netns, &["explain", &names[0]])?;
        let text = String::from_utf8(text.stdout)?;
        assert!(text.starts_with(&names[0]), "{text}");
        for words in [
            "was processed on CPU 1, by the thread",
            "It wants to be there: its application is on that CPU.",
        ] {
            assert!(text.contains(words), "not {words:?} in {text}");
        }
        let json = command(&dut.netns, &["explain", &names[4], "--json"])?;
        let json: serde_json::Value = serde_json::from_slice(&json.stdout)?;
        assert_eq!(json["target"], names[4]);
        assert_eq!(json["flows"][0]["flow"], names[0]);
        assert_eq!(json["flows"][0]["seen"][0]["location"], "CPU 1");
        let text = command(&dut.netns, &["flows"])?;
        let text = String::from_utf8(text.stdout)?;
        assert!(
            text.contains(&names[0]) && text.ends_with("\n1 flow\n"),
            "{text}"
        );
        let json = command(&dut.netns, &["flows", "--json", "--device", &dut.name])?;
        let json: serde_json::Value = serde_json::from_slice(&json.stdout)?;
        assert_eq!(json["flows"][0]["flow"], names[0]);
        assert_eq!(json["flows"][0]["packets"], received);

        drop(app);
        let answer = explain(&dut.netns, &names[0])?;
        let unknown = one(&answer)?.0.application.unknown;
        assert_eq!(unknown, Some(Unknown::Closed), "{answer:?}");
        let text = render(&answer);
        assert!(text.contains("closed") && !text.contains("wants"), "{text}");
        active.stop()?;
    }
    Ok(())
}

#[test]
fn a_flow_that_is_not_where_it_wants_says_what_it_waits_for() -> Result<()> {
    in_lab!(alone: "a real-time thread takes a CPU from all others");
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let udp = own(UdpFlows::to(dut, 1));
    let name = flow_of(&udp).to_string();
    let socket = bind(&dut.netns, &udp, true)?;
    let peeks = socket.try_clone()?;
    // Whether the application is to read, and whether it does.
    let [reads, reading] = [(); 2].map(|()| Arc::new(AtomicBool::new(true)));
    let (to_read, does_read, mut buffer) = (reads.clone(), reading.clone(), [0; 2048]);
    let take = move || {
        does_read.store(to_read.load(Ordering::SeqCst), Ordering::SeqCst);
        if does_read.load(Ordering::SeqCst) {
            return socket.recv(&mut buffer);
        }
        std::thread::sleep(Duration::from_millis(1));
        Ok(0)
    };
    let app = App::start(&dut.netns, Box::new(take))?;
    let active = Active::steer(dut, options(&bed))?;
    app.move_to(OTHER_CPU)?;
    settle_at(&bed, &udp, Location::Cpu(OTHER_CPU))?;
    rest(&active)?;
    // A packet waits in the socket for an application that reads nothing now.
    let packet_waits = || {
        reads.store(false, Ordering::SeqCst);
        until("the application pauses", || {
            Ok((!reading.load(Ordering::SeqCst)).then_some(()))
        })?;
        bed.send(Frames::Udp(udp.clone()), 1)?;
        until("a packet to read", || Ok(peeks.peek(&mut [0; 8]).ok()))
    };
    // It receives that packet on this CPU.
    let reads_on = |cpu| {
        app.move_to(cpu)?;
        reads.store(true, Ordering::SeqCst);
        anyhow::Ok(())
    };

    let wants = |place: Location| {
        until(&format!("the flow wants {place}"), || {
            let answer = explain(&dut.netns, &name)?;
            let found = one(&answer)?.1.entry.wanted == place;
            Ok(found.then_some(answer))
        })
    };
    // The application moves without a packet after it; nothing is queued.
    packet_waits()?;
    reads_on(POLLING_CPU)?;
    let answer = wants(Location::Inline)?;
    let seen = one(&answer)?.1;
    assert_eq!(seen.entry.location, Location::Cpu(OTHER_CPU));
    assert_eq!(seen.waits, Some(Wait::Packet), "{answer:?}");
    // The next packet moves the flow, as printed.
    settle_at(&bed, &udp, Location::Inline)?;
    rest(&active)?;

    // A flow may leave INLINE when a poll is over, which shows only at another packet.
    packet_waits()?;
    reads_on(OTHER_CPU)?;
    let answer = wants(Location::Cpu(OTHER_CPU))?;
    let seen = one(&answer)?.1;
    assert_eq!(seen.entry.location, Location::Inline);
    assert_eq!(seen.waits, Some(Wait::Poll), "{answer:?}");
    settle_at(&bed, &udp, Location::Cpu(OTHER_CPU))?;
    rest(&active)?;

    // The thread gets almost no CPU time. Repeat if it has processed its packets nevertheless.
    let cpumaps = cpumaps(std::process::id())?;
    let held = until("the flow is held behind its packets", || {
        app.move_to(OTHER_CPU)?;
        settle_at(&bed, &udp, Location::Cpu(OTHER_CPU))?;
        packet_waits()?;
        app.move_to(POLLING_CPU)?;
        let hog = Hog::real_time(OTHER_CPU, Duration::from_secs(10))?;
        schedule(&cpumaps, libc::SCHED_IDLE)?;
        bed.send(Frames::Udp(udp.clone()), 200)?;
        reads_on(POLLING_CPU)?;
        let answer = wants(Location::Inline);
        schedule(&cpumaps, libc::SCHED_OTHER)?;
        drop(hog);
        let answer = answer?;
        let held = matches!(one(&answer)?.1.waits, Some(Wait::Backlog { .. }));
        Ok(held.then_some(answer))
    })?;
    let Some(Wait::Backlog {
        cpu,
        frames,
        thread,
    }) = &one(&held)?.1.waits
    else {
        panic!("{held:?}");
    };
    assert_eq!(*cpu, OTHER_CPU);
    assert!(*frames > 0 && *frames <= 200, "{held:?}");
    let thread = thread.as_deref().context("it has a name")?;
    let prefix = format!("cpumap/{OTHER_CPU}/map:");
    let number = thread.strip_prefix(&prefix).context(thread.to_owned())?;
    assert!(cpumaps.contains(&number.parse()?), "{thread}");
    let text = render(&held);
    for words in [
        "It wants to be processed where it is received (INLINE)",
        &format!("({thread}) still has {frames} packet"),
    ] {
        assert!(text.contains(words), "not {words:?} in {text}");
    }
    settle_at(&bed, &udp, Location::Inline)?;
    active.stop()
}

#[test]
fn an_unknown_application_has_a_reason() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let udp = own(UdpFlows::to(dut, 1));
    let active = Active::steer(dut, options(&bed))?;
    let unknown = |frames: Frames, target: &str| {
        bed.send(frames, 1)?;
        until("it has been received", || {
            let Ok(answer) = explain(&dut.netns, target) else {
                return Ok(None);
            };
            let (explanation, seen) = one(&answer)?;
            assert_eq!(seen.entry.reason, Reason::Rps, "{answer:?}");
            assert_eq!(explanation.application.cpu, None, "{answer:?}");
            Ok(Some(explanation.application.unknown))
        })
    };
    let to = |port| UdpFlows {
        dport: port,
        ..udp.clone()
    };

    // First no socket at all, then a socket that only receives.
    let target = flow_of(&to(7)).to_string();
    let got = unknown(Frames::Udp(to(7)), &target)?;
    assert_eq!(got, Some(Unknown::NotSeen));
    let _app = app(&dut.netns, bind(&dut.netns, &udp, false)?)?;
    for target in [
        flow_of(&udp).to_string(),
        "port:9".to_owned(),
        "9".to_owned(),
    ] {
        let got = unknown(Frames::Udp(udp.clone()), &target)?;
        assert_eq!(got, Some(Unknown::Unconnected), "{target}");
    }
    let target = flow_of(&to(4789)).to_string();
    let got = unknown(Frames::Udp(to(4789)), &target)?;
    assert_eq!(got, Some(Unknown::Tunnel));
    // IGMP without a message.
    let mut frame = dut.mac.to_vec();
    frame.extend([2, 0, 0, 0, 0, 1, 0x08, 0x00]);
    frame.extend([0x45, 0, 0, 20, 0, 0, 0, 0, 64, 2, 0, 0, 192, 0, 2, 1]);
    let IpAddr::V4(daddr) = udp.daddr else {
        panic!("{}", udp.daddr);
    };
    frame.extend(daddr.octets());
    let target = format!("igmp/{}/{daddr}", Ipv4Addr::new(192, 0, 2, 1));
    let got = unknown(Frames::Raw(frame), &target)?;
    assert_eq!(got, Some(Unknown::NoPorts));

    // A table with one entry: the latest application takes it.
    let target = flow_of(&udp).to_string();
    let set = |change: Change| dut.netns.run(|| client::set(change));
    set(Change {
        rps_sock_flow_entries: Some(1),
        ..Change::default()
    })?;
    let other = UdpFlows {
        dport: 10,
        ..udp.clone()
    };
    let connected = app(&dut.netns, bind(&dut.netns, &other, true)?)?;
    until("the other flow's application is known", || {
        bed.send(Frames::Udp(other.clone()), 1)?;
        let answer = explain(&dut.netns, &flow_of(&other).to_string());
        let known = |answer: &Answer| Ok::<_, anyhow::Error>(one(answer)?.0.application.cpu);
        Ok(answer.ok().as_ref().map(known).transpose()?.flatten())
    })?;
    let got = unknown(Frames::Udp(udp.clone()), &target)?;
    assert_eq!(got, Some(Unknown::EntryTaken));
    drop(connected);

    set(Change {
        rps_sock_flow_entries: Some(0),
        ..Change::default()
    })?;
    let got = unknown(Frames::Udp(udp.clone()), &target)?;
    assert_eq!(got, Some(Unknown::NoTable));
    set(Change {
        policy: Some(Policy::RPS),
        ..Change::default()
    })?;
    let got = unknown(Frames::Udp(udp.clone()), &target)?;
    assert_eq!(got, Some(Unknown::PolicyRps));
    set(Change {
        policy: Some(Policy::OFF),
        ..Change::default()
    })?;
    bed.send(Frames::Udp(udp.clone()), 1)?;
    let answer = explain(&dut.netns, &target)?;
    let (explanation, seen) = one(&answer)?;
    assert_eq!(explanation.application.unknown, Some(Unknown::PolicyOff));
    assert_eq!(seen.entry.reason, Reason::PolicyOff);
    active.stop()
}

/// The lab's few packets leave room on the polling CPU. Other work may not, but does not saturate
/// it, so that the flow stays where it is.
#[test]
fn a_lightly_loaded_flow_stays_for_its_room() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let udp = own(UdpFlows::to(dut, 1));
    let name = flow_of(&udp).to_string();
    let app = app(&dut.netns, bind(&dut.netns, &udp, true)?)?;
    app.move_to(OTHER_CPU)?;
    let adapt = Options {
        policy: "rfs+idle+adapt".parse().map_err(anyhow::Error::msg)?,
        rps_cpus: RpsCpus::Mask(mask(&[OTHER_CPU])),
        ..options(&bed)
    };
    let active = Active::steer(dut, adapt)?;
    let answer = until("the application is known, and it has been decided", || {
        bed.send(Frames::Udp(udp.clone()), 20)?;
        let answer = explain(&dut.netns, &name)?;
        let (explanation, seen) = one(&answer)?;
        let pressure = seen
            .decision
            .as_ref()
            .and_then(|d| d.load.as_ref())
            .map(|l| l.pressure);
        let decided = matches!(
            (seen.entry.reason, pressure),
            (Reason::Room, Some(Pressure::Relaxed)) | (Reason::Stay, Some(Pressure::Full))
        );
        let known = explanation.application.cpu == Some(OTHER_CPU);
        Ok((decided && known).then_some(answer))
    })?;
    let entry = &one(&answer)?.1.entry;
    assert_eq!((entry.location, entry.moves), (Location::Inline, 0));
    assert_eq!(entry.wanted, Location::Inline);
    let text = render(&answer);
    let (why, load) = match entry.reason {
        Reason::Room => ("had room.", "has room for all flows of the queue: busy "),
        _ => (
            "had no room for more flows, but kept those it had.",
            "has no room for more flows",
        ),
    };
    for words in [
        "it last took or sent data of this flow on CPU 1.",
        &format!("The last decision was to leave it there: CPU 0, which polled the queue, {why}"),
        &format!("Now CPU 0, which polls the queue, {load}"),
    ] {
        assert!(text.contains(words), "not {words:?} in {text}");
    }
    let queue = &status(&active)?.devices[0].queues[0];
    let load = queue.load.as_ref().context("it is looked at")?;
    assert_eq!(load.polling_cpu, Some(POLLING_CPU), "{load:?}");
    assert!(load.polls_percent <= load.busy_percent && load.busy_percent <= 100);

    // The same load, under a policy that ignores it.
    let change = Change {
        policy: Some(Policy::RFS),
        ..Change::default()
    };
    dut.netns.run(|| client::set(change))?;
    let answer = settle_at(&bed, &udp, Location::Cpu(OTHER_CPU))?;
    let seen = one(&answer)?.1;
    assert_eq!(seen.entry.reason, Reason::Application, "{answer:?}");
    assert_eq!((seen.entry.base, &seen.decision), (None, &None));
    assert!(!render(&answer).contains("Now CPU"), "{}", render(&answer));
    assert_eq!(status(&active)?.devices[0].queues[0].load, None);
    active.stop()
}

#[test]
fn dropped_packets_are_explained() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let options = Options {
        backlog: Some(16),
        rps_flow_cnt: 1 << 10,
        ..bed.options(&[OTHER_CPU])
    };
    let active = Active::steer(dut, options)?;
    let udp = own(UdpFlows::to(dut, 1));
    bed.send(Frames::Udp(udp.clone()), 1)?;
    at_rest(&active, 0, 1)?;
    assert_eq!(status(&active)?.dropped_flows, None);

    // More frames at once than the backlog holds.
    let mut sent = 1;
    let queue = until("packets have been dropped", || {
        let hog = Hog::new(OTHER_CPU)?;
        bed.send(Frames::Udp(udp.clone()), 2_000)?;
        drop(hog);
        sent += 2_000;
        let queue = at_rest(&active, 0, sent)?;
        Ok((queue.dropped() > 0).then_some(queue))
    })?;
    let dropped_flows = status(&active)?.dropped_flows.context("some were")?;
    let [entry] = &dropped_flows.flows[..] else {
        panic!("{dropped_flows:?}");
    };
    assert_eq!(entry.flow, Some(flow_of(&udp)));
    assert_eq!(u64::from(entry.dropped), queue.dropped(), "{entry:?}");
    let accepted = queue.inline + queue.sums.redirected;
    assert_eq!(u64::from(entry.packets), accepted, "{entry:?}");

    let answer = explain(&dut.netns, &flow_of(&udp).to_string())?;
    let drops = one(&answer)?.1.queue_dropped.clone();
    let drops = drops.context("it lost some")?;
    let expected = Drops {
        full: queue.sums.dropped,
        shed: queue.sums.shed,
        ..Drops::default()
    };
    assert_eq!(drops, expected);
    let words = format!("{} packets of it were dropped before", entry.dropped);
    assert!(render(&answer).contains(&words), "{}", render(&answer));
    active.stop()
}

/// A flow is not found by its name while another flow has its slot.
#[test]
fn a_flow_without_a_slot_names_the_owner() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let options = Options {
        rps_flow_cnt: 1,
        ..options(&bed)
    };
    let active = Active::steer(dut, options)?;
    let (first, second) = (
        own(UdpFlows::to(dut, 1)),
        UdpFlows {
            dport: 10,
            ..own(UdpFlows::to(dut, 1))
        },
    );
    bed.send(Frames::Udp(first.clone()), 1)?;
    at_rest(&active, 0, 1)?;
    let hash = one(&explain(&dut.netns, &flow_of(&first).to_string())?)?
        .0
        .hash;
    bed.send(Frames::Udp(second.clone()), 1)?;
    at_rest(&active, 0, 2)?;
    let owner = format!("is now that of {}", flow_of(&second));
    refused(
        &dut.netns,
        &["explain", &flow_of(&first).to_string()],
        &owner,
    )?;
    refused(&dut.netns, &["explain", &hash.to_string()], &owner)?;
    assert_eq!(flows(&dut.netns, 10)?.total, 1);
    active.stop()
}

#[test]
fn missing_flows_are_one_line() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let none = "no rxsteer is running in this network namespace";
    refused(&dut.netns, &["flows"], none)?;
    refused(&dut.netns, &["explain", "udp/192.0.2.1:1/9"], none)?;
    refused(&dut.netns, &["explain", "port:9"], none)?;

    let active = Active::steer(dut, options(&bed))?;
    let mut child = dut.netns.command(Path::new("true"))?.spawn()?;
    child.wait()?;
    let mut idle = dut.netns.command(Path::new("sleep"))?.arg("1000").spawn()?;
    let refusals = || {
        let dead = format!("pid:{}", child.id());
        refused(&dut.netns, &["explain", &dead], "there is no process")?;
        let without = format!("pid:{}", idle.id());
        refused(
            &dut.netns,
            &["explain", &without],
            "has no TCP or UDP socket",
        )?;
        for (target, why) in [
            (
                "udp/192.0.2.1:1/9",
                "no packet of udp/192.0.2.1:1/9 is known on",
            ),
            ("0x12345678", "no packet of 0x12345678 is known on"),
            ("port:9", "no flow of port:9 is known on"),
        ] {
            refused(&dut.netns, &["explain", target], why)?;
        }
        refused(
            &dut.netns,
            &["flows", "--device", "eth9"],
            "eth9 is not steered",
        )
    };
    let refusals = refusals();
    idle.kill()?;
    idle.wait()?;
    refusals?;
    let text = command(&dut.netns, &["flows"])?;
    assert_eq!(String::from_utf8(text.stdout)?, "no flows\n");
    active.stop()?;

    let dry = Options {
        dry_run: true,
        ..options(&bed)
    };
    let active = Active::steer(dut, dry)?;
    refused(&dut.netns, &["explain", "port:9"], "a dry run")?;
    bed.send(Frames::Udp(UdpFlows::to(dut, 3)), 3)?;
    at_rest(&active, 0, 3)?;
    let list = flows(&dut.netns, 9)?;
    ensure!(list.total == 3, "{list:?}");
    ensure!(list.flows.iter().all(|flow| flow.packets == 1), "{list:?}");
    active.stop()
}

#[test]
fn the_limit_leaves_those_with_the_most_packets() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let dut = &bed.link.dut;
    let active = Active::steer(dut, options(&bed))?;
    let to = |dport, nr_flows| UdpFlows {
        dport,
        ..own(UdpFlows::to(dut, nr_flows))
    };
    let start = Instant::now();
    for (flows, count) in [(to(9, 64), 64), (to(10, 1), 5), (to(11, 1), 3)] {
        bed.send(Frames::Udp(flows), count)?;
    }
    at_rest(&active, 0, 72)?;
    let sent = Instant::now();
    std::thread::sleep(Duration::from_millis(500));
    let waited = sent.elapsed();
    let list = flows(&dut.netns, 3)?;
    let since = start.elapsed();
    // Flows that share one of the 2^16 slots count as one; one run in thirty has such a pair.
    ensure!(list.total >= 63, "{list:?}");
    // These flows sent last, so that they have their slots.
    let seen: Vec<_> = list.flows.iter().map(|e| e.packets).collect();
    assert_eq!(seen, [5, 3, 1]);
    // Ticks have limited resolution, and may be late on a busy machine.
    let slack = Duration::from_millis(100);
    for entry in &list.flows {
        let idle = Duration::from_secs_f64(entry.idle_seconds);
        assert!(idle + slack > waited && idle < since + slack, "{entry:?}");
    }
    // A flow found both by its socket and in the tables counts once.
    let _socket = bind(&dut.netns, &to(9, 1), true)?;
    let answer = dut.netns.run(|| explain::ask(Target::Port(9), 7))?;
    assert_eq!(answer.explanations.flows.len(), 7);
    assert_eq!(answer.explanations.total, list.total - 2);
    assert!(render(&answer).contains("7 of "), "{}", render(&answer));
    active.stop()
}
