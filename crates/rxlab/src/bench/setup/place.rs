// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a scenario measures: in the lab, once for each condition, or on a device of this host.

use anyhow::Result;
use indexmap::IndexMap;

use crate::bench::experiment::{Condition, Effort, Gro, Napi};
use crate::bench::setup::mode::{Active, Way};
use crate::bench::setup::pair::Pair;
use crate::bench::setup::testbed::{Masks, Testbed};
use crate::bench::setup::watch::Seen;

/// One of them.
pub enum Place {
    /// In namespaces.
    Lab(Testbed),
    /// Between two hosts.
    Device(Pair),
}

impl Place {
    /// The CPUs to choose from.
    pub fn masks(&self) -> &Masks {
        match self {
            Self::Lab(testbed) => testbed.masks(),
            Self::Device(pair) => pair.masks(),
        }
    }

    /// Switches a way to steer on.
    ///
    /// # Errors
    /// When it can't be, with the reason.
    pub fn start(&self, way: Way) -> Result<Active<'_>> {
        match self {
            Self::Lab(testbed) => testbed.start(way),
            Self::Device(pair) => pair.start(way),
        }
    }

    /// Whether a way was in effect for packets of so many flows.
    ///
    /// # Errors
    /// [`Unfit`](crate::bench::experiment::Unfit), with the reason.
    pub fn verify(&self, active: &Active<'_>, way: Way, seen: &Seen, nr_flows: u32) -> Result<()> {
        active.verify(seen, &self.masks().elsewhere(way, nr_flows))
    }
}

/// All places of a scenario; at least one.
pub struct Places {
    conditions: Vec<Condition>,
    places: Vec<Place>,
}

impl Places {
    /// The device that was asked for; or a lab for each condition, those of the scenario unless
    /// others were asked for.
    ///
    /// # Errors
    /// When the host does not allow it, or has a single CPU; when the peer is not there.
    pub fn of(effort: &Effort, napi: &[Napi], gro: &[Gro]) -> Result<Self> {
        if let Some(on) = &effort.on {
            return Ok(Self {
                conditions: Vec::new(),
                places: vec![Place::Device(Pair::meet(on)?)],
            });
        }
        let conditions = effort.conditions(napi, gro);
        let testbeds = Testbed::each(&conditions)?;
        Ok(Self {
            places: testbeds.into_iter().map(Place::Lab).collect(),
            conditions,
        })
    }

    /// The place of that number.
    pub fn get(&self, place: usize) -> &Place {
        &self.places[place]
    }

    /// Each of `cases` in each place, with the place's number.
    pub fn each<T: Clone>(&self, cases: impl IntoIterator<Item = T>) -> Vec<(usize, T)> {
        let cases: Vec<T> = cases.into_iter().collect();
        (0..self.places.len())
            .flat_map(|place| cases.iter().map(move |case| (place, case.clone())))
            .collect()
    }

    /// The CPUs to choose from, which all places have in common.
    pub fn masks(&self) -> &Masks {
        self.places[0].masks()
    }

    /// A case's name in a place.
    pub fn case(&self, place: usize, name: &str) -> String {
        match self.conditions.get(place) {
            Some(condition) if self.conditions.len() > 1 => format!("{name}; {condition}"),
            _ => name.to_owned(),
        }
    }

    /// What shapes all figures.
    pub fn conditions(&self) -> IndexMap<String, String> {
        match &self.places[0] {
            Place::Lab(testbed) => testbed.conditions(&self.conditions),
            Place::Device(pair) => pair.conditions(),
        }
    }

    /// What should be known, if it is about this kind of place: of the lab `lab`, of a device what it
    /// says itself.
    pub fn notes(&self, lab: &[&str]) -> Vec<String> {
        match &self.places[0] {
            Place::Lab(_) => lab.iter().map(|note| (*note).to_owned()).collect(),
            Place::Device(pair) => pair.notes(),
        }
    }
}
