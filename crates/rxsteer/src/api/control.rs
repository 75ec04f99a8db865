// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests to a running rxsteer and their replies: a line of JSON each.
//!
//! One rxsteer of each [`Role`] can run per network namespace.

use std::io;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use thiserror::Error;

use super::explain::Question;
use super::flows::Query;
use super::set::Change;
use super::socket::{connect, path};
use super::{busy_poll, line, status};

/// The two kinds of server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `rxsteer run`.
    Steer,
    /// `rxsteer poll`, or `rxsteer run` with busy-poll rules.
    Poll,
}

impl Role {
    /// The beginning of the socket's name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Steer => "net",
            Self::Poll => "poll",
        }
    }

    /// The error when another process has this role.
    pub(super) fn conflict(self) -> String {
        let pid = match self {
            Self::Steer => ask(&Request::Status).map(|s: status::Status| s.pid),
            Self::Poll => ask(&Request::BusyPoll).map(|s: busy_poll::Status| s.pid),
        };
        let pid = pid.map_or(String::new(), |pid| format!(" (process {pid})"));
        match self {
            Self::Steer => format!(
                "rxsteer is running in this network namespace already{pid}: stop it first, or name \
                 all devices in one command"
            ),
            Self::Poll => format!(
                "another rxsteer lets sockets poll in this network namespace already{pid}: stop it \
                 first, or write all rules into one configuration"
            ),
        }
    }
}

/// Timeout of a client for a reply. An overloaded host may not run the server for seconds.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// The same for a change: every flow may have to return to INLINE first. Each wait for a grace period
/// of RCU may take seconds beside work of a higher priority, so that no timeout suffices always.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

/// Time for a request to be taken.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Limit of a reply, bytes.
const REPLY_MAX: usize = 64 << 20;

/// Requests to a running rxsteer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Counters of queues and backlogs.
    Status,
    /// As [`Self::Status`], without flows: no table is read.
    Counters,
    /// Changes settings.
    Set(Change),
    /// Reads the configuration again, and applies it.
    Reload,
    /// Lists flows.
    Flows(Query),
    /// Explains the location of flows.
    Explain(Question),
    /// Busy-poll counters per process.
    BusyPoll,
}

impl Request {
    fn to(&self) -> Role {
        match self {
            Self::BusyPoll => Role::Poll,
            _ => Role::Steer,
        }
    }
}

/// What a server answers, as JSON.
pub type Reply = Box<RawValue>;

/// Serialises an answer.
///
/// # Errors
/// When a map in it has keys that are no text.
pub fn reply(answer: &impl Serialize) -> Result<Reply> {
    Ok(to_raw_value(answer)?)
}

/// Sends a request to the rxsteer in this network namespace.
///
/// # Errors
/// [`NoneRuns`]; when it does not answer in time, or the request failed there.
pub fn ask<T: DeserializeOwned>(request: &Request) -> Result<T> {
    let none = match request.to() {
        Role::Steer => NoneRuns::Steers,
        Role::Poll => NoneRuns::Polls,
    };
    ask_if_there(request)?.ok_or_else(|| none.into())
}

/// There is no server to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NoneRuns {
    /// None of [`Role::Steer`].
    #[error("no rxsteer is running in this network namespace: start it with `rxsteer run DEVICE`")]
    Steers,
    /// None of [`Role::Poll`].
    #[error("no rxsteer lets sockets poll in this network namespace")]
    Polls,
}

/// As [`ask`]; `None` if none runs.
///
/// # Errors
/// When it does not answer in time, the request failed there, or another user answers.
pub fn ask_if_there<T: DeserializeOwned>(request: &Request) -> Result<Option<T>> {
    let Some(stream) = connect(&path(request.to().name())?)? else {
        return Ok(None);
    };
    let (timeout, then) = match request {
        Request::Set(_) | Request::Reload => (
            CHANGE_TIMEOUT,
            "it may still make the change: look at its log",
        ),
        _ => (REPLY_TIMEOUT, "ask again"),
    };
    let reply = line::write(&stream, request, REQUEST_TIMEOUT)
        .or_else(|e| if hung_up(&e) { Ok(()) } else { Err(e) })
        .and_then(|()| line::read(&stream, REPLY_MAX, timeout))
        .with_context(|| {
            format!("the running rxsteer did not answer: the CPUs may be overloaded; {then}")
        })?;
    let reply: Result<Value, String> = serde_json::from_slice(&reply)
        .context("no answer: ask with the version that is running")?;
    let answer = reply.map_err(|message| anyhow::Error::msg(line::printable_message(&message)))?;
    let answer = serde_json::from_value(line::printable(answer))
        .context("an answer of another version: ask with the version that is running")?;
    Ok(Some(answer))
}

/// Whether the server has closed the stream: it may have refused before it had read the request.
fn hung_up(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}
