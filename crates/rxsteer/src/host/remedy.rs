// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ways out of an objection. Pinned steering excludes some of them.

use std::fmt;

use serde::{Serialize, Serializer};

/// A way out: a command, or an action in words.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Way {
    /// By what is not rxsteer's, or an option that `--pin` allows.
    Any(String),
    /// By `--prepare` or by softirq mode, which both end with the process.
    WithTheProcess(String),
}

/// Ways out of an objection, any of which suffices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remedy(Vec<Way>);

/// What is left to pinned steering if it excludes all other ways.
const UNPINNED: &str = "softirq mode or `--prepare` would help, which --pin excludes: leave --pin";

impl Remedy {
    /// Softirq mode.
    pub fn softirq_mode() -> Self {
        Self::with_the_process("use `--mode softirq`")
    }

    /// By `--prepare` or softirq mode, in these words.
    pub fn with_the_process(words: impl Into<String>) -> Self {
        Self(vec![Way::WithTheProcess(words.into())])
    }

    /// These, or others.
    pub fn or(mut self, others: impl Into<Self>) -> Self {
        self.0.extend(others.into().0);
        self
    }

    /// Those that remain for pinned steering.
    pub fn pinned(mut self) -> Self {
        self.0.retain(|way| matches!(way, Way::Any(_)));
        match self.0.is_empty() {
            true => UNPINNED.into(),
            false => self,
        }
    }
}

impl<T: Into<String>> From<T> for Remedy {
    fn from(words: T) -> Self {
        Self(vec![Way::Any(words.into())])
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, Way::Any(words) | Way::WithTheProcess(words)) in self.0.iter().enumerate() {
            let or = if number > 0 { ", or " } else { "" };
            write!(f, "{or}{words}")?;
        }
        Ok(())
    }
}

impl Serialize for Remedy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_steering_excludes_some() {
        let either = Remedy::with_the_process("`--prepare`").or("`ethtool`");
        assert_eq!(either.to_string(), "`--prepare`, or `ethtool`");
        assert_eq!(either.pinned().to_string(), "`ethtool`");
        let lower = || Remedy::from("lower the MTU").or(Remedy::softirq_mode());
        assert_eq!(
            lower().to_string(),
            "lower the MTU, or use `--mode softirq`"
        );
        assert_eq!(lower().pinned().to_string(), "lower the MTU");
        assert_eq!(Remedy::softirq_mode().pinned().to_string(), UNPINNED);
    }
}
