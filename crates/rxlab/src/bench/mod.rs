// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxlab bench`: measured comparisons, modes interleaved, medians and per-round ratios.
//!
//! A scenario is an [`experiment::Experiment`]: it says what it would measure, and measures one mode at a time.
//! [`measurement::Measurement`] does the rest: the order, what becomes of a measurement that failed. A round goes
//! through all scenarios before the next one begins: what changes slowly on a machine then shows in the
//! spread of the rounds, and not as a difference between two runs.

pub mod experiment;
pub mod measurement;
pub mod peer;
pub mod report;
pub mod scenario;
pub mod setup;
