// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--hash symmetric`: both directions of a connection have one key, one hash and one CPU.

use std::net::{IpAddr, SocketAddr};

use crate::common::key::words;
use crate::helpers::process::{Rxsteer, rxsteer};
use anyhow::{Context, Result, ensure};
use etherparse::PacketBuilder;
use nix::sys::signal::Signal;
use proptest::prelude::*;
use rxlab::in_lab;
use rxlab::lab::frame::{Frames, UdpFlows};
use rxlab::lab::generator::{Generator, GeneratorConfig};
use rxlab::lab::link::LinkConfig;
use rxlab::lab::netns::Netns;
use rxlab::testing::testbed::{POLLING_CPU, Testbed, until};
use rxsteer::api::flows::Flows;
use rxsteer::datapath::flow::Flow;
use rxsteer::datapath::native;
use rxsteer::types::flow_option;

const SYMMETRIC: u32 = flow_option::FLOW_SYMMETRIC.0;
const VXLAN: u32 = flow_option::FLOW_TUNNEL_VXLAN.0;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// Where a packet is found in its frame.
#[derive(Clone, Copy, Debug)]
enum Within {
    Ethernet,
    Vlan,
    Vxlan,
}

/// A frame of `proto` from one end to the other.
fn frame(within: Within, proto: u8, from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
    let mut bytes = Vec::new();
    let payload = [0; 24];
    if let Within::Vxlan = within {
        let mut inner = vec![8, 0, 0, 0, 0, 0, 42, 0];
        inner.extend(frame(Within::Ethernet, proto, from, to));
        // The outer flow has a direction.
        let udp = ethernet.ipv4([192, 0, 2, 1], [192, 0, 2, 2], 64);
        let written = udp.udp(50_000, 4789).write(&mut bytes, &inner);
        written.expect("the frame is short");
        return bytes;
    }
    let ip = |from: IpAddr, to: IpAddr| match (within, from, to) {
        (Within::Vlan, IpAddr::V4(from), IpAddr::V4(to)) => ethernet
            .single_vlan(7.try_into().expect("it is small"))
            .ipv4(from.octets(), to.octets(), 64),
        (Within::Vlan, IpAddr::V6(from), IpAddr::V6(to)) => ethernet
            .single_vlan(7.try_into().expect("it is small"))
            .ipv6(from.octets(), to.octets(), 64),
        (_, IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), 64),
        (_, IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), 64),
        _ => unreachable!("both addresses are of one family"),
    };
    let ip = ip(from.ip(), to.ip());
    let written = match proto {
        TCP => ip
            .tcp(from.port(), to.port(), 1, 512)
            .write(&mut bytes, &payload),
        _ => ip.udp(from.port(), to.port()).write(&mut bytes, &payload),
    };
    written.expect("the frame is short");
    bytes
}

fn key(frame: &[u8], parse: u32) -> [u32; 10] {
    words(&native::flow_parse(frame, frame.len() as u32, parse).expect("it has a flow"))
}

/// Two ends of one family, which may be one host.
fn ends() -> impl Strategy<Value = [SocketAddr; 2]> {
    let v4 = any::<[[u8; 4]; 2]>().prop_map(|pair| pair.map(IpAddr::from));
    let v6 = any::<[[u8; 16]; 2]>().prop_map(|pair| pair.map(IpAddr::from));
    let one = any::<[u8; 4]>().prop_map(|ip| [IpAddr::from(ip); 2]);
    // 0 is no port, and a fragment's.
    (prop_oneof![v4, v6, one], 1..=u16::MAX, 1..=u16::MAX)
        .prop_map(|([a, b], port, other)| [SocketAddr::new(a, port), SocketAddr::new(b, other)])
}

proptest! {
    #[test]
    fn both_directions_have_one_key(
        ends in ends(),
        proto in prop_oneof![Just(TCP), Just(UDP)],
        within in prop_oneof![Just(Within::Ethernet), Just(Within::Vlan), Just(Within::Vxlan)],
    ) {
        let [a, b] = ends;
        let both = [frame(within, proto, a, b), frame(within, proto, b, a)];
        let [there, back] = both.each_ref().map(|frame| key(frame, SYMMETRIC | VXLAN));
        prop_assert_eq!(there, back);
        // The same flow, by whatever name.
        for (remote, local) in [(a, b), (b, a)] {
            let flow = Flow::of_connection(proto, remote, local);
            prop_assert_eq!(words(&flow.key()), there);
            prop_assert_eq!(flow.to_string().parse(), Ok(flow));
        }
        let read = native::flow_parse(&both[0], both[0].len() as u32, SYMMETRIC | VXLAN);
        let read = Flow::from_key(&read.expect("it has a flow")).expect("it has a name");
        prop_assert_eq!(words(&read.key()), there);
        // The control: otherwise each direction has its own.
        let [there, back] = both.each_ref().map(|frame| key(frame, VXLAN));
        prop_assert_eq!(there == back, a == b || (a.ip() == b.ip() && a.port() == b.port()));
    }

    #[test]
    fn other_connections_have_other_keys(one in ends(), other in ends()) {
        let mut sorted = [one, other];
        sorted.iter_mut().for_each(|ends| ends.sort());
        let [one, other] = [one, other].map(|[a, b]| {
            key(&frame(Within::Ethernet, UDP, a, b), SYMMETRIC)
        });
        prop_assert_eq!(one == other, sorted[0] == sorted[1]);
    }
}

/// The connections of `flows`, in the other direction.
fn back(flows: &UdpFlows) -> UdpFlows {
    UdpFlows {
        saddr: flows.daddr,
        daddr: flows.saddr,
        sport: flows.dport,
        dport: flows.sport,
        ..flows.clone()
    }
}

/// A router's two devices: what comes back has the CPU of what went there.
#[test]
fn both_directions_have_one_cpu() -> Result<()> {
    in_lab!();
    let dut = Netns::new("dut")?;
    let beds = [0, 1].map(|id| {
        let config = LinkConfig {
            id,
            ..LinkConfig::default()
        };
        Testbed::between(&Netns::new("tester")?, &dut, &config)
    });
    let [outside, inside] = beds;
    let (outside, inside) = (outside?, inside?);
    let names = [&outside, &inside].map(|bed| bed.link.dut.name.clone());
    let args = [
        &names[0],
        &names[1],
        "--hash=symmetric",
        "--policy=rps",
        "--rps-cpus=0-1",
        // With 4096, one run in eight has two flows in one slot.
        "--rps-flow-cnt=524288",
    ];
    let running = Rxsteer::steering(&dut, &args)?;
    // Each connection from a port of its own.
    for port in 2_000..2_032 {
        let there = UdpFlows {
            sport: port,
            ..UdpFlows::to(&outside.link.dut, 1)
        };
        for (bed, flows) in [(&outside, &there), (&inside, &back(&there))] {
            // Over several polls: a flow leaves its first place between two.
            let frames = GeneratorConfig::lossless(Frames::Udp(flows.clone()), Some(20));
            Generator::start(&bed.link, POLLING_CPU, &frames.at(20_000))?.wait()?;
        }
    }
    until("all packets were received", || {
        Ok((running.received()? >= 2 * 32 * 20).then_some(()))
    })?;
    let flows = rxsteer(&dut, &["flows", "--json", "--limit=1000"])?;
    let flows: Flows = serde_json::from_slice(&flows.stdout)?;
    let of = |name: &String| {
        let flows = flows.flows.iter().filter(|entry| entry.device == *name);
        // Where it is follows under the rule of order, once there is a backlog.
        let mut flows: Vec<_> = flows.map(|entry| (entry.hash, entry.wanted)).collect();
        flows.sort_by_key(|(hash, _)| *hash);
        flows
    };
    let [there, back] = names.each_ref().map(of);
    assert_eq!(there.len(), 32, "{flows:?}");
    assert_eq!(there, back, "{flows:?}");
    // On both CPUs: else they could be equal by chance.
    let first = there.first().context("there are flows")?.1;
    ensure!(there.iter().any(|(_, at)| *at != first), "{there:?}");

    // Either direction names it.
    let dut_ip = outside.link.dut.ipv4;
    let peer = UdpFlows::to(&outside.link.dut, 1).saddr;
    for name in [
        format!("udp/{peer}:2000/{dut_ip}:9"),
        format!("udp/{dut_ip}:9/{peer}:2000"),
    ] {
        let explained = rxsteer(&dut, &["explain", &name])?;
        let text = String::from_utf8(explained.stdout)?;
        ensure!(
            explained.status.success() && text.contains(&names[0]),
            "{name}: {text}"
        );
    }
    let ended = running.stop(Signal::SIGTERM)?;
    assert_eq!(ended.code, Some(0), "{ended:?}");

    let ended = Rxsteer::start(&dut, &[&names[0], "--hash=symmetric", "--policy=rfs"])?;
    let ended = ended.err().context("it starts")?;
    assert!(ended.log.contains("--follow-nat"), "{ended:?}");
    Ok(())
}
