// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxlab bench`: measured comparisons, with interleaved modes, medians and per-round ratios.
//!
//! A scenario is an [`experiment::Experiment`]: it plans its measurements and measures one mode at
//! a time. [`measurement::Measurement`] orders the measurements and handles failed ones. A round
//! covers all scenarios before the next one begins, so slow changes of the machine appear in the
//! spread of the rounds and not as a difference between runs.

pub mod experiment;
pub mod measurement;
pub mod peer;
pub mod programs;
pub mod report;
pub mod scenario;
pub mod setup;
