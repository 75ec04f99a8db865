// SPDX-License-Identifier: MIT OR Apache-2.0
//! Places of measurement: the lab, once per condition, or a device of this host.

use anyhow::Result;
use indexmap::IndexMap;

use crate::bench::experiment::{Condition, DeviceKind, Effort, Gro, Napi};
use crate::bench::setup::mode::{Active, Way};
use crate::bench::setup::pair::Pair;
use crate::bench::setup::testbed::{Masks, Testbed};
use crate::bench::setup::watch::Seen;

/// A place of measurement.
pub enum Place {
    /// Between two namespaces.
    Lab(Box<Testbed>),
    /// Between two hosts.
    Device(Box<Pair>),
}

impl Place {
    pub fn masks(&self) -> &Masks {
        match self {
            Self::Lab(testbed) => testbed.masks(),
            Self::Device(pair) => pair.masks(),
        }
    }

    /// Switches a mode on.
    ///
    /// # Errors
    /// When it can't be switched on.
    pub fn start(&self, way: Way) -> Result<Active<'_>> {
        match self {
            Self::Lab(testbed) => testbed.start(way),
            Self::Device(pair) => pair.start(way),
        }
    }

    /// Checks that a way was in effect for packets of `nr_flows` flows.
    ///
    /// # Errors
    /// [`Unfit`](crate::bench::experiment::Unfit), with the reason.
    pub fn verify(&self, active: &Active<'_>, way: Way, seen: &Seen, nr_flows: u32) -> Result<()> {
        active.verify(seen, &self.masks().elsewhere(way, nr_flows))
    }
}

/// The places of a scenario; at least one.
pub struct Places {
    conditions: Vec<Condition>,
    places: Vec<Place>,
}

impl Places {
    /// The requested device, or a lab per condition. `napi` and `gro` are the scenario's default
    /// conditions.
    ///
    /// # Errors
    /// The host does not allow it, or has a single CPU; the peer is absent.
    pub fn of(effort: &Effort, napi: &[Napi], gro: &[Gro]) -> Result<Self> {
        if let Some(on) = &effort.on {
            return Ok(Self {
                conditions: Vec::new(),
                places: vec![Place::Device(Pair::meet(on)?.into())],
            });
        }
        if effort.device != DeviceKind::Nic {
            return Ok(Self {
                conditions: Vec::new(),
                places: vec![Place::Device(Pair::in_the_lab(effort.device)?.into())],
            });
        }
        Self::labs(effort.conditions(napi, gro), Testbed::new)
    }

    /// A lab per condition, with the applications behind NAT.
    ///
    /// # Errors
    /// As [`Testbed::behind_nat`].
    pub fn behind_nat(effort: &Effort, napi: &[Napi], gro: &[Gro]) -> Result<Self> {
        Self::labs(effort.conditions(napi, gro), Testbed::behind_nat)
    }

    fn labs(
        conditions: Vec<Condition>,
        testbed: impl Fn(Condition) -> Result<Testbed>,
    ) -> Result<Self> {
        let places = conditions
            .iter()
            .map(|c| Ok(Place::Lab(testbed(*c)?.into())));
        Ok(Self {
            places: places.collect::<Result<_>>()?,
            conditions,
        })
    }

    pub fn get(&self, place: usize) -> &Place {
        &self.places[place]
    }

    /// Each of `cases` in each place, with the index of the place.
    pub fn each<T: Clone>(&self, cases: impl IntoIterator<Item = T>) -> Vec<(usize, T)> {
        let cases: Vec<T> = cases.into_iter().collect();
        (0..self.places.len())
            .flat_map(|place| cases.iter().map(move |case| (place, case.clone())))
            .collect()
    }

    /// The CPUs to choose from, the same in all places.
    pub fn masks(&self) -> &Masks {
        self.places[0].masks()
    }

    /// Name of a case in a place; names the condition if there are several.
    pub fn case(&self, place: usize, name: &str) -> String {
        match self.conditions.get(place) {
            Some(condition) => condition.case(name, &self.conditions),
            None => name.to_owned(),
        }
    }

    /// Conditions that apply to all figures.
    pub fn conditions(&self) -> IndexMap<String, String> {
        match &self.places[0] {
            Place::Lab(testbed) => testbed.conditions(&self.conditions),
            Place::Device(pair) => pair.conditions(),
        }
    }

    /// Remarks for the reader: `lab` in the lab, the device's own on a device.
    pub fn notes(&self, lab: &[&str]) -> Vec<String> {
        match &self.places[0] {
            Place::Lab(_) => lab.iter().map(|note| (*note).to_owned()).collect(),
            Place::Device(pair) => pair.notes(),
        }
    }
}
