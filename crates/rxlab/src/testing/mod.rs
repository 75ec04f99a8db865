// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared parts of the end-to-end tests.

use std::fs::OpenOptions;
use std::io::Write;

pub mod app;
pub mod probe;
pub mod testbed;
pub mod usage;

/// The path of the function that it stands in, without the crate: a test's name.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        let path = std::any::type_name_of_val(&here).trim_end_matches("::here");
        let path = path.trim_end_matches("::{{closure}}");
        path.split_once("::").expect("a function is in a crate").1
    }};
}

/// Reports a test as not run, with the reason. `make test` counts these reports; they are not
/// passes.
pub fn not_run(test: &str, reason: &str) {
    report("NOT RUN", test, reason);
}

/// Whether a test is to have its short form, as in `make test`; in `make long` it has the long one.
pub fn is_short() -> bool {
    std::env::var_os("RXSTEER_LONG").is_none()
}

/// How often or with how many, in a test's short and long form.
pub fn short_or_long(short: u32, long: u32) -> u32 {
    if is_short() { short } else { long }
}

/// Whether other tests run at the same time; then reports that this one has to run alone, and why.
/// `make test` runs it again after them.
pub fn has_to_wait(test: &str, reason: &str) -> bool {
    let together = std::env::var_os("RXSTEER_TOGETHER").is_some();
    if together {
        report("ALONE", test, reason);
    }
    together
}

/// Reports a test that other programs have spoilt: `make test` runs it again alone, and only then counts
/// it as not run.
pub fn spoilt(test: &str, reason: &str) {
    if !has_to_wait(test, reason) {
        not_run(test, reason);
    }
}

/// Appends a line to the file that scripts/one-test.sh reads.
fn report(state: &str, test: &str, reason: &str) {
    let line = format!("{state}: {test}: {reason}\n");
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
