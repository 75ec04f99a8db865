// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tables of other sizes, under traffic.

use std::time::Duration;

use anyhow::{Result, bail};

use super::backlogged::Backlogged;
use super::config::Config;
use super::hops::Hops;
use super::loaded::{Datapath, FIRST_EPOCH};
use super::objects::{Device, XdpSkel, load_device};
use super::policy::Policy;
use super::tables::Tables;
use crate::bpf::dissector_skel::DissectorSkel;

impl Datapath {
    /// Replaces the tables by tables of other sizes. First every flow returns to INLINE
    /// ([`Self::return_inline`]). Then all slots are unset under a new epoch: as at attach, no flow
    /// moves before all earlier packets have been delivered. Afterwards every map's locations are
    /// INLINE (INLINE_SHED if backlogs drained slowly), and the policy is off: the caller sets both
    /// again, also after an error.
    ///
    /// # Errors
    /// When flows did not return in time, or the kernel refuses maps or programs of these sizes.
    /// The old tables are in use then.
    pub fn resize(
        &mut self,
        rps_sock_flow_entries: u32,
        rps_flow_cnt: u32,
        patience: Duration,
    ) -> Result<()> {
        let config = Config {
            rps_sock_flow_entries,
            rps_flow_cnt,
            ..self.config.clone()
        };
        let tables = Tables::new(&config, self.nr_tables())?;
        let load = |d: &Device| {
            load_device(
                &self.trace,
                &tables,
                &config,
                self.nr_cpus,
                d.queue_base,
                &d.config,
            )
        };
        let loaded = self.devices.iter().map(load).collect::<Result<Vec<_>>>()?;
        let reload = |hops: &Hops| hops.reload(&self.trace, &tables, &config);
        let program = self.hops.as_ref().map(reload).transpose()?;
        if !self.return_inline(patience)? {
            bail!("some backlogs did not drain: the tables stay as they are; try again");
        }
        let before = (
            std::mem::replace(&mut self.tables, tables),
            std::mem::replace(&mut self.config, config),
        );
        let swapped = self.swap(loaded, program);
        if swapped.is_err() {
            (self.tables, self.config) = before;
        }
        self.epoch = self.epoch.wrapping_add(1).max(FIRST_EPOCH);
        self.steer_by(Policy::OFF)?;
        // Every program sees the new epoch before any flow may want to move again.
        self.grace_period()?;
        if swapped.is_ok() {
            self.pin_tables()?;
        }
        swapped
    }

    /// Replaces the attached programs by these: all of them, or none.
    fn swap(
        &mut self,
        loaded: Vec<Option<XdpSkel>>,
        program: Option<DissectorSkel<'static>>,
    ) -> Result<()> {
        let mut old = Vec::new();
        let mut outcome = Ok(());
        let hops = self.hops.as_mut().zip(program);
        let before = hops.map(|(hops, program)| hops.replace(program));
        let before = before.transpose()?;
        for (device, loaded) in self.devices.iter_mut().zip(loaded) {
            old.push(std::mem::replace(&mut device.loaded, loaded));
            outcome = device.update();
            if outcome.is_err() {
                break;
            }
        }
        if outcome.is_err() {
            if let Some((hops, before)) = self.hops.as_mut().zip(before) {
                hops.replace(before)?;
            }
            for (device, loaded) in self.devices.iter_mut().zip(old) {
                device.loaded = loaded;
                device.update()?;
            }
        }
        outcome
    }
}
