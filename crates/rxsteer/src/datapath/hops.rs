// SPDX-License-Identifier: MIT OR Apache-2.0
//! Skb mode: the program of its devices, and the way of skbs to other CPUs: the carriers, the
//! programs at them, and the count of skbs that the kernel drops on the way (`bpf/carrier.bpf.c`).

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result};
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel, Skel};

use super::config::{Config, SkbKind, draw};
use super::hash::Hash;
use super::shared::{constants, lend_maps, set_constants};
use super::tables::Tables;
use crate::bpf::carrier_skel::{CarrierSkel, CarrierSkelBuilder};
use crate::bpf::open;
use crate::bpf::skb_skel::{SkbSkel, SkbSkelBuilder};
use crate::bpf::trace_skel::TraceSkel;
use crate::host::carrier::Carrier;
use crate::host::tc::{self, TcLink};
use crate::types::rx_config;

/// What a kind of devices needs. Fields are dropped in this order.
struct Way {
    program: SkbSkel<'static>,
    /// Packets are decided on at the egress too.
    is_sent: bool,
    _link: TcLink,
    carrier: Carrier,
}

/// Programs by kind of devices.
pub(super) type Programs = BTreeMap<SkbKind, SkbSkel<'static>>;

/// See the module's documentation.
pub(super) struct Hops {
    /// Marks skbs on their way.
    mark: u64,
    /// The queue of CPU 0.
    pub(super) queue_base: u32,
    nr_cpus: u32,
    ways: BTreeMap<SkbKind, Way>,
    _drops: Link,
    _downs: Link,
    /// While there are devices without polls.
    ends: Option<Link>,
    carriers: CarrierSkel<'static>,
}

impl Hops {
    /// Loads what all devices have in common.
    ///
    /// # Errors
    /// When the kernel refuses a program.
    pub(super) fn new(
        trace: &TraceSkel<'_>,
        tables: &Tables,
        config: &Config,
        nr_cpus: u32,
        queue_base: u32,
    ) -> Result<Self> {
        let mark = draw()?;
        let mut open = open(CarrierSkelBuilder::default())?;
        let constants = rx_config {
            hop_mark: mark,
            queue_base,
            ..constants(config, nr_cpus, tables.sizes())
        };
        set_constants(open.open_object_mut(), &constants)?;
        lend_maps(open.open_object_mut(), trace.object(), tables)?;
        let carriers = open
            .load()
            .context("the kernel refused the programs of skb mode")?;
        let drops = carriers.progs.on_kfree_skb.attach_trace();
        let downs = carriers.progs.on_cpuhp_enter.attach_trace();
        Ok(Self {
            mark,
            queue_base,
            nr_cpus,
            ways: BTreeMap::new(),
            _drops: drops.context("attaching on_kfree_skb")?,
            _downs: downs.context("attaching on_cpuhp_enter")?,
            ends: None,
            carriers,
        })
    }

    /// Creates what devices of this kind need, in the network namespace of the calling thread,
    /// unless it is there.
    ///
    /// # Errors
    /// When a carrier can't be created, or the kernel refuses a program.
    pub(super) fn prepare(
        &mut self,
        trace: &TraceSkel<'_>,
        tables: &Tables,
        config: &Config,
        kind: SkbKind,
    ) -> Result<()> {
        if self.ways.contains_key(&kind) {
            return Ok(());
        }
        let carrier = Carrier::create(self.nr_cpus, kind.without_mac)?;
        let program = self.load(trace, tables, config, kind, carrier.ifindex)?;
        if kind.unpolled && self.ends.is_none() {
            let ends = self.carriers.progs.on_receive_exit.attach_trace();
            self.ends = Some(ends.context("attaching on_receive_exit")?);
        }
        let passes = self.carriers.progs.rxsteer_carrier.as_fd();
        let way = Way {
            program,
            is_sent: is_sent(config, kind),
            _link: tc::attach(passes, carrier.ifindex)?,
            carrier,
        };
        self.ways.insert(kind, way);
        Ok(())
    }

    /// The program of devices of this kind.
    ///
    /// # Errors
    /// When such a device was not prepared for.
    pub(super) fn program(&self, kind: SkbKind) -> Result<BorrowedFd<'_>> {
        let way = self.ways.get(&kind);
        let way = way.context("skb mode was not prepared")?;
        Ok(way.program.progs.rxsteer_skb.as_fd())
    }

    /// The program at the egress of devices of this kind, if they have one.
    pub(super) fn sent(&self, kind: SkbKind) -> Option<BorrowedFd<'_>> {
        let way = self.ways.get(&kind).filter(|way| way.is_sent)?;
        Some(way.program.progs.rxsteer_sent.as_fd())
    }

    /// Loads the programs of all kinds again, for other tables.
    ///
    /// # Errors
    /// When the kernel refuses a program.
    pub(super) fn reload(
        &self,
        trace: &TraceSkel<'_>,
        tables: &Tables,
        config: &Config,
    ) -> Result<Programs> {
        let load = |(&kind, way): (&SkbKind, &Way)| {
            let program = self.load(trace, tables, config, kind, way.carrier.ifindex)?;
            Ok((kind, program))
        };
        self.ways.iter().map(load).collect()
    }

    /// Uses these programs from now on; returns those before.
    pub(super) fn replace(&mut self, programs: Programs) -> Programs {
        let mut before = Programs::new();
        for (kind, program) in programs {
            if let Some(way) = self.ways.get_mut(&kind) {
                before.insert(kind, std::mem::replace(&mut way.program, program));
            }
        }
        before
    }

    /// Whether the device with this index is a carrier.
    pub(super) fn is_carrier(&self, ifindex: u32) -> bool {
        self.ways.values().any(|way| way.carrier.ifindex == ifindex)
    }

    fn load(
        &self,
        trace: &TraceSkel<'_>,
        tables: &Tables,
        config: &Config,
        kind: SkbKind,
        carrier: u32,
    ) -> Result<SkbSkel<'static>> {
        let constants = rx_config {
            queue_base: self.queue_base,
            nr_rx_queues: self.nr_cpus,
            carrier,
            hop_mark: self.mark,
            without_mac: kind.without_mac.into(),
            unpolled: kind.unpolled.into(),
            loopback: is_sent(config, kind).into(),
            device_hash: (config.hash == Hash::Device).into(),
            ..constants(config, self.nr_cpus, tables.sizes())
        };
        let mut open = open(SkbSkelBuilder::default())?;
        open.progs.rxsteer_sent.set_autoload(is_sent(config, kind));
        set_constants(open.open_object_mut(), &constants)?;
        lend_maps(open.open_object_mut(), trace.object(), tables)?;
        open.load()
            .context("the kernel refused the program of skb mode")
    }
}

/// Whether flows of devices of this kind are decided on where their packets are sent, too.
fn is_sent(config: &Config, kind: SkbKind) -> bool {
    kind.loopback && !config.dry_run && config.hash != Hash::Device
}
