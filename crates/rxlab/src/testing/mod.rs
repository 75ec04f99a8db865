// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared parts of the end-to-end tests.

use std::fs::OpenOptions;
use std::io::Write;

pub mod app;
pub mod probe;
pub mod testbed;
pub mod usage;

/// The name of the function that it stands in.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        let name = std::any::type_name_of_val(&here).rsplit("::").nth(1);
        name.expect("the function is in another")
    }};
}

/// Reports a test as not run, with the reason. `make test` counts these reports; they are not
/// passes.
pub fn not_run(test: &str, reason: &str) {
    let line = format!("NOT RUN: {test}: {reason}\n");
    eprint!("{line}");
    if let Some(path) = std::env::var_os("RXSTEER_NOT_RUN") {
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("RXSTEER_NOT_RUN names a file that can be appended to");
    }
}
