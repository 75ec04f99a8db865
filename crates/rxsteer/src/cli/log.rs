// SPDX-License-Identifier: MIT OR Apache-2.0
//! The log: lines of text on stderr, or, if stderr is the journal, entries there whose fields name
//! device, queue and CPU.

use std::io::{self, IsTerminal};

use nix::sys::stat::fstat;
use tracing_journald::{Layer as Journal, Priority, PriorityMappings};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::debug_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::api::line::printable_message;

/// Starts the log of this process.
pub(super) fn start(level: LevelFilter) {
    let journal = journal();
    let text = journal.is_none().then(|| {
        tracing_subscriber::fmt::layer()
            .with_writer(io::stderr)
            // Colours only on a terminal, not in a journal or a file.
            .with_ansi(io::stderr().is_terminal())
            // A log without a reader must end nothing: the error of a write would be printed there
            // too, and this fails by a panic.
            .log_internal_errors(false)
            .without_time()
            .with_target(false)
            // The message says what the fields say.
            .fmt_fields(debug_fn(|out, field, value| match field.name() {
                "message" => write!(out, "{}", printable_message(&format!("{value:?}"))),
                _ => Ok(()),
            }))
            .boxed()
    });
    let log = tracing_subscriber::registry().with(level);
    log.with(text).with(journal).init();
}

/// The journal, if stderr is connected to it: `JOURNAL_STREAM` then has device and inode of stderr
/// (systemd.exec(5)). `None` also if its socket can't be reached, as in another mount namespace.
fn journal() -> Option<Journal> {
    let stream = std::env::var("JOURNAL_STREAM").ok()?;
    let stderr = fstat(io::stderr()).ok()?;
    if stream != format!("{}:{}", stderr.st_dev, stderr.st_ino) {
        return None;
    }
    let journal = tracing_journald::layer().ok()?;
    Some(
        journal
            .with_field_prefix(Some("RXSTEER".to_owned()))
            .with_priority_mappings(PriorityMappings {
                info: Priority::Informational,
                debug: Priority::Debug,
                ..PriorityMappings::new()
            }),
    )
}
