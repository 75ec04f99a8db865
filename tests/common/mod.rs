// SPDX-License-Identifier: MIT OR Apache-2.0
//! What all end-to-end tests share.

use std::io::Write;

/// Says that a test could not run here: to people, and to whoever counts (`RXSTEER_NOT_RUN` names
/// the file). The caller returns; a test that was not run is never counted as passed.
pub fn not_run(test: &str, reason: &str) {
    let line = format!("NOT RUN: {test}: {reason}");
    eprintln!("{line}");
    if let Some(path) = std::env::var_os("RXSTEER_NOT_RUN") {
        let file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path);
        let written = file.and_then(|mut file| writeln!(file, "{line}"));
        written.expect("RXSTEER_NOT_RUN names a file that can be written");
    }
}
