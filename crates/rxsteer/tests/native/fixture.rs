// SPDX-License-Identifier: MIT OR Apache-2.0
//! The packets of `tests/fixtures/`.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use rxsteer::types::{flow_key, flow_option, flow_result};
use serde::Deserialize;

#[derive(Deserialize)]
struct File {
    fixture: Vec<Written>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    description: String,
    packet: String,
    #[serde(default)]
    tunnels: Vec<String>,
    result: String,
    key: Option<WrittenKey>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenKey {
    saddr: IpAddr,
    daddr: Option<IpAddr>,
    ports: Option<[u16; 2]>,
    spi: Option<u32>,
    proto: u32,
}

/// A packet and the expected result.
pub struct Fixture {
    pub description: String,
    pub packet: Vec<u8>,
    pub tunnels: u32,
    pub expected: Result<flow_key, flow_result>,
}

/// All fixtures of all files.
pub fn all() -> Vec<Fixture> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut fixtures = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let file: File = toml::from_str(&fs::read_to_string(&path).unwrap())
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        fixtures.extend(file.fixture.into_iter().map(Fixture::from));
    }
    fixtures
}

impl From<Written> for Fixture {
    fn from(written: Written) -> Self {
        let expected = match (written.result.as_str(), &written.key) {
            ("keyed", Some(key)) => Ok(key.into()),
            ("truncated", None) => Err(flow_result::FLOW_TRUNCATED),
            ("unknown", None) => Err(flow_result::FLOW_UNKNOWN),
            _ => panic!("{}: result and key disagree", written.description),
        };
        Fixture {
            packet: unhex(&written.packet),
            tunnels: written.tunnels.iter().map(|name| tunnel(name).0).sum(),
            description: written.description,
            expected,
        }
    }
}

impl From<&WrittenKey> for flow_key {
    fn from(written: &WrittenKey) -> Self {
        flow_key {
            saddr: address(written.saddr),
            daddr: written.daddr.map(address).unwrap_or_default(),
            ports: match (written.ports, written.spi) {
                (Some([source, dest]), None) => (u32::from(source) << 16 | u32::from(dest)).to_be(),
                (None, Some(spi)) => spi.to_be(),
                (None, None) => 0,
                _ => panic!("a key has ports or an SPI"),
            },
            proto: written.proto,
            ..flow_key::default()
        }
    }
}

/// An address in the format of a key.
pub fn address(address: IpAddr) -> [u32; 4] {
    let v6 = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    v6.to_bits()
        .to_be_bytes()
        .chunks_exact(4)
        .map(|word| u32::from_ne_bytes(word.try_into().unwrap()))
        .collect::<Vec<_>>()
        .try_into()
        .unwrap()
}

fn tunnel(name: &str) -> flow_option {
    match name {
        "ipip" => flow_option::FLOW_TUNNEL_IPIP,
        "gre" => flow_option::FLOW_TUNNEL_GRE,
        "vxlan" => flow_option::FLOW_TUNNEL_VXLAN,
        "geneve" => flow_option::FLOW_TUNNEL_GENEVE,
        "gtpu" => flow_option::FLOW_TUNNEL_GTPU,
        other => panic!("no tunnel is called {other}"),
    }
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    assert_eq!(digits.len() % 2, 0, "half a byte in {text}");
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect()
}

/// What a key has of the outermost tunnel.
pub fn outer(key: &flow_key) -> ([u32; 4], u32) {
    (key.outer, key.tunnel)
}
