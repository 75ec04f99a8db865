// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queries and changes of a running rxsteer.

use anyhow::Result;

use super::control::{Request, ask, ask_if_there};
use super::explain::{Explanations, Question};
use super::flows::{Flows, Query};
use super::set::Change;
use super::{busy_poll, status};

/// Returns the counters of a running rxsteer.
///
/// # Errors
/// When none runs in this network namespace.
pub fn status() -> Result<status::Status> {
    ask(&Request::Status)
}

/// The same; `None` if none runs in this network namespace.
///
/// # Errors
/// When it does not answer.
pub fn status_if_there() -> Result<Option<status::Status>> {
    ask_if_there(&Request::Status)
}

/// The same without flows: no table is read.
///
/// # Errors
/// When none runs in this network namespace.
pub fn counters() -> Result<status::Status> {
    ask(&Request::Counters)
}

/// Changes a running rxsteer without reordering packets. Returns the new settings, one per line.
///
/// # Errors
/// When none runs, or the change is not possible; nothing has changed then.
pub fn set(change: Change) -> Result<Vec<String>> {
    ask(&Request::Set(change))
}

/// Lets a running rxsteer read its configuration again and apply it, without reordering packets.
/// Returns what has changed, one setting per line.
///
/// # Errors
/// When none runs, it has no configuration, or the configuration can't be applied; nothing has changed
/// then.
pub fn reload() -> Result<Vec<String>> {
    ask(&Request::Reload)
}

/// Returns the flows of a running rxsteer.
///
/// # Errors
/// When none runs, or it does not steer the requested device.
pub fn flows(query: Query) -> Result<Flows> {
    ask(&Request::Flows(query))
}

/// Returns what a running rxsteer knows about flows.
///
/// # Errors
/// When none runs.
pub fn explain(question: Question) -> Result<Explanations> {
    ask(&Request::Explain(question))
}

/// Returns the busy-poll counters; `None` if no rxsteer lets sockets poll in this namespace.
///
/// # Errors
/// When it does not answer.
pub fn busy_poll() -> Result<Option<busy_poll::Status>> {
    ask_if_there(&Request::BusyPoll)
}
