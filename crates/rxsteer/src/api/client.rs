// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queries and changes of a running rxsteer.

use anyhow::{Result, bail};

use super::control::{Reply, Request, ask, ask_if_there};
use super::explain::{Explanations, Question};
use super::flows::{Flows, Query};
use super::set::Change;
use super::{busy_poll, status};

/// The expected part of a reply.
fn expect<T>(reply: Reply, part: impl FnOnce(Reply) -> Option<T>) -> Result<T> {
    match reply {
        Reply::Failed(why) => bail!(why),
        reply => match part(reply) {
            Some(part) => Ok(part),
            None => bail!("the running rxsteer is of another version"),
        },
    }
}

/// Returns the counters of a running rxsteer.
///
/// # Errors
/// When none runs in this network namespace.
pub fn status() -> Result<status::Status> {
    expect(ask(&Request::Status)?, |reply| match reply {
        Reply::Status(status) => Some(status),
        _ => None,
    })
}

/// Changes a running rxsteer without reordering packets. Returns the new settings, one per line.
///
/// # Errors
/// When none runs, or the change is not possible; nothing has changed then.
pub fn set(change: Change) -> Result<Vec<String>> {
    expect(ask(&Request::Set(change))?, |reply| match reply {
        Reply::Done(lines) => Some(lines),
        _ => None,
    })
}

/// Returns the flows of a running rxsteer.
///
/// # Errors
/// When none runs, or it does not steer the requested device.
pub fn flows(query: Query) -> Result<Flows> {
    expect(ask(&Request::Flows(query))?, |reply| match reply {
        Reply::Flows(flows) => Some(flows),
        _ => None,
    })
}

/// Returns what a running rxsteer knows about flows.
///
/// # Errors
/// When none runs.
pub fn explain(question: Question) -> Result<Explanations> {
    expect(ask(&Request::Explain(question))?, |reply| match reply {
        Reply::Explained(explanations) => Some(explanations),
        _ => None,
    })
}

/// Returns the busy-poll counters; `None` if no rxsteer lets sockets poll in this namespace.
///
/// # Errors
/// When it does not answer.
pub fn busy_poll() -> Result<Option<busy_poll::Status>> {
    let Some(reply) = ask_if_there(&Request::BusyPoll)? else {
        return Ok(None);
    };
    let status = expect(reply, |reply| match reply {
        Reply::BusyPoll(status) => Some(status),
        _ => None,
    })?;
    Ok(Some(status))
}
