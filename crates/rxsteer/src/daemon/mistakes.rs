// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mistakes in options, of the command line or of files: the same options fail again at each start. What
//! depends on the host, such as a device that is not there, is no mistake.

use thiserror::Error;

/// Each with what to change, a line each.
#[derive(Debug, Error)]
#[error("{}", .0.join("\n"))]
pub struct Mistakes(Vec<String>);

impl Mistakes {
    /// Fails if there are any.
    ///
    /// # Errors
    /// These mistakes.
    pub fn none_in(found: impl IntoIterator<Item = String>) -> Result<(), Self> {
        let found: Vec<String> = found.into_iter().collect();
        match found.is_empty() {
            true => Ok(()),
            false => Err(Self(found)),
        }
    }
}

impl From<String> for Mistakes {
    fn from(one: String) -> Self {
        Self(vec![one])
    }
}
