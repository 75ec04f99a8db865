// SPDX-License-Identifier: MIT OR Apache-2.0
//! The hash spreads flows evenly over CPUs, whatever their keys have in common.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rxsteer::datapath::native;
use rxsteer::types::{flow_key, flow_secret};

const TCP: u32 = 6;
const UDP: u32 = 17;
const ESP: u32 = 50;
/// An rps_map's indirection table, filled round-robin.
const SLOTS: usize = 1024;
const FLOWS: u32 = 30_000;

/// splitmix64: pseudo-random numbers, the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn secret(&mut self) -> flow_secret {
        let mut secret = flow_secret {
            addend: self.next(),
            ..Default::default()
        };
        secret.multiplier.fill_with(|| self.next());
        secret
    }
}

fn v4(address: u32, port: u32, local_port: u32, proto: u32) -> flow_key {
    let peer = SocketAddr::new(IpAddr::V4(Ipv4Addr::from(address)), port as u16);
    native::flow_key_ports(peer, local_port as u16, proto)
}

fn v6(address: u128, port: u32, local_port: u32, proto: u32) -> flow_key {
    let peer = SocketAddr::new(IpAddr::V6(Ipv6Addr::from(address)), port as u16);
    native::flow_key_ports(peer, local_port as u16, proto)
}

/// An SPI of two hosts.
fn esp(spi: u32) -> flow_key {
    flow_key {
        daddr: [0, 0, 0xffff_u32.to_be(), 0x0a00_0001_u32.to_be()],
        ports: spi.to_be(),
        ..v4(0xc000_0201, 0, 0, ESP)
    }
}

/// Sets of distinct flows as hosts see them, each of length `FLOWS`.
fn sets() -> Vec<(&'static str, Vec<flow_key>)> {
    let client = 0x0a00_0001;
    let net = 0x2001_0db8_u128 << 96;
    let mut random = Random(7);
    let flows = |of: &mut dyn FnMut(u32) -> flow_key| (0..FLOWS).map(of).collect::<Vec<_>>();
    vec![
        (
            "sequential source ports",
            flows(&mut |i| v4(client, 1024 + i, 443, TCP)),
        ),
        (
            "sequential destination ports",
            flows(&mut |i| v4(client, 40_000, 1024 + i, UDP)),
        ),
        (
            "even source ports",
            flows(&mut |i| v4(client + i % 4, 1024 + i / 4 * 2, 443, TCP)),
        ),
        (
            "sequential addresses",
            flows(&mut |i| v4(client + i, 40_000, 443, TCP)),
        ),
        (
            "one host in every /24",
            flows(&mut |i| v4(client + (i << 8), 40_000, 443, TCP)),
        ),
        (
            "sequential IPv6 hosts",
            flows(&mut |i| v6(net + u128::from(i), 40_000, 443, TCP)),
        ),
        (
            "sequential IPv6 subnets",
            flows(&mut |i| v6(net + (u128::from(i) << 64) + 1, 500, 500, UDP)),
        ),
        (
            "peers on one port, as VXLAN's",
            flows(&mut |i| v4(0xac10_0000 + i, 4789, 4789, UDP)),
        ),
        ("sequential SPIs of two hosts", flows(&mut |i| esp(256 + i))),
        (
            "address and port in step",
            flows(&mut |i| v4(client + i % 256, 32_768 + i / 256, 80, TCP)),
        ),
        (
            "clients of a web server",
            // 600 networks behind address translation, with 50 ephemeral ports each
            flows(&mut |i| {
                let host = 0x5000_0000 + (i / 50).wrapping_mul(0x0003_0d41);
                v4(
                    host,
                    32_768 + (i % 50) * 2 + random.next() as u32 % 2,
                    443,
                    TCP,
                )
            }),
        ),
        (
            "QUIC and TCP, IPv4 and IPv6",
            flows(&mut |i| match i % 4 {
                0 => v4(client + i, 50_000 + i % 7, 443, UDP),
                1 => v4(client + i, 50_000 + i % 7, 443, TCP),
                2 => v6(net + u128::from(i), 50_000 + i % 7, 443, UDP),
                _ => v6(net + u128::from(i), 50_000 + i % 7, 443, TCP),
            }),
        ),
    ]
}

/// Pearson's chi-square of the flows per CPU, against each CPU's share of the table.
fn chi_square(slots: &[u32; SLOTS], cpus: usize) -> f64 {
    let all: u32 = slots.iter().sum();
    let per_cpu = |cpu| {
        let own = slots.iter().skip(cpu).step_by(cpus);
        let expected = f64::from(all) * own.len() as f64 / SLOTS as f64;
        (f64::from(own.sum::<u32>()) - expected).powi(2) / expected
    };
    (0..cpus).map(per_cpu).sum()
}

/// The value that chi-square exceeds with probability 1e-7 if random (Wilson-Hilferty).
fn bound(cpus: usize) -> f64 {
    const Z: f64 = 5.2;
    let freedom = (cpus - 1) as f64;
    let spread = 2.0 / (9.0 * freedom);
    freedom * (1.0 - spread + Z * spread.sqrt()).powi(3)
}

/// The numbers of CPUs over which these hashes spread worse than random ones.
fn uneven(hashes: &[u32]) -> Vec<usize> {
    let mut slots = [0; SLOTS];
    for hash in hashes {
        slots[(hash >> 22) as usize] += 1;
    }
    (2..=64)
        .filter(|&cpus| chi_square(&slots, cpus) > bound(cpus))
        .collect()
}

#[test]
fn flows_spread_evenly_over_2_to_64_cpus() {
    let mut random = Random(42);
    let sets = sets();
    for _ in 0..16 {
        let secret = random.secret();
        for (name, keys) in &sets {
            let hashes: Vec<u32> = keys
                .iter()
                .map(|key| native::flow_hash(key, &secret))
                .collect();
            let uneven = uneven(&hashes);
            assert!(
                uneven.is_empty(),
                "{name}: uneven over {uneven:?} CPUs, secret {secret:x?}"
            );
        }
    }
}

/// Control: the check rejects hashes that are known to be poor.
#[test]
fn the_check_sees_poor_hashes() {
    let sets = sets();
    let (_, ports) = &sets[0];
    let (_, addresses) = &sets[3];
    let identity = |word: fn(&flow_key) -> u32, keys: &[flow_key]| {
        keys.iter()
            .map(|key| u32::from_be(word(key)))
            .collect::<Vec<_>>()
    };
    assert!(!uneven(&identity(|key| key.ports, ports)).is_empty());
    assert!(uneven(&identity(|key| key.saddr[3], addresses)).len() > 60);
    // one bit is constant: only every second CPU is used
    let mut random = Random(1);
    let half: Vec<u32> = (0..FLOWS)
        .map(|_| random.next() as u32 & !(1 << 22))
        .collect();
    assert!(uneven(&half).contains(&2));
}

/// The secret decides: with two secrets, a flow's CPUs agree in one of 64 cases, as if random.
#[test]
fn the_secret_decides_where_a_flow_goes() {
    let mut random = Random(3);
    let (one, other) = (random.secret(), random.secret());
    let (_, keys) = &sets()[0];
    let same = keys
        .iter()
        .filter(|key| native::flow_hash(key, &one) >> 26 == native::flow_hash(key, &other) >> 26)
        .count() as f64;
    let expected = keys.len() as f64 / 64.0;
    assert!(
        (same - expected).abs() < 5.2 * expected.sqrt(),
        "{same} of {}",
        keys.len()
    );
}
