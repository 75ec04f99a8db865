// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tables of flows: CPUs of applications (`sock_flow_table`), locations of flows
//! (`dev_flow_tables`, one per queue, and one for all queues of softirq mode), and the flows' names.
//!
//! Memory: an entry of the `sock_flow_table` takes 4 bytes as in the kernel, and 8 more for the
//! thread; a slot of a `dev_flow_table` takes 64, and its flow's name 48 more.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result, anyhow, ensure};
use libbpf_rs::{MapCore, MapHandle, MapType};

use super::config::{Config, RPS_FLOW_CNT};
use super::mapped::Mapped;
use super::native;
use crate::types::{flow_name, rps_dev_flow, rps_sock_flow};

/// Entries of the `sock_flow_table` in one element of its map.
const SOCK_FLOWS: u32 = (size_of::<rps_sock_flow>() / size_of::<u32>()) as u32;

/// See the module's documentation.
pub struct Tables {
    sock_flow_table: MapHandle,
    sock_flow_consumers: MapHandle,
    dev_flow_tables: MapHandle,
    flow_names: MapHandle,
    sock_flows: Mapped<rps_sock_flow>,
    dev_flows: Mapped<rps_dev_flow>,
    names: Mapped<flow_name>,
    sizes: Sizes,
}

/// Sizes of the tables, rounded up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    sock_flow_entries: u32,
    flow_cnt: u32,
}

impl Sizes {
    pub(crate) fn of(config: &Config) -> Self {
        Self {
            sock_flow_entries: rounded(config.rps_sock_flow_entries).max(1),
            flow_cnt: match rounded(config.rps_flow_cnt) {
                0 => RPS_FLOW_CNT,
                cnt => cnt,
            },
        }
    }

    /// `rps_sock_flow_entries` less one: the bits of a hash that select an entry.
    pub(crate) fn sock_flow_mask(&self) -> u32 {
        self.sock_flow_entries - 1
    }

    /// The number of bits of a hash that don't select a slot: 32 less those of `rps_flow_cnt`.
    pub(crate) fn flow_shift(&self) -> u32 {
        32 - self.flow_cnt.ilog2()
    }
}

/// The names of the tables in `bpf/maps.h`.
pub(super) const NAMES: [&str; 4] = [
    "sock_flow_table",
    "sock_flow_consumers",
    "dev_flow_tables",
    "flow_names",
];

/// Bits of a `sock_flow_table`'s entry for a CPU, the lowest: 0 for none, the CPU's number plus one,
/// or all bits set for an application that polls.
pub fn cpu_mask(nr_cpus: u32) -> u32 {
    (nr_cpus + 2).next_power_of_two() - 1
}

/// A table's size as in the kernel: rounded up to a power of two; 0, which is off, stays 0.
pub fn rounded(size: u32) -> u32 {
    match size {
        0 => 0,
        size => size.next_power_of_two(),
    }
}

impl Tables {
    /// Empty tables of the sizes in `config`, rounded up, with `nr_tables` `dev_flow_table`s.
    ///
    /// # Errors
    /// When the tables are too large for the kernel's memory.
    pub(crate) fn new(config: &Config, nr_tables: u32) -> Result<Self> {
        Self::by(config, nr_tables, |name, size, entries| {
            let opts = libbpf_sys::bpf_map_create_opts {
                sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
                map_flags: libbpf_sys::BPF_F_MMAPABLE,
                ..Default::default()
            };
            MapHandle::create(MapType::Array, Some(name), 4, size as u32, entries, &opts)
                .with_context(|| format!("no memory for {entries} × {size} bytes of {name}"))
        })
    }

    /// These pinned tables.
    ///
    /// # Errors
    /// When one is missing, or has another size.
    pub(super) fn pinned(
        config: &Config,
        nr_tables: u32,
        open: impl Fn(&str) -> Result<MapHandle>,
    ) -> Result<Self> {
        Self::by(config, nr_tables, |name, size, entries| {
            let map = open(name)?;
            ensure!(
                (map.value_size(), map.max_entries()) == (size as u32, entries),
                "{name} has another size"
            );
            Ok(map)
        })
    }

    fn by(
        config: &Config,
        nr_tables: u32,
        array: impl Fn(&str, usize, u32) -> Result<MapHandle>,
    ) -> Result<Self> {
        let sizes = Sizes::of(config);
        let Sizes {
            sock_flow_entries,
            flow_cnt,
        } = sizes;
        let slots = flow_cnt
            .checked_mul(nr_tables)
            .ok_or_else(|| anyhow!("{nr_tables} × {flow_cnt} flow slots are too many"))?;
        let sock_flow_table = array(
            "sock_flow_table",
            size_of::<rps_sock_flow>(),
            sock_flow_entries.div_ceil(SOCK_FLOWS),
        )?;
        let dev_flow_tables = array("dev_flow_tables", size_of::<rps_dev_flow>(), slots)?;
        let flow_names = array("flow_names", size_of::<flow_name>(), slots)?;
        Ok(Self {
            sock_flows: Mapped::of(&sock_flow_table)?,
            dev_flows: Mapped::of(&dev_flow_tables)?,
            names: Mapped::of(&flow_names)?,
            sock_flow_table,
            sock_flow_consumers: array("sock_flow_consumers", size_of::<u64>(), sock_flow_entries)?,
            dev_flow_tables,
            flow_names,
            sizes,
        })
    }

    /// The table with this name in `bpf/maps.h`.
    pub(crate) fn named(&self, name: &str) -> Option<BorrowedFd<'_>> {
        let table = match name {
            "sock_flow_table" => &self.sock_flow_table,
            "sock_flow_consumers" => &self.sock_flow_consumers,
            "dev_flow_tables" => &self.dev_flow_tables,
            "flow_names" => &self.flow_names,
            _ => return None,
        };
        Some(table.as_fd())
    }

    /// `rps_sock_flow_entries` less one: the bits of a hash that select an entry.
    pub fn sock_flow_mask(&self) -> u32 {
        self.sizes.sock_flow_mask()
    }

    /// The number of bits of a hash that don't select a slot: 32 less those of `rps_flow_cnt`.
    pub fn flow_shift(&self) -> u32 {
        self.sizes.flow_shift()
    }

    /// `rps_flow_cnt`, rounded up.
    pub fn flow_cnt(&self) -> u32 {
        self.sizes.flow_cnt
    }

    pub(super) fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// The `sock_flow_table`'s entry for a hash (tables.h, `sock_flow_entry()`).
    pub fn sock_flow(&self, hash: u32) -> u32 {
        let index = hash & self.sock_flow_mask();
        let flows = self.sock_flows.get(index / SOCK_FLOWS);
        flows.ents[(index % SOCK_FLOWS) as usize]
    }

    /// The slots of all queues' `dev_flow_table`s, one queue after the other.
    pub fn dev_flows(&self) -> &Mapped<rps_dev_flow> {
        &self.dev_flows
    }

    /// The latest flow in a slot of these. The slot may have got another flow since it was read:
    /// the caller has to compare the key's hash.
    pub fn flow_name(&self, slot: u32) -> flow_name {
        self.names.get(slot)
    }

    /// The index, over all queues, of the slot that a hash selects.
    pub fn slot(&self, queue: u32, hash: u32) -> u32 {
        native::flow_slot(queue, hash, self.flow_shift())
    }

    /// The same in the table of softirq mode, whose first queue is `queue`.
    pub fn shared_slot(&self, queue: u32, ifindex: u32, hash: u32) -> u32 {
        native::flow_shared_slot(queue, ifindex, hash, self.flow_shift())
    }
}
