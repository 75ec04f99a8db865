// SPDX-License-Identifier: MIT OR Apache-2.0
//! Values of options that several subcommands have.

use std::time::Duration;

use clap::builder::RangedI64ValueParser;

use crate::api::flows::LIMIT_MAX;

/// A number of flows.
pub(super) fn limit() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=LIMIT_MAX as i64)
}

/// A time of at least 10 ms, written in seconds.
///
/// # Errors
/// What to write instead.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number"))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if duration >= Duration::from_millis(10) => Ok(duration),
        _ => Err("choose 0.01 seconds or more".to_owned()),
    }
}
