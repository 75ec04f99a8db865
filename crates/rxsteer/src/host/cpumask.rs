// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sets of CPUs in the kernel's text formats.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

/// Upper bound of CPU numbers: the largest `CONFIG_NR_CPUS` of the supported architectures. It
/// keeps a typing error such as `0-4000000000` from filling memory.
const MAX_CPUS: u32 = 8192;

/// Hex digits in one group of a kernel bitmap (`%*pb` prints 32 bits at a time).
const GROUP_DIGITS: usize = 8;

/// An ordered set of CPU numbers.
///
/// `FromStr` accepts a list as for `taskset -c` and `isolcpus=` (`3`, `0-3,8`, `0-31:2/4`), or
/// after `0x` a mask as in `rps_cpus` (`0xff`, `0xf,ffffffff`). Kernel files have no prefix: read
/// them by [`CpuMask::parse_list`] or [`CpuMask::parse_mask`].
///
/// `Display` and serde write the list form, which `FromStr` reads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CpuMask(BTreeSet<u32>);

/// Why a text is not a set of CPUs, with a remedy.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CpuMaskError {
    #[error("no CPUs given; write a list (`0-3,8`), a mask (`0xf`) or `auto`")]
    Empty,
    #[error(
        "`{0}` is not a mask; write `0x` and hexadecimal digits, in groups of 8 where there are commas: \
         `0xff`, `0xf,ffffffff`"
    )]
    NotMask(String),
    #[error(
        "`{0}` is not a CPU or a range of CPUs; write a list such as `0-3,8`, or a mask such as `0x10f`"
    )]
    NotList(String),
    #[error("the range `{0}` runs backwards; write the lower CPU first")]
    Backwards(String),
    #[error("`{0}`: in `FIRST-LAST:USED/GROUP`, USED and GROUP are at least 1 and USED <= GROUP")]
    BadStride(String),
    #[error("CPU {0} does not exist: CPU numbers end at {last}", last = MAX_CPUS - 1)]
    TooLarge(u64),
}

impl CpuMask {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads the kernel's list form (`0-3,8`, `0-31:2/4`), as in `/sys/devices/system/cpu/online`.
    /// An empty text is the empty set, as the kernel writes it.
    pub fn parse_list(text: &str) -> Result<Self, CpuMaskError> {
        let mut cpus = BTreeSet::new();
        if !text.trim().is_empty() {
            for part in text.split(',') {
                cpus.extend(parse_range(part.trim())?);
            }
        }
        Ok(Self(cpus))
    }

    /// Reads the kernel's bitmap form (`ff`, `f,ffffffff`), as in `rps_cpus`; accepts `0x`.
    pub fn parse_mask(text: &str) -> Result<Self, CpuMaskError> {
        let digits = strip_0x(text.trim());
        let not_mask = || CpuMaskError::NotMask(text.trim().to_string());
        let groups: Vec<&str> = digits.split(',').collect();
        // A mask without commas may exceed one group. With commas all groups but the first must
        // have eight digits, or bits would shift.
        let lone = groups.len() == 1;
        let mut cpus = BTreeSet::new();
        let mut base = 0u32;
        for (i, group) in groups.iter().enumerate().rev() {
            let hex = !group.is_empty() && group.bytes().all(|b| b.is_ascii_hexdigit());
            let sized = lone || group.len() == GROUP_DIGITS || (i == 0 && group.len() < 8);
            if !hex || !sized {
                return Err(not_mask());
            }
            for digit in group.chars().rev() {
                let bits = digit.to_digit(16).ok_or_else(not_mask)?;
                for cpu in (0..4u32)
                    .filter(|bit| bits & (1 << bit) != 0)
                    .map(|bit| base + bit)
                {
                    cpus.insert(existing(cpu.into())?);
                }
                base += 4;
            }
        }
        Ok(Self(cpus))
    }

    /// The kernel's bitmap form: 32 bits to a group, no leading zeros, `0` for the empty set.
    pub fn to_mask_string(&self) -> String {
        let top = self.0.last().map_or(0, |cpu| cpu / 32);
        let mut words = vec![0u32; top as usize + 1];
        for cpu in &self.0 {
            words[(cpu / 32) as usize] |= 1 << (cpu % 32);
        }
        let mut text = format!("{:x}", words[top as usize]);
        for word in words.iter().rev().skip(1) {
            text.push_str(&format!(",{word:08x}"));
        }
        text
    }

    /// How many CPUs are in the set.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no CPU is in the set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `cpu` is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// The lowest CPU of the set.
    pub fn first(&self) -> Option<u32> {
        self.0.first().copied()
    }

    /// The CPUs, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + Clone + '_ {
        self.0.iter().copied()
    }

    /// The CPUs that are in both sets.
    pub fn intersect(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// The CPUs of this set that are not in `other`.
    pub fn without(&self, other: &Self) -> Self {
        Self(&self.0 - &other.0)
    }
}

fn strip_0x(text: &str) -> &str {
    text.strip_prefix("0x")
        .or_else(|| text.strip_prefix("0X"))
        .unwrap_or(text)
}

/// Returns `cpu` if it is below [`MAX_CPUS`].
fn existing(cpu: u64) -> Result<u32, CpuMaskError> {
    u32::try_from(cpu)
        .ok()
        .filter(|cpu| *cpu < MAX_CPUS)
        .ok_or(CpuMaskError::TooLarge(cpu))
}

/// One element of a list: `N`, `FIRST-LAST` or `FIRST-LAST:USED/GROUP`, which selects the first
/// USED CPUs of every GROUP (Documentation/admin-guide/kernel-parameters.rst, "cpu lists").
fn parse_range(part: &str) -> Result<Vec<u32>, CpuMaskError> {
    let number = |text: &str| -> Result<u64, CpuMaskError> {
        // `u64::parse` accepts a sign.
        Some(text)
            .filter(|text| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| CpuMaskError::NotList(part.to_string()))
    };
    let (range, stride) = match part.split_once(':') {
        Some((range, stride)) => (range, Some(stride)),
        None => (part, None),
    };
    let Some((first, last)) = range.split_once('-') else {
        if stride.is_some() {
            return Err(CpuMaskError::BadStride(part.to_string()));
        }
        return Ok(vec![existing(number(range)?)?]);
    };
    let (first, last) = (existing(number(first)?)?, existing(number(last)?)?);
    if first > last {
        return Err(CpuMaskError::Backwards(part.to_string()));
    }
    let (used, group) = match stride {
        None => (1, 1),
        Some(stride) => {
            let (used, group) = stride
                .split_once('/')
                .ok_or_else(|| CpuMaskError::BadStride(part.to_string()))?;
            (number(used)?, number(group)?)
        }
    };
    if used == 0 || used > group {
        return Err(CpuMaskError::BadStride(part.to_string()));
    }
    Ok((first..=last)
        .filter(|cpu| u64::from(cpu - first) % group < used)
        .collect())
}

impl FromStr for CpuMask {
    type Err = CpuMaskError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        if text.is_empty() {
            return Err(CpuMaskError::Empty);
        }
        match text.get(..2) {
            Some("0x" | "0X") => Self::parse_mask(text),
            _ => Self::parse_list(text),
        }
    }
}

impl fmt::Display for CpuMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while cpus.next_if_eq(&(last + 1)).is_some() {
                last += 1;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

impl FromIterator<u32> for CpuMask {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl Serialize for CpuMask {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CpuMask {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.is_empty() {
            return Ok(Self::new());
        }
        text.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::btree_set;
    use proptest::prelude::*;

    use super::*;

    fn cpus(text: &str) -> Vec<u32> {
        text.parse::<CpuMask>()
            .unwrap_or_else(|e| panic!("{text}: {e}"))
            .iter()
            .collect()
    }

    fn error(text: &str) -> CpuMaskError {
        text.parse::<CpuMask>().expect_err(text)
    }

    #[test]
    fn a_mask_begins_with_0x() {
        assert_eq!(cpus("0x1"), [0]);
        assert_eq!(cpus("0X8"), [3]);
        assert_eq!(cpus(" 0x3\n"), [0, 1]);
        assert_eq!(cpus("0xff"), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(cpus("0x0"), [0u32; 0]);
        assert_eq!(cpus("0x100000000"), [32]);
        assert_eq!(cpus("0x1,00000001"), [0, 32]);
        assert_eq!(cpus("0xf,ffffffff").len(), 36);
    }

    #[test]
    fn all_else_is_a_list() {
        assert_eq!(cpus("3"), [3]);
        assert_eq!(cpus("0"), [0]);
        assert_eq!(cpus("10"), [10]);
        assert_eq!(cpus("3-3"), [3]);
        assert_eq!(cpus("0-3,8"), [0, 1, 2, 3, 8]);
        assert_eq!(cpus("0,2,10"), [0, 2, 10]);
        assert_eq!(cpus("1,00000001"), [1]);
        assert_eq!(cpus("8,0-1, 0"), [0, 1, 8]);
        assert_eq!(cpus("0-7:2/4"), [0, 1, 4, 5]);
    }

    #[test]
    fn files_of_the_kernel_have_nothing_in_front() {
        assert_eq!(CpuMask::parse_list("3\n").unwrap().first(), Some(3));
        assert!(CpuMask::parse_list("\n").unwrap().is_empty());
        assert_eq!(
            CpuMask::parse_mask("00000000,00000002").unwrap().first(),
            Some(1)
        );
    }

    #[test]
    fn errors_name_the_part_and_the_remedy() {
        assert_eq!(error("  "), CpuMaskError::Empty);
        assert_eq!(error("3-1"), CpuMaskError::Backwards("3-1".into()));
        assert_eq!(error("0-4000000000"), CpuMaskError::TooLarge(4_000_000_000));
        assert_eq!(error("0-x"), CpuMaskError::NotList("0-x".into()));
        assert_eq!(error("1,,2"), CpuMaskError::NotList("".into()));
        assert_eq!(error("0,+1"), CpuMaskError::NotList("+1".into()));
        assert_eq!(error("-1"), CpuMaskError::NotList("-1".into()));
        assert_eq!(error("ff"), CpuMaskError::NotList("ff".into()));
        assert_eq!(error("0x"), CpuMaskError::NotMask("0x".into()));
        assert_eq!(
            error("0x123456789,00000000"),
            CpuMaskError::NotMask("0x123456789,00000000".into())
        );
        assert_eq!(error("0-7:0/4"), CpuMaskError::BadStride("0-7:0/4".into()));
        assert_eq!(error("0-7:5/4"), CpuMaskError::BadStride("0-7:5/4".into()));
        assert_eq!(error("0-7:2"), CpuMaskError::BadStride("0-7:2".into()));
        assert!(matches!(
            error(&format!("0x1{}", "0".repeat(2048))),
            CpuMaskError::TooLarge(8192)
        ));
        assert!(error("ff").to_string().contains("0x10f"));
    }

    #[test]
    fn printed_as_the_kernel_prints() {
        let mask = |text: &str| CpuMask::parse_list(text).unwrap();
        assert_eq!(mask("0,1,2,3,8").to_string(), "0-3,8");
        assert_eq!(mask("0-1").to_mask_string(), "3");
        assert_eq!(mask("0-35").to_mask_string(), "f,ffffffff");
        assert_eq!(mask("64").to_mask_string(), "1,00000000,00000000");
        assert_eq!(CpuMask::new().to_mask_string(), "0");
        assert_eq!(CpuMask::new().to_string(), "");
        assert_eq!(serde_json::to_string(&mask("3")).unwrap(), "\"3\"");
    }

    #[test]
    fn set_operations() {
        let a = CpuMask::from_iter([0, 1, 2]);
        let b = CpuMask::from_iter([1, 2, 3]);
        assert_eq!(a.intersect(&b), CpuMask::from_iter([1, 2]));
        assert_eq!(a.without(&b), CpuMask::from_iter([0]));
        assert!(a.contains(2) && !a.contains(3));
        assert_eq!(a.len(), 3);
    }

    proptest! {
        #[test]
        fn every_form_reads_back(set in btree_set(0..MAX_CPUS, 0..40)) {
            let mask = CpuMask(set);
            prop_assert_eq!(&CpuMask::parse_list(&mask.to_string()).unwrap(), &mask);
            prop_assert_eq!(&CpuMask::parse_mask(&mask.to_mask_string()).unwrap(), &mask);
            prop_assert_eq!(&format!("0x{}", mask.to_mask_string()).parse::<CpuMask>().unwrap(), &mask);
            let json = serde_json::to_string(&mask).unwrap();
            prop_assert_eq!(&serde_json::from_str::<CpuMask>(&json).unwrap(), &mask);
        }

        #[test]
        fn a_dense_set_reads_back(set in btree_set(0..72u32, 0..72)) {
            let mask = CpuMask(set);
            prop_assert_eq!(&CpuMask::parse_list(&mask.to_string()).unwrap(), &mask);
            prop_assert_eq!(&format!("0x{}", mask.to_mask_string()).parse::<CpuMask>().unwrap(), &mask);
        }

        /// An accepted text means the same after being printed; no text panics.
        #[test]
        fn any_text(text in "[0-9a-fx,:/ -]{0,24}") {
            if let Ok(mask) = text.parse::<CpuMask>() {
                prop_assert_eq!(&CpuMask::parse_list(&mask.to_string()).unwrap(), &mask);
                if !mask.is_empty() {
                    prop_assert_eq!(&mask.to_string().parse::<CpuMask>().unwrap(), &mask);
                }
            }
        }
    }
}
