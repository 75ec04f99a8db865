// SPDX-License-Identifier: MIT OR Apache-2.0
//! Puts back what processes have left changed that were killed with their children.

use anyhow::Result;
use tracing::warn;

use super::guardian::Guardian;
use super::record::{Left, left};
use super::setting;

/// Puts back what [`left`] finds, and logs it.
pub fn put_back_left() {
    for left in left() {
        warn!("{}", left.words());
        if let Err(e) = put_back(left) {
            warn!("not put back: {e:#}");
        }
    }
}

fn put_back(left: Left) -> Result<()> {
    let (command, lines, record) = left.into_parts();
    let mut guardian = match command {
        Some(command) => Guardian::again(&command, &lines, record)?,
        None => Guardian::spawn(&mut setting::guard(&lines), None, Some(record))?,
    };
    guardian.end()
}
