// SPDX-License-Identifier: MIT OR Apache-2.0
//! The version of the running kernel, and its faults that are known by version.

use std::fs;

/// As `6.18.44` is `[6, 18, 44]`; zeros for numbers that are unknown.
pub type Version = [u32; 3];

/// The version of the running kernel.
pub fn version() -> Version {
    parse(&fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default())
}

/// Whether this kernel can stop if a device is removed whose program is bound to it (docs/hash.md):
/// seen on 6.18.
pub fn loses_bound_programs(version: Version) -> bool {
    ([6, 18, 0]..[6, 19, 0]).contains(&version)
}

/// The version of a release such as `6.18.4-1-amd64`.
fn parse(release: &str) -> Version {
    let plain = release.split(|c: char| c != '.' && !c.is_ascii_digit());
    let mut numbers = plain.take(1).flat_map(|text| text.split('.'));
    [(); 3].map(|()| numbers.next().and_then(|n| n.parse().ok()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_kernels() {
        for (release, expected) in [
            ("6.18.44-fc-v657\n", [6, 18, 44]),
            ("6.1.0-18-amd64", [6, 1, 0]),
            ("7.0-rc2", [7, 0, 0]),
            ("5.15", [5, 15, 0]),
            ("", [0, 0, 0]),
        ] {
            assert_eq!(parse(release), expected, "{release}");
        }
    }
}
