// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wrong usage of the programs under test.

use std::process::{Command, Output};

/// The path of a program.
pub struct Program(pub &'static str);

impl Program {
    /// Runs the program. Wrong usage fails before anything is done, so neither root nor a namespace
    /// is needed.
    ///
    /// # Panics
    /// When it can't be run.
    pub fn run(&self, args: &[&str]) -> Output {
        let output = Command::new(self.0).args(args).output();
        output.expect("the program under test can be run")
    }

    /// Checks that the program ends with status 2 and prints only an error, which contains each of
    /// `what`.
    ///
    /// # Panics
    /// When it does not.
    pub fn wrong(&self, args: &[&str], what: &[&str]) {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{args:?}: {output:?}");
        for what in what {
            assert!(stderr.contains(what), "{args:?}: not {what:?} in {stderr}");
        }
        assert!(!stderr.contains('\u{1b}'), "{args:?}: colours in a pipe");
    }
}

/// Invalid times of `status --interval` and `--seconds`, with the errors.
pub const SECONDS: [(&str, &str); 6] = [
    ("0", "choose 0.01 seconds or more"),
    ("-1", "choose 0.01 seconds or more"),
    ("inf", "choose 0.01 seconds or more"),
    ("NaN", "choose 0.01 seconds or more"),
    ("1s", "is not a number"),
    ("", "is not a number"),
];
