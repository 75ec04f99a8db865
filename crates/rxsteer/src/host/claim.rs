// SPDX-License-Identifier: MIT OR Apache-2.0
//! The claim of a process on its network namespace: one process steers there.
//!
//! Files can't tell: containers that share a network namespace have a `/run` each. The claim is a BPF
//! map without content, whose name contains the namespace's number. Map names are those of the whole
//! host, and the kernel removes the map with its last descriptor, hence with the process. Maps of this
//! type need CAP_BPF (`htab_map_alloc_check()` in kernel/bpf/hashtab.c), so that no other user makes one.

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, bail};
use libbpf_rs::{MapHandle, MapInfo, MapType};
use tracing::debug;

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
        let mut id = 0;
        while let Some(next) = next_map(id).context("cannot look for another rxsteer")? {
            id = next;
            if id < own && is_claim(id, &name)? {
                bail!(
                    "another rxsteer steers in this network namespace already, with a /run of its own: \
                     a unit beside a container, or two containers. Stop one of them, or name all devices \
                     in one command. `bpftool map show id {id}` names the other process"
                );
            }
        }
        Ok(Self(map))
    }
}

/// The id of the map after the one with this id, of all maps of the host; `None` after the last one.
fn next_map(id: u32) -> io::Result<Option<u32>> {
    let mut next = 0;
    // SAFETY: `next` outlives the call.
    match unsafe { libbpf_sys::bpf_map_get_next_id(id, &mut next) } {
        0 => Ok(Some(next)),
        e if e == -libc::ENOENT => Ok(None),
        e => Err(io::Error::from_raw_os_error(-e)),
    }
}

/// Whether the map is a claim with this name. Not one that is gone, or that a security module hides.
fn is_claim(id: u32, name: &str) -> Result<bool> {
    // SAFETY: the call takes a number.
    let fd = match unsafe { libbpf_sys::bpf_map_get_fd_by_id(id) } {
        // SAFETY: the kernel has just opened this descriptor; nothing else owns it.
        fd @ 0.. => unsafe { OwnedFd::from_raw_fd(fd) },
        e if e == -libc::ENOENT => return Ok(false),
        e if e == -libc::EACCES => {
            debug!("map {id} can't be looked at");
            return Ok(false);
        }
        e => {
            let error = io::Error::from_raw_os_error(-e);
            return Err(error).with_context(|| format!("cannot look at map {id}"));
        }
    };
    let map = MapInfo::new(fd.as_fd())?;
    Ok(map.map_type() == MapType::LruHash && map.name()? == name)
}
