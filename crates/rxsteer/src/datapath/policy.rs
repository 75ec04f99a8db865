// SPDX-License-Identifier: MIT OR Apache-2.0
//! Policies: `rfs`, `rps` or `off`, and their additions.

use std::fmt;
use std::str::FromStr;

use serde_with::{DeserializeFromStr, SerializeDisplay};

use crate::types::rx_policy;

/// The location of a flow by the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The CPU where the flow's application runs; as rps if that is unknown.
    Rfs,
    /// By the flow's hash, over the CPUs of the queue's mask.
    Rps,
    /// INLINE: every packet stays where it is received.
    Off,
}

/// A policy as written in `--policy`: `rfs`, `rps+adapt`, `adaptive`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq, SerializeDisplay, DeserializeFromStr)]
pub struct Policy {
    /// The location by the tables.
    pub base: Base,
    /// `+idle`: an idle CPU near a busy application.
    pub idle: bool,
    /// `+adapt`: a flow stays where it is received while that CPU has room.
    pub adapt: bool,
}

/// The syntax of policies.
const HINT: &str = "choose adaptive, rfs, rps or off; to rfs and rps may be added +idle and +adapt, \
                    as in rps+adapt";

impl Policy {
    /// Flows follow their applications, whatever the load.
    pub const RFS: Self = Self::plain(Base::Rfs);
    /// By the hash alone.
    pub const RPS: Self = Self::plain(Base::Rps);
    /// Every packet stays where it is received.
    pub const OFF: Self = Self::plain(Base::Off);
    /// `rfs+adapt`.
    pub const ADAPTIVE: Self = Self {
        base: Base::Rfs,
        idle: false,
        adapt: true,
    };

    const fn plain(base: Base) -> Self {
        Self {
            base,
            idle: false,
            adapt: false,
        }
    }

    /// Whether flows follow their applications, where these can be seen.
    pub fn follows(&self) -> bool {
        self.base == Base::Rfs
    }

    /// The same policy, by RPS instead of applications.
    #[must_use]
    pub fn without_following(self) -> Self {
        let base = match self.base {
            Base::Rfs => Base::Rps,
            other => other,
        };
        Self { base, ..self }
    }

    /// The same policy, with flows that follow their applications.
    #[must_use]
    pub fn with_following(self) -> Self {
        Self {
            base: Base::Rfs,
            ..self
        }
    }

    /// Bits of `enum rx_policy`.
    pub fn bits(&self) -> u16 {
        let bits = [
            (self.follows(), rx_policy::RX_FOLLOW),
            (self.idle, rx_policy::RX_IDLE),
            (self.adapt, rx_policy::RX_ADAPT),
        ];
        let set = bits.into_iter().filter(|(set, _)| *set);
        set.fold(0, |all, (_, bit)| all | bit.0 as u16)
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self::ADAPTIVE
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ADAPTIVE {
            return f.pad("adaptive");
        }
        let mut text = match self.base {
            Base::Rfs => "rfs",
            Base::Rps => "rps",
            Base::Off => "off",
        }
        .to_owned();
        for (set, name) in [(self.idle, "+idle"), (self.adapt, "+adapt")] {
            if set {
                text += name;
            }
        }
        f.pad(&text)
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split('+');
        let wrong = || format!("{text:?} is no policy: {HINT}");
        let mut policy = match words.next() {
            Some("adaptive") => Self::ADAPTIVE,
            Some("rfs") => Self::RFS,
            Some("rps") => Self::RPS,
            Some("off") => Self::OFF,
            _ => return Err(wrong()),
        };
        for word in words {
            if policy.base == Base::Off {
                return Err(format!("{text:?}: nothing can be added to off: {HINT}"));
            }
            match word {
                "idle" => policy.idle = true,
                "adapt" => policy.adapt = true,
                _ => return Err(wrong()),
            }
        }
        Ok(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_written_as_they_are_read() {
        for text in [
            "adaptive",
            "rfs",
            "rps",
            "off",
            "rfs+idle",
            "rps+adapt",
            "rfs+idle+adapt",
            "rps+idle+adapt",
        ] {
            assert_eq!(text.parse::<Policy>().unwrap().to_string(), text);
        }
        assert_eq!("rfs+adapt".parse(), Ok(Policy::ADAPTIVE));
        assert_eq!(Policy::OFF.bits(), 0);
        assert_ne!(Policy::RFS.bits(), Policy::RPS.bits());
        for wrong in ["", "nearest", "rfs+", "rfs+fast", "off+idle", "RFS", "idle"] {
            let error = wrong.parse::<Policy>().unwrap_err();
            assert!(error.contains("adaptive, rfs, rps or off"), "{error}");
        }
    }
}
