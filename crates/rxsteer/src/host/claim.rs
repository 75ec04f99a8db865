// SPDX-License-Identifier: MIT OR Apache-2.0
//! The claim of a process on its network namespace: one process steers there.
//!
//! Files can't tell: containers that share a network namespace have a `/run` each. The claim is a BPF
//! map without content, whose name contains the namespace's number. Map names are those of the whole
//! host, and the kernel removes the map with its last descriptor, hence with the process. Maps of this
//! type need CAP_BPF (`htab_map_alloc_check()` in kernel/bpf/hashtab.c), so that no other user makes one.

use std::os::fd::AsFd;

use anyhow::{Context, Result, bail};
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{MapHandle, MapInfo, MapType};

use super::netns;

/// See the module's documentation.
#[derive(Debug)]
pub struct Claim(#[expect(dead_code, reason = "held, never read")] MapHandle);

impl Claim {
    /// Claims the network namespace of the calling thread, until this is dropped.
    ///
    /// # Errors
    /// When another process has claimed it. Of two that do so at once, one succeeds: the kernel numbers
    /// maps in ascending order.
    pub fn new() -> Result<Self> {
        // A namespace's number has 32 bits, a map's name 15 characters.
        let name = format!("rxsteer{:08x}", netns::inode()?);
        let opts = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        let map = MapHandle::create(MapType::LruHash, Some(&name), 4, 4, 1, &opts)
            .context("cannot claim the network namespace")?;
        let own = MapInfo::new(map.as_fd())?.info.id;
        let earlier = |info: &libbpf_rs::query::MapInfo| {
            info.ty == MapType::LruHash && info.name == *name && info.id < own
        };
        if let Some(other) = MapInfoIter::default().find(earlier) {
            bail!(
                "another rxsteer steers in this network namespace already, with a /run of its own: a \
                 unit beside a container, or two containers. Stop one of them, or name all devices in \
                 one command. `bpftool map show id {}` names the other process",
                other.id
            );
        }
        Ok(Self(map))
    }
}
