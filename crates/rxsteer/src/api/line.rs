// SPDX-License-Identifier: MIT OR Apache-2.0
//! A line of JSON on a stream, within a size and a time.

use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::net::Shutdown;
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
pub(super) fn read(stream: &UnixStream, max: usize, limit: Duration) -> Result<Vec<u8>> {
    let end = Instant::now() + limit;
    let mut line = Vec::new();
    let mut chunk = vec![0; CHUNK];
    while line.last() != Some(&b'\n') {
        match read_chunk(stream, &mut chunk, end, limit)? {
            [] => break,
            read => line.extend(read),
        }
        ensure!(line.len() <= max, "more than {} MiB", max >> 20);
    }
    Ok(line)
}

/// Ends the sending side, and reads what the peer still sends until it has the end, for `limit` at
/// most. A stream that is closed with bytes that nobody has read resets the peer's end, which then
/// loses what was written last.
///
/// # Errors
/// When the peer takes longer, or resets the stream.
pub(super) fn finish(stream: &UnixStream, limit: Duration) -> Result<()> {
    let end = Instant::now() + limit;
    let mut chunk = vec![0; CHUNK];
    stream.shutdown(Shutdown::Write)?;
    while !read_chunk(stream, &mut chunk, end, limit)?.is_empty() {}
    Ok(())
}

/// Reads some bytes; none at the end of the stream.
fn read_chunk<'a>(
    mut stream: &UnixStream,
    chunk: &'a mut [u8],
    end: Instant,
    limit: Duration,
) -> Result<&'a [u8]> {
    loop {
        stream.set_read_timeout(Some(left(end, limit)?))?;
        match stream.read(chunk) {
            Ok(n) => return Ok(&chunk[..n]),
            Err(e) if retries(&e) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Writes a value and a newline, which takes `limit` at most. Long texts are not copied.
///
/// # Errors
/// When the reader is gone, or takes longer.
pub(super) fn write(stream: &UnixStream, value: &impl Serialize, limit: Duration) -> Result<()> {
    let end = Instant::now() + limit;
    let mut writer = BufWriter::with_capacity(CHUNK, Timed { stream, end, limit });
    serde_json::to_writer(&mut writer, value).map_err(io::Error::from)?;
    writer.write_all(b"\n")?;
    writer.flush()?;
    Ok(())
}

/// A stream to which writes end in time.
struct Timed<'a> {
    stream: &'a UnixStream,
    end: Instant,
    limit: Duration,
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let left = left(self.end, self.limit).map_err(io::Error::other)?;
            self.stream.set_write_timeout(Some(left))?;
            match self.stream.write(bytes) {
                Err(e) if retries(&e) => {}
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether the call is repeated if there is time left.
fn retries(error: &io::Error) -> bool {
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
