// SPDX-License-Identifier: MIT OR Apache-2.0
//! A line of JSON on a stream, within a size and a time.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::Value;

/// Bytes asked for at once.
const CHUNK: usize = 64 << 10;

/// Reads up to a newline or the end of the stream, `max` bytes at most, which takes `limit` at most.
///
/// # Errors
/// When there are more bytes, or they take longer.
pub(super) fn read(mut stream: &UnixStream, max: usize, limit: Duration) -> Result<Vec<u8>> {
    let end = Instant::now() + limit;
    let mut line = Vec::new();
    let mut chunk = vec![0; CHUNK];
    while line.last() != Some(&b'\n') {
        stream.set_read_timeout(Some(left(end, limit)?))?;
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => line.extend(&chunk[..n]),
            Err(e) if retries(&e) => continue,
            Err(e) => return Err(e.into()),
        }
        ensure!(line.len() <= max, "more than {} MiB", max >> 20);
    }
    Ok(line)
}

/// Writes a value and a newline, which takes `limit` at most.
///
/// # Errors
/// When the reader is gone, or takes longer.
pub(super) fn write(
    mut stream: &UnixStream,
    value: &impl Serialize,
    limit: Duration,
) -> Result<()> {
    let end = Instant::now() + limit;
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    let mut rest = &line[..];
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(end, limit)?))?;
        match stream.write(rest) {
            Ok(n) => rest = &rest[n..],
            Err(e) if retries(&e) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Whether the call is repeated if there is time left.
fn retries(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn left(end: Instant, limit: Duration) -> Result<Duration> {
    end.checked_duration_since(Instant::now())
        .filter(|left| !left.is_zero())
        .with_context(|| format!("not within {limit:?}"))
}

/// Replaces control characters in all texts of a value by their escapes: what a terminal shows then
/// does nothing else there.
pub(super) fn printable(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(escaped(&text, |_| false)),
        Value::Array(values) => values.into_iter().map(printable).collect(),
        Value::Object(fields) => fields
            .into_iter()
            .map(|(name, value)| (escaped(&name, |_| false), printable(value)))
            .collect(),
        other => other,
    }
}

/// As [`printable`], for an error message, which may have several lines.
pub fn printable_message(text: &str) -> String {
    escaped(text, |c| c == '\n')
}

fn escaped(text: &str, keep: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() && !keep(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use std::thread;

    use serde_json::json;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    const LATE: Duration = Duration::from_secs(60);

    #[test]
    fn a_line_arrives_whole() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let long = "x".repeat(3 * CHUNK);
        thread::scope(|scope| {
            scope.spawn(|| write(&ours, &long, LATE).unwrap());
            let line = read(&theirs, 1 << 20, LATE).unwrap();
            assert_eq!(line, format!("\"{long}\"\n").into_bytes());
        });
    }

    #[test]
    fn who_sends_or_reads_slowly_is_given_up() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(read(&ours, CHUNK, SOON).is_err());
        // More than the buffers between the two ends hold.
        assert!(write(&ours, &"x".repeat(16 << 20), SOON).is_err());
        drop(theirs);
    }

    /// A byte before each limit of a single call would otherwise keep the reader for ever.
    #[test]
    fn who_sends_byte_by_byte_is_given_up() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            scope.spawn(move || while theirs.write_all(b"x").is_ok() {});
            assert!(read(&ours, usize::MAX, SOON).is_err());
            drop(ours);
        });
    }

    #[test]
    fn more_than_the_most_is_refused() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| write(&ours, &"x".repeat(2 << 20), LATE));
            let error = read(&theirs, 1 << 20, LATE).unwrap_err();
            assert_eq!(error.to_string(), "more than 1 MiB");
            drop(theirs);
        });
    }

    #[test]
    fn control_characters_are_escaped() {
        let bad = json!({"a\u{7}": ["\u{1b}[2J", {"b": "c\nd\u{9b}"}], "n": 1.5, "ü": "é"});
        let good = json!({"a\\u{7}": ["\\u{1b}[2J", {"b": "c\\nd\\u{9b}"}], "n": 1.5, "ü": "é"});
        assert_eq!(printable(bad), good);
        assert_eq!(printable_message("a\nb\r"), "a\nb\\r");
    }
}
