// SPDX-License-Identifier: MIT OR Apache-2.0
//! Patterns of device names, such as `veth*`: each device that matches is steered in softirq mode, from
//! when it is there.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use glob::Pattern;

use super::options::{Mode, Options};
use crate::host::device::{Device, RxMode, names};

/// Whether this is a pattern, not a name. No device has one of these characters in its name, but `[`
/// (`dev_valid_name()` in net/core/dev.c allows it, and nobody uses it).
pub(super) fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?', '['])
}

/// The patterns among the names of the options.
pub(super) struct Patterns {
    patterns: Vec<Pattern>,
    /// Devices that match and can't be steered, by interface index, with the name for which that was
    /// reported.
    pub(super) reported: BTreeMap<u32, String>,
}

impl Patterns {
    /// # Errors
    /// When one is no pattern; in a mode with a program for each device.
    pub(super) fn of(options: &Options) -> Result<Self> {
        let texts = options.devices.iter().filter(|name| is_pattern(name));
        let pattern = |text: &String| Pattern::new(text).with_context(|| format!("pattern {text}"));
        let patterns: Vec<_> = texts.map(pattern).collect::<Result<_>>()?;
        if let Some(pattern) = patterns.first()
            && options.mode == Mode::Native
        {
            bail!(
                "{pattern} stands for devices that come and go, which are steered in softirq mode: leave \
                 --mode out, or name each device"
            );
        }
        Ok(Self {
            patterns,
            reported: BTreeMap::new(),
        })
    }

    /// The patterns as text.
    pub(super) fn texts(&self) -> impl Iterator<Item = &str> {
        self.patterns.iter().map(Pattern::as_str)
    }

    /// The patterns that none of these names match.
    pub(super) fn without<'a>(&'a self, names: &[&str]) -> impl Iterator<Item = &'a str> {
        let matches = |pattern: &&Pattern| names.iter().any(|name| pattern.matches(name));
        let patterns = self.patterns.iter();
        patterns.filter(move |p| !matches(p)).map(Pattern::as_str)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.matches(name))
    }

    /// The devices that match now, or why one can't be steered. The loopback device matches none.
    ///
    /// # Errors
    /// When the devices can't be listed.
    pub(super) fn matching(&self) -> Result<Vec<(String, Result<Device>)>> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let matching = names()?.into_iter().filter(|name| self.matches(name));
        let opened = matching.map(|name| {
            let device = open(&name);
            (name, device)
        });
        let no_loopback = |(_, device): &(String, Result<Device>)| {
            !device.as_ref().is_ok_and(|device| device.loopback)
        };
        Ok(opened.filter(no_loopback).collect())
    }
}

/// A device that softirq mode can steer.
///
/// # Errors
/// With the reason and its remedy.
pub(super) fn open(name: &str) -> Result<Device> {
    let device = Device::open(name)?;
    if !device.loopback {
        device.unobstructed(RxMode::Softirq)?;
    }
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patterns(devices: &[&str], mode: Mode) -> Result<Patterns> {
        Patterns::of(&Options {
            mode,
            ..Options::new(devices.iter().copied())
        })
    }

    #[test]
    fn patterns_match_as_in_a_shell() {
        let patterns = patterns(&["eth0", "veth*", "en?s[0-3]"], Mode::Auto).unwrap();
        let matches = |name| patterns.matches(name);
        assert!(matches("veth") && matches("veth12") && matches("enps3"));
        assert!(!matches("eth0") && !matches("myveth1") && !matches("enps4"));
    }

    #[test]
    fn patterns_are_for_softirq_mode() {
        assert!(patterns(&["veth*"], Mode::Native).is_err());
        assert!(patterns(&["veth0"], Mode::Native).is_ok_and(|p| p.is_empty()));
        assert!(patterns(&["veth[0"], Mode::Auto).is_err());
    }
}
