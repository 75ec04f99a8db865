// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data path's pure C, compiled for the host: what the kernel runs, callable here.

use std::net::{IpAddr, SocketAddr};

use crate::lab_skel::types::flow_result;
use crate::rx::types::{flow_key, flow_secret, rps_map};

unsafe extern "C" {
    fn native_flow_parse(
        data: *const u8,
        linear: u32,
        len: u32,
        tunnels: u32,
        key: *mut flow_key,
    ) -> flow_result;
    fn native_flow_key_ports(
        key: *mut flow_key,
        saddr: *const [u32; 4],
        source: u16,
        dest: u16,
        proto: u32,
    );
    fn native_flow_key_ports4(key: *mut flow_key, saddr: u32, source: u16, dest: u16, proto: u32);
    fn native_flow_hash(key: *const flow_key, secret: *const flow_secret) -> u32;
    fn native_rps_location_of(map: *const rps_map, hash: u32) -> u16;
    fn native_sock_flow_cpu(entry: u32, hash: u32, cpu_mask: u32) -> u16;
    fn native_poll_stamp_cpu(stamp: u64) -> u16;
}

/// The flow key of a packet of `len` bytes whose first ones are `linear`, or why it has none.
/// `tunnels` are the `FLOW_TUNNEL_*` whose inner flow is wanted.
///
/// # Panics
/// When `len` is less than what `linear` holds.
pub fn flow_parse(linear: &[u8], len: u32, tunnels: u32) -> Result<flow_key, flow_result> {
    assert!(linear.len() <= len as usize);
    let mut key = flow_key::default();
    // SAFETY: the parser reads within `linear`, which is no longer than `len`, and writes the key.
    let result =
        unsafe { native_flow_parse(linear.as_ptr(), linear.len() as u32, len, tunnels, &mut key) };
    match result {
        flow_result::FLOW_KEYED => Ok(key),
        other => Err(other),
    }
}

/// The flow key of the socket that receives from `peer` on `local_port`; `proto` is an `IPPROTO_*`
/// with ports.
pub fn flow_key_ports(peer: SocketAddr, local_port: u16, proto: u32) -> flow_key {
    let mut key = flow_key::default();
    let (source, dest) = (peer.port().to_be(), local_port.to_be());
    match peer {
        SocketAddr::V4(peer) => {
            let saddr = u32::from_ne_bytes(peer.ip().octets());
            // SAFETY: the callee only writes the key.
            unsafe { native_flow_key_ports4(&mut key, saddr, source, dest, proto) };
        }
        SocketAddr::V6(peer) => {
            let saddr = words(peer.ip().octets());
            // SAFETY: the callee only reads four words and writes the key.
            unsafe { native_flow_key_ports(&mut key, &saddr, source, dest, proto) };
        }
    }
    key
}

/// The hash of a key under a secret: `docs/hash.md`.
pub fn flow_hash(key: &flow_key, secret: &flow_secret) -> u32 {
    // SAFETY: the callee only reads the two.
    unsafe { native_flow_hash(key, secret) }
}

/// Where RPS wants the flow with this hash: a location as the kernel side has it.
pub fn rps_location_of(map: &rps_map, hash: u32) -> u16 {
    // SAFETY: the callee only reads the map.
    unsafe { native_rps_location_of(map, hash) }
}

/// The CPU that an entry of the `sock_flow_table` names for this hash, or `RPS_NO_CPU`.
pub fn sock_flow_cpu(entry: u32, hash: u32, cpu_mask: u32) -> u16 {
    // SAFETY: takes numbers, returns one.
    unsafe { native_sock_flow_cpu(entry, hash, cpu_mask) }
}

/// The CPU that ran the poll with this stamp, which is not zero.
pub fn poll_stamp_cpu(stamp: u64) -> u16 {
    // SAFETY: takes a number, returns one.
    unsafe { native_poll_stamp_cpu(stamp) }
}

/// An address as it is in a key: an IPv4 address as its v4-mapped one.
pub fn address_words(address: IpAddr) -> [u32; 4] {
    words(match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    })
}

/// An address as the four words of a key, in network order as they lie in memory.
fn words(octets: [u8; 16]) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(octets.chunks_exact(4)) {
        *word = u32::from_ne_bytes(bytes.try_into().expect("chunks of four"));
    }
    words
}
