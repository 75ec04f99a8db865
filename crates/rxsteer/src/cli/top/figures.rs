// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers in few columns.

/// Columns that a figure takes at most.
pub const WIDTH: u16 = 5;

/// A number of at most [`WIDTH`] characters below 10¹⁵, with a decimal prefix.
pub fn figure(value: f64) -> String {
    let (scaled, prefix) = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
        .into_iter()
        // Rounded, 999.5 has four digits.
        .find(|(unit, _)| value >= unit * 0.9995)
        .map_or((value, ""), |(unit, prefix)| (value / unit, prefix));
    let decimals = match scaled {
        s if !(0.05..99.95).contains(&s) => 0,
        s if s >= 9.995 || prefix.is_empty() => 1,
        _ => 2,
    };
    format!("{scaled:.decimals$}{prefix}")
}

/// As [`figure`], for a number of frames.
pub fn count(frames: u64) -> String {
    match frames {
        0..1000 => frames.to_string(),
        _ => figure(frames as f64),
    }
}

/// A rate that may be unknown.
pub fn maybe(rate: Option<f64>) -> String {
    rate.map_or("-".to_owned(), figure)
}

/// A time in us, which is an upper bound; `None` is longer than a second.
pub fn time(us: Option<u64>) -> String {
    match us {
        Some(us @ 0..1000) => format!("{us}us"),
        Some(us @ 1000..1_000_000) => format!("{}ms", us / 1000),
        Some(us) => format!("{:.1}s", us as f64 / 1e6),
        None => ">1s".to_owned(),
    }
}

/// The power of ten of a rate as one character; a dot for none.
pub fn magnitude(rate: f64) -> char {
    match rate {
        r if r <= 0.0 => '·',
        r if r < 1.0 => '0',
        r => char::from_digit(r.log10().min(9.0) as u32, 10).unwrap_or('9'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_fit_and_have_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.04, "0"),
            (0.05, "0.1"),
            (9.96, "10.0"),
            (99.96, "100"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (1234.0, "1.23k"),
            (12_345.0, "12.3k"),
            (99_960.0, "100k"),
            (999_499.0, "999k"),
            (999_600.0, "1.00M"),
            (2.5e9, "2.50G"),
            (9.99e14, "999T"),
        ] {
            assert_eq!(figure(value), text, "{value}");
        }
        let mut value = 0.001;
        while value < 9.99e14 {
            let text = figure(value);
            assert!(text.len() <= WIDTH.into(), "{value}: {text}");
            value *= 1.007;
        }
        assert_eq!([0, 999, 1000].map(count), ["0", "999", "1.00k"]);
        assert_eq!([None, Some(7.0)].map(maybe), ["-", "7.0"]);
    }

    #[test]
    fn times_fit() {
        let bounds = [
            Some(2),
            Some(512),
            Some(2048),
            Some(1 << 19),
            Some(1 << 20),
            None,
        ];
        assert_eq!(
            bounds.map(time),
            ["2us", "512us", "2ms", "524ms", "1.0s", ">1s"]
        );
    }

    #[test]
    fn a_magnitude_is_one_character() {
        for (rate, is) in [
            (0.0, '·'),
            (0.3, '0'),
            (9.9, '0'),
            (10.0, '1'),
            (1e6, '6'),
            (1e12, '9'),
        ] {
            assert_eq!(magnitude(rate), is, "{rate}");
        }
    }
}
