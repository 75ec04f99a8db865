// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tables of flows: where applications are (`sock_flow_table`), where flows are
//! (`dev_flow_tables`, one per queue), and the flows' keys.
//!
//! Memory: an entry of the `sock_flow_table` has 4 bytes as in the kernel, and 8 more for the thread;
//! a slot of a `dev_flow_table` has 64, and its key 40 more.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use anyhow::{Context, Result, anyhow};
use libbpf_rs::{MapHandle, MapType};
use nix::errno::Errno;

use super::config::{Config, RPS_FLOW_CNT};
use super::native;
use super::value::lookup;
use crate::types::{flow_key, rps_dev_flow, rps_sock_flow};

/// Entries of the `sock_flow_table` in one element of its map.
const SOCK_FLOWS: u32 = (size_of::<rps_sock_flow>() / size_of::<u32>()) as u32;

/// Slots read in one system call.
const BATCH: u32 = 4096;

/// See the module's documentation.
pub struct Tables {
    sock_flow_table: MapHandle,
    sock_flow_consumers: MapHandle,
    dev_flow_tables: MapHandle,
    flow_keys: MapHandle,
    sock_flow_entries: u32,
    flow_cnt: u32,
}

/// Bits of a `sock_flow_table`'s entry that hold a CPU: 0 for none, its number plus one, or all of
/// them for an application that polls.
pub fn cpu_mask(nr_cpus: u32) -> u32 {
    (nr_cpus + 2).next_power_of_two() - 1
}

/// A table's size as the kernel takes it: the next power of two, and 0, which is off, for itself.
pub fn rounded(size: u32) -> u32 {
    match size {
        0 => 0,
        size => size.next_power_of_two(),
    }
}

impl Tables {
    /// Empty ones, of the sizes in `config`, rounded up.
    ///
    /// # Errors
    /// When they are too large for the kernel's memory.
    pub(crate) fn new(config: &Config, nr_queues: u32) -> Result<Self> {
        let sock_flow_entries = rounded(config.rps_sock_flow_entries).max(1);
        let flow_cnt = match rounded(config.rps_flow_cnt) {
            0 => RPS_FLOW_CNT,
            cnt => cnt,
        };
        let slots = flow_cnt
            .checked_mul(nr_queues)
            .ok_or_else(|| anyhow!("{nr_queues} × {flow_cnt} flow slots are too many"))?;
        let array = |name, size: usize, entries: u32| {
            let opts = libbpf_sys::bpf_map_create_opts {
                sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
                // Nobody maps them: but only then does the first element begin a cache line.
                map_flags: libbpf_sys::BPF_F_MMAPABLE,
                ..Default::default()
            };
            MapHandle::create(MapType::Array, Some(name), 4, size as u32, entries, &opts)
                .with_context(|| format!("no memory for {entries} × {size} bytes of {name}"))
        };
        Ok(Self {
            sock_flow_table: array(
                "sock_flow_table",
                size_of::<rps_sock_flow>(),
                sock_flow_entries.div_ceil(SOCK_FLOWS),
            )?,
            sock_flow_consumers: array("sock_flow_consumers", size_of::<u64>(), sock_flow_entries)?,
            dev_flow_tables: array("dev_flow_tables", size_of::<rps_dev_flow>(), slots)?,
            flow_keys: array("flow_keys", size_of::<flow_key>(), slots)?,
            sock_flow_entries,
            flow_cnt,
        })
    }

    /// That of this name in `bpf/maps.h`.
    pub(crate) fn named(&self, name: &str) -> Option<BorrowedFd<'_>> {
        let table = match name {
            "sock_flow_table" => &self.sock_flow_table,
            "sock_flow_consumers" => &self.sock_flow_consumers,
            "dev_flow_tables" => &self.dev_flow_tables,
            "flow_keys" => &self.flow_keys,
            _ => return None,
        };
        Some(table.as_fd())
    }

    /// `rps_sock_flow_entries` less one: the bits of a hash that choose an entry.
    pub fn sock_flow_mask(&self) -> u32 {
        self.sock_flow_entries - 1
    }

    /// The bits of a hash that don't choose a slot: 32 less those of `rps_flow_cnt`.
    pub fn flow_shift(&self) -> u32 {
        32 - self.flow_cnt.ilog2()
    }

    /// `rps_flow_cnt`, rounded up.
    pub fn flow_cnt(&self) -> u32 {
        self.flow_cnt
    }

    /// The `sock_flow_table`'s entry for a hash (tables.h, `sock_flow_entry()`).
    ///
    /// # Errors
    /// When the map can't be read.
    pub fn sock_flow(&self, hash: u32) -> Result<u32> {
        let index = hash & self.sock_flow_mask();
        let line = index / SOCK_FLOWS;
        let flows: rps_sock_flow = lookup(&self.sock_flow_table, line)?;
        Ok(flows.ents[(index % SOCK_FLOWS) as usize])
    }

    /// Shows `each` these slots of all queues' `dev_flow_table`s, which lie one behind the other, with
    /// their numbers, until it says false.
    ///
    /// # Errors
    /// When the map can't be read, or that of `each`.
    pub fn dev_flows(
        &self,
        slots: Range<u32>,
        mut each: impl FnMut(u32, &rps_dev_flow) -> Result<bool>,
    ) -> Result<()> {
        let map = self.dev_flow_tables.as_fd().as_raw_fd();
        let mut keys = vec![0u32; BATCH as usize];
        let mut flows = vec![rps_dev_flow::default(); BATCH as usize];
        // The slot before the next one; before the first is any that the map does not have.
        let mut last = slots.start.wrapping_sub(1);
        let mut left = slots.len() as u32;
        while left > 0 {
            let mut count = left.min(BATCH);
            // SAFETY: there is room for BATCH keys and values of the map's types, and for a key.
            let ret = unsafe {
                libbpf_sys::bpf_map_lookup_batch(
                    map,
                    (&raw mut last).cast(),
                    (&raw mut last).cast(),
                    keys.as_mut_ptr().cast(),
                    flows.as_mut_ptr().cast(),
                    &mut count,
                    std::ptr::null(),
                )
            };
            // libbpf returns the error number, negative; this one says that these are the last.
            match Errno::from_raw(-ret) {
                _ if ret == 0 => left -= count,
                Errno::ENOENT => left = 0,
                e => return Err(e).context("reading the flow tables"),
            }
            for (slot, flow) in keys.iter().zip(&flows).take(count as usize) {
                if !each(*slot, flow)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// One of them.
    ///
    /// # Errors
    /// When the map can't be read.
    pub fn dev_flow(&self, slot: u32) -> Result<rps_dev_flow> {
        lookup(&self.dev_flow_tables, slot)
    }

    /// The key of the flow that a slot of these was last set for. The slot may have another flow
    /// since it was read: see that the key has its hash.
    ///
    /// # Errors
    /// When the map can't be read.
    pub fn flow_key(&self, slot: u32) -> Result<flow_key> {
        lookup(&self.flow_keys, slot)
    }

    /// The number, over all queues, of the slot that a hash chooses.
    pub fn slot(&self, queue: u32, hash: u32) -> u32 {
        native::flow_slot(queue, hash, self.flow_shift())
    }
}
