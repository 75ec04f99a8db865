// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parser on the packets of `tests/fixtures/`: natively and in the kernel, whole and cut.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::common::key::words;
use crate::fixture::{self, Fixture, outer};
use rxlab::testing::probe::{FRAME_MIN, Parsed, Probe};
use rxsteer::datapath::flow::Flow;
use rxsteer::datapath::{inline_ports, native};
use rxsteer::types::{flow_key, flow_option, flow_result, flow_secret};

/// A comparable result: the key's words, or the `FLOW_*`.
type Outcome = Result<[u32; 10], u32>;

fn outcome(result: &Result<flow_key, flow_result>) -> Outcome {
    match result {
        Ok(key) => Ok(words(key)),
        Err(why) => Err(why.0),
    }
}

fn parse(linear: &[u8], len: usize, tunnels: u32) -> Outcome {
    outcome(&native::flow_parse(linear, len as u32, tunnels))
}

const TRUNCATED: Outcome = Err(flow_result::FLOW_TRUNCATED.0);
/// The secret of `docs/hash.md`'s test vectors.
fn secret() -> flow_secret {
    flow_secret {
        addend: 0x0123_4567_89ab_cdef,
        multiplier: std::array::from_fn(|i| (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
    }
}

#[test]
fn udp_flows_have_the_listed_ports() {
    let has = |flow: &str, ports: &[u16]| {
        let key = flow.parse::<Flow>().unwrap().key();
        native::flow_has_port(&key, &inline_ports(ports).unwrap())
    };
    let full: Vec<u16> = (304..=319).collect();
    for (flow, ports, expected) in [
        ("udp/192.0.2.1:1024/319", &[123, 319][..], true),
        ("udp/[2001:db8::1]:123/1024", &[123, 319], true),
        ("udp/192.0.2.1:1024/320", &[123, 319], false),
        ("tcp/192.0.2.1:1024/319", &[123, 319], false),
        ("udp/192.0.2.1:1024/319", &full, true),
        ("udp/192.0.2.1:1024/319", &[0, 319], true),
        ("udp/192.0.2.1:1024/319", &[], false),
        ("udp/192.0.2.1:0/319", &[123], false),
    ] {
        assert_eq!(has(flow, ports), expected, "{flow} {ports:?}");
    }
    assert!(inline_ports(&[1; 17]).is_none());
}

#[test]
fn every_fixture_gets_its_key() {
    let fixtures = fixture::all();
    assert!(
        fixtures.len() >= 80,
        "only {} fixtures found",
        fixtures.len()
    );
    for fixture in &fixtures {
        assert_eq!(
            parse(&fixture.packet, fixture.packet.len(), fixture.tunnels),
            outcome(&fixture.expected),
            "{}",
            fixture.description
        );
    }
}

/// A truncated packet never gets another flow, and a packet without a flow never gets one, whether
/// the frame ends there or only its linear part.
#[test]
fn a_cut_packet_keeps_its_key_or_loses_it() {
    for fixture in fixture::all() {
        let whole = outcome(&fixture.expected);
        for cut in 0..fixture.packet.len() {
            for len in [cut, fixture.packet.len()] {
                let got = parse(&fixture.packet[..cut], len, fixture.tunnels);
                assert!(
                    got == whole || got == TRUNCATED,
                    "{}, {cut} of {len} bytes: {got:x?}, whole {whole:x?}",
                    fixture.description
                );
            }
        }
    }
}

#[test]
fn the_kernel_agrees_on_every_fixture_cut_anywhere() {
    if !nix::unistd::geteuid().is_root() {
        return rxlab::testing::not_run(
            "flow fixtures in the kernel",
            "loading BPF programs needs root",
        );
    }
    let mut by_tunnels: BTreeMap<u32, Vec<Fixture>> = BTreeMap::new();
    for fixture in fixture::all() {
        by_tunnels.entry(fixture.tunnels).or_default().push(fixture);
    }
    for (tunnels, fixtures) in by_tunnels {
        in_the_kernel(tunnels, &fixtures);
    }
}

/// Parses the fixtures' packets in the kernel, truncated to each length from the kernel's minimum
/// on, and compares key, hash and result with the native run.
fn in_the_kernel(tunnels: u32, fixtures: &[Fixture]) {
    let mut probe = Probe::load(tunnels, &secret())
        .unwrap_or_else(|error| panic!("tunnels {tunnels:#x}: {error:#}"));
    for fixture in fixtures {
        let lens = FRAME_MIN..=fixture.packet.len();
        let packets: Vec<&[u8]> = lens.map(|len| &fixture.packet[..len]).collect();
        let compare = |number: usize, (result, hash): Parsed| {
            let packet = packets[number];
            let at = format!("{}, {} bytes", fixture.description, packet.len());
            assert_eq!(
                outcome(&result),
                parse(packet, packet.len(), tunnels),
                "{at}"
            );
            let key = result.unwrap_or_default();
            assert_eq!(hash, native::flow_hash(&key, &secret()), "{at}");
        };
        probe.parse(&packets, compare).unwrap();
        assert_eq!(
            parse(&fixture.packet, fixture.packet.len(), tunnels),
            outcome(&fixture.expected),
            "{}",
            fixture.description
        );
    }
}

/// A packet whose key is that of an inner flow also has the outermost source address, and the tunnel's id: each
/// gives the packet another hash, but not to its socket.
#[test]
fn an_inner_flow_is_another_one_in_another_tunnel() {
    let mut nr = 0;
    let mut ids = BTreeSet::new();
    for of in fixture::all() {
        let parse = |packet: &[u8], options| {
            native::flow_parse(packet, packet.len() as u32, options).map_err(|why| why.0)
        };
        let Ok(key) = parse(&of.packet, of.tunnels) else {
            continue;
        };
        let is_inner = parse(&of.packet, 0).map(|key| words(&key)) != Ok(words(&key));
        assert_eq!(
            outer(&key) != Default::default(),
            is_inner,
            "{}",
            of.description
        );
        let symmetric = flow_option::FLOW_SYMMETRIC.0;
        let without = parse(&of.packet, of.tunnels | symmetric).expect("it has a key");
        assert_eq!(outer(&without), Default::default(), "{}", of.description);
        let hashes = |key: &flow_key| {
            let own = native::flow_own_hash(key, &secret());
            (native::flow_hash(key, &secret()), own)
        };
        let (known, own) = hashes(&key);
        assert_eq!(known != own, is_inner, "{}", of.description);
        // The last byte of the outer source, where that is the first header.
        let at = match of.packet[12..14] {
            [0x08, 0x00] => 29,
            [0x86, 0xdd] => 37,
            _ => continue,
        };
        if !is_inner {
            continue;
        }
        let mut forged = of.packet.clone();
        forged[at] ^= 1;
        let forged = parse(&forged, of.tunnels).expect("it has a key");
        assert_eq!(words(&forged), words(&key), "{}", of.description);
        let (socket, slot) = hashes(&forged);
        assert!(socket == known && slot != own, "{}", of.description);
        let mut other = key;
        other.tunnel ^= 1;
        assert_ne!(hashes(&other).1, own);
        ids.insert(u32::from_be(key.tunnel));
        nr += 1;
    }
    assert!(nr > 10, "{nr}");
    // Tunnels without an id, and others.
    assert!(ids.contains(&0) && ids.len() > 2, "{ids:x?}");
}

/// A packet and the socket that receives it have the same key, hence the same hash, also for
/// v4-mapped addresses of a dual-stack socket.
#[test]
fn a_socket_has_the_key_of_its_packets() {
    let v4: Ipv4Addr = "192.0.2.1".parse().unwrap();
    let v6: Ipv6Addr = "2001:db8::1".parse().unwrap();
    let packet = |source: IpAddr, tcp: bool| {
        let payload = [0u8; 20];
        let mut bytes = Vec::new();
        let step = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]);
        let step = match source {
            IpAddr::V4(source) => step.ipv4(source.octets(), [198, 51, 100, 2], 64),
            IpAddr::V6(source) => step.ipv6(source.octets(), [0xfd; 16], 64),
        };
        match tcp {
            true => step
                .tcp(40_000, 443, 1, 512)
                .write(&mut bytes, &payload)
                .unwrap(),
            false => step.udp(40_000, 443).write(&mut bytes, &payload).unwrap(),
        }
        native::flow_parse(&bytes, bytes.len() as u32, 0).unwrap()
    };
    for (tcp, proto) in [(true, 6), (false, 17)] {
        for (source, peer) in [
            (IpAddr::V4(v4), IpAddr::V4(v4)),
            (IpAddr::V4(v4), IpAddr::V6(v4.to_ipv6_mapped())),
            (IpAddr::V6(v6), IpAddr::V6(v6)),
        ] {
            let arrived = packet(source, tcp);
            let held = native::flow_key_ports(SocketAddr::new(peer, 40_000), 443, proto);
            assert_eq!(words(&arrived), words(&held), "{peer} {proto}");
            assert_eq!(
                native::flow_hash(&arrived, &secret()),
                native::flow_hash(&held, &secret()),
                "{peer} {proto}"
            );
        }
    }
    // pairs that must be different flows
    let key = |peer: &str, port, proto| {
        words(&native::flow_key_ports(peer.parse().unwrap(), port, proto))
    };
    let one = key("192.0.2.1:40000", 443, 6);
    for other in [
        key("192.0.2.1:40000", 443, 17),
        key("192.0.2.1:40000", 444, 6),
        key("192.0.2.1:443", 40_000, 6),
        key("192.0.2.2:40000", 443, 6),
        key("[2001:db8::1]:40000", 443, 6),
    ] {
        assert_ne!(one, other);
    }
}

/// The data path computes the vectors in `docs/hash.md`, which come from another implementation.
#[test]
fn the_documented_vectors_hold() {
    let doc = include_str!("../../../../docs/hash.md");
    let rows: Vec<Vec<&str>> = doc
        .lines()
        .filter(|line| line.contains("`0x") && line.starts_with('|'))
        .map(|line| {
            line.split('|')
                .map(|cell| cell.trim().trim_matches('`'))
                .collect()
        })
        .collect();
    assert!(rows.len() >= 7, "the table in docs/hash.md is gone");
    for row in rows {
        let [_, peer, port, proto, hash, _] = row[..] else {
            panic!("{row:?}")
        };
        let key = native::flow_key_ports(
            peer.parse().unwrap(),
            port.parse().unwrap(),
            proto.parse().unwrap(),
        );
        let hash = u32::from_str_radix(hash.trim_start_matches("0x"), 16).unwrap();
        assert_eq!(native::flow_hash(&key, &secret()), hash, "{row:?}");
    }
}

/// The formula of `docs/hash.md` in Rust, over keys with every word in use.
#[test]
fn the_hash_is_the_documented_formula() {
    let documented = |words: &[u32]| {
        let secret = secret();
        let sum = (words.iter().zip(secret.multiplier)).fold(secret.addend, |sum, (&w, m)| {
            sum.wrapping_add(m.wrapping_mul(w.into()))
        });
        let mut hash = (sum >> 32) as u32;
        hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
        hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
        hash ^ (hash >> 16)
    };
    let keys: Vec<_> = fixture::all()
        .into_iter()
        .filter_map(|of| of.expected.ok())
        .collect();
    assert!((0..10).all(|i| keys.iter().any(|key| words(key)[i] != 0)));
    for key in keys {
        assert_eq!(
            native::flow_hash(&key, &secret()),
            documented(&words(&key)),
            "{key:x?}"
        );
    }
    for of in fixture::all() {
        let Ok(key) = native::flow_parse(&of.packet, of.packet.len() as u32, of.tunnels) else {
            continue;
        };
        let (source, id) = outer(&key);
        let all = [&words(&key)[..], &source, &[id]].concat();
        assert_eq!(
            native::flow_own_hash(&key, &secret()),
            documented(&all),
            "{key:x?}"
        );
    }
}
