// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mistakes in the syntax of a configuration file, in the words of its author.

use crate::cli::places::line_of;

/// A mistake, after its line.
pub(super) type Mistake = (usize, String);

/// Where the keys are described, for texts that are no configuration at all.
const EXAMPLE: &str = "`rxsteer check --example` prints a file with all keys";

/// The text of a file.
///
/// # Errors
/// When it is not UTF-8, with the line of the first byte that is not; when it has a zero byte.
pub(super) fn text(bytes: &[u8]) -> Result<&str, Mistake> {
    let line = |at: usize| bytes[..at].iter().filter(|b| **b == b'\n').count() + 1;
    if let Some(at) = bytes.iter().position(|byte| *byte == 0) {
        let why = format!("this is not a text file: a configuration is TOML; {EXAMPLE}");
        return Err((line(at), why));
    }
    str::from_utf8(bytes).map_err(|e| {
        let at = e.valid_up_to();
        let why = format!(
            "the byte {:#04x} is no character in UTF-8: save the file in the encoding UTF-8",
            bytes[at]
        );
        (line(at), why)
    })
}

/// A mistake that the parser found in a text.
pub(super) fn mistake(text: &str, error: &toml::de::Error) -> Mistake {
    let start = error.span().map_or(0, |span| span.start.min(text.len()));
    let number = line_of(text, start);
    if text.trim_start().starts_with('{') {
        let why = format!(
            "this is JSON, and a configuration is TOML: write a line for each key, as devices = \
             [\"eth0\"], without braces and commas; {EXAMPLE}"
        );
        return (line_of(text, text.find('{').unwrap_or(0)), why);
    }
    let line = text.lines().nth(number - 1).unwrap_or_default();
    let said = error.message().lines().next().unwrap_or_default();
    let why = match said {
        "duplicate key" => "this key is there twice: keep one of them".to_owned(),
        // Beyond 64 bits.
        _ if said.starts_with("invalid type: integer") => "the number is too large".to_owned(),
        _ => format!(
            "{}: write KEY = VALUE, where a text has quotes and a list brackets, as policy = \"rfs\" or \
             devices = [\"eth0\"]",
            plain(said)
        ),
    };
    (number, format!("{}{why}", key(line)))
}

/// The key with which a line begins, for the begin of a message; empty if there is none.
fn key(line: &str) -> String {
    let key = line.split(['=', ':']).next().unwrap_or_default().trim();
    let is_key = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    match !key.is_empty() && key.chars().all(is_key) {
        true => format!("{key}: "),
        false => String::new(),
    }
}

/// The parser's words without the names of its grammar's rules.
fn plain(said: &str) -> String {
    let said = match said.split_once(", expected ") {
        // One character is what the author can add.
        Some((_, expected)) if expected.starts_with('`') && !expected.contains("`, `") => said,
        Some((what, _)) => what,
        None => said,
    };
    let words = [
        ("string values must be quoted", "the text has no quotes"),
        ("key with no value", "there is no value"),
        (
            "missing escaped value",
            "no character comes after \\ that it can stand for",
        ),
        ("inline table", "table in braces"),
        ("basic string", "text"),
        ("literal string", "text"),
        ("array table", "table in [[ ]]"),
        ("array", "list"),
    ];
    let replaced = |said: String, (jargon, word): (&str, &str)| said.replace(jargon, word);
    words.into_iter().fold(said.to_owned(), replaced)
}
