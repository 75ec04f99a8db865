// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data path's pure C, compiled for the host: what the kernel runs, callable here.

use std::net::SocketAddr;

use crate::lab_skel::types::flow_result;
use crate::rx::types::{flow_key, flow_secret};

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

/// An address as the four words of a key, in network order as they lie in memory.
fn words(octets: [u8; 16]) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(octets.chunks_exact(4)) {
        *word = u32::from_ne_bytes(bytes.try_into().expect("chunks of four"));
    }
    words
}
