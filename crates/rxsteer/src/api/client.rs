// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a running rxsteer is asked.

use anyhow::{Result, bail};

use super::control::{Reply, Request, ask, ask_if_there};
use super::explain::{Explanations, Question};
use super::flows::{Flows, Query};
use super::set::Change;
use super::{busy_poll, status};

/// The part of a reply that was asked for.
fn expect<T>(reply: Reply, part: impl FnOnce(Reply) -> Option<T>) -> Result<T> {
    match reply {
        Reply::Failed(why) => bail!(why),
        reply => match part(reply) {
            Some(part) => Ok(part),
            None => bail!("the running rxsteer is of another version"),
        },
    }
}

/// What a running rxsteer does, and how much of it.
///
/// # Errors
/// When none runs in this network namespace.
pub fn status() -> Result<status::Status> {
    expect(ask(&Request::Status)?, |reply| match reply {
        Reply::Status(status) => Some(status),
        _ => None,
    })
}

/// Changes what a running rxsteer does, from now on and without a packet overtaking another.
/// Returns what holds now, a line each.
///
/// # Errors
/// When none runs, or what is asked for is not possible; then nothing has changed.
pub fn set(change: Change) -> Result<Vec<String>> {
    expect(ask(&Request::Set(change))?, |reply| match reply {
        Reply::Done(lines) => Some(lines),
        _ => None,
    })
}

/// The flows of a running rxsteer.
///
/// # Errors
/// When none runs, or it does not steer the device that is asked for.
pub fn flows(query: Query) -> Result<Flows> {
    expect(ask(&Request::Flows(query))?, |reply| match reply {
        Reply::Flows(flows) => Some(flows),
        _ => None,
    })
}

/// All that a running rxsteer knows of flows.
///
/// # Errors
/// When none runs.
pub fn explain(question: Question) -> Result<Explanations> {
    expect(ask(&Request::Explain(question))?, |reply| match reply {
        Reply::Explained(explanations) => Some(explanations),
        _ => None,
    })
}

/// What the rxsteer finds that lets sockets poll in this network namespace; `None` if there is none.
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
