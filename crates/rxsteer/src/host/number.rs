// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole numbers, as options and configurations have them.

use std::fmt::Display;
use std::str::FromStr;

/// A parser of whole numbers from `least` to `most`. `unit` says what they count, or are.
///
/// Its errors say what to write instead.
pub fn whole<T>(
    least: T,
    most: T,
    unit: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Copy + Display + Send + Sync + 'static,
{
    move |text| {
        let number = text.parse().ok();
        let number = number.filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("write a whole number from {least} to {most} ({unit})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_outside_of_the_range_are_refused_with_it() {
        let frames = whole(1_u32, 16, "frames");
        for (text, number) in [("1", 1), ("16", 16), ("+7", 7)] {
            assert_eq!(frames(text), Ok(number));
        }
        let why = "write a whole number from 1 to 16 (frames)";
        for text in ["0", "17", "-1", "1k", "1.5", "0x3", " 3", "", "99999999999"] {
            assert_eq!(frames(text), Err(why.to_owned()), "{text:?}");
        }
        let most = whole(0, u64::MAX, "ns");
        assert_eq!(most("18446744073709551615"), Ok(u64::MAX));
        assert!(most("18446744073709551616").is_err());
    }
}
