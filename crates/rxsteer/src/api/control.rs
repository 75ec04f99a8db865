// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control socket: one JSON line for a request and one for the reply.
//!
//! The socket's address is abstract: it vanishes with the process, and belongs to the network
//! namespace as the devices do. One rxsteer of each [`Role`] can run per namespace.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use super::explain::Question;
use super::flows::Query;
use super::set::Change;
use super::{busy_poll, status};

/// The two kinds of server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `rxsteer run`.
    Steer,
    /// `rxsteer poll`, or `rxsteer run` with busy-poll rules.
    Poll,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Steer => "rxsteer",
            Self::Poll => "rxsteer-poll",
        }
    }

    fn address(self) -> Result<SocketAddr> {
        Ok(SocketAddr::from_abstract_name(self.name())?)
    }

    /// The error when another process has this role.
    fn conflict(self) -> String {
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

/// Timeout of the server for a request: it serves nothing else meanwhile.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout of a client for a reply. An overloaded host may not run the server for seconds.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// The same for a change: every flow may have to return to INLINE first.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

/// Limit of a request, bytes. Requests that name many sockets are long.
const REQUEST_MAX: u64 = 16 << 20;

/// Requests to a running rxsteer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Counters of queues and backlogs.
    Status,
    /// Changes settings.
    Set(Change),
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

/// Binds the control socket of this network namespace.
///
/// # Errors
/// When another rxsteer has this role.
pub fn listen(role: Role) -> Result<UnixListener> {
    let listener = match UnixListener::bind_addr(&role.address()?) {
        Err(e) if e.kind() == ErrorKind::AddrInUse => bail!(role.conflict()),
        other => other.context("no control socket")?,
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Sends a request to the rxsteer in this network namespace.
///
/// # Errors
/// When none runs, it does not answer in time, or the request failed there.
pub fn ask<T: DeserializeOwned>(request: &Request) -> Result<T> {
    ask_if_there(request)?.context(match request.to() {
        Role::Steer => {
            "no rxsteer is running in this network namespace: start it with `rxsteer run DEVICE`"
        }
        Role::Poll => "no rxsteer lets sockets poll in this network namespace",
    })
}

/// As [`ask`]; `None` if none runs.
///
/// # Errors
/// When it does not answer in time, or the request failed there.
pub fn ask_if_there<T: DeserializeOwned>(request: &Request) -> Result<Option<T>> {
    let mut stream = match UnixStream::connect_addr(&request.to().address()?) {
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => return Ok(None),
        stream => stream.context("the control socket")?,
    };
    let timeout = match request {
        Request::Set(_) => CHANGE_TIMEOUT,
        _ => REPLY_TIMEOUT,
    };
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(&line(request)?)?;
    let mut answer = String::new();
    BufReader::new(stream)
        .read_line(&mut answer)
        .with_context(|| {
            format!(
                "the running rxsteer did not answer within {timeout:?}: the CPUs may be \
                 overloaded; ask again"
            )
        })?;
    let reply: Result<T, String> = serde_json::from_str(&answer)
        .context("no answer: ask as root, with the version that is running")?;
    reply.map(Some).map_err(anyhow::Error::msg)
}

/// Answers one waiting client, if any. Only root and the user of this process are served.
pub fn serve(listener: &UnixListener, answer: impl FnOnce(Request) -> Result<Reply>) {
    if let Ok((stream, _)) = listener.accept()
        && let Err(e) = serve_one(&stream, answer)
    {
        tracing::debug!("control: {e:#}");
    }
}

fn serve_one(mut stream: &UnixStream, answer: impl FnOnce(Request) -> Result<Reply>) -> Result<()> {
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let uid = getsockopt(&stream, PeerCredentials)?.uid();
    let reply = if uid != 0 && uid != nix::unistd::geteuid().as_raw() {
        Err("only root and the user of this rxsteer may ask: use sudo".to_owned())
    } else {
        let mut request = String::new();
        BufReader::new(stream.take(REQUEST_MAX)).read_line(&mut request)?;
        match serde_json::from_str(&request) {
            Ok(request) => answer(request).map_err(|e| format!("{e:#}")),
            Err(e) => Err(format!("not a request of this version: {e}")),
        }
    };
    Ok(stream.write_all(&line(&reply)?)?)
}

fn line(what: &impl Serialize) -> Result<Vec<u8>> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    Ok(line)
}
