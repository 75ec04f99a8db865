// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer bench`: measured comparisons, modes interleaved, medians and per-round ratios.

pub mod decide;
pub mod flood;
pub mod follow;
pub mod mode;
pub mod record;
pub mod reorder;
pub mod report;

pub use report::{Report, Rounds};

/// How often, how long, and whom to tell.
pub struct Effort<'a> {
    /// Every mode runs once a round.
    pub rounds: u32,
    /// Of one measurement, in seconds.
    pub seconds: f64,
    /// Called before each measurement with what it is and how many there are.
    pub progress: &'a dyn Fn(&str, u64),
}
