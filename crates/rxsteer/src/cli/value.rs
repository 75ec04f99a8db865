// SPDX-License-Identifier: MIT OR Apache-2.0
//! Values of options that several subcommands have.

use std::time::Duration;

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
