// SPDX-License-Identifier: MIT OR Apache-2.0
//! How other commands talk to a running rxsteer: one JSON line each way over a Unix socket.
//!
//! The socket's address is abstract, so that nothing is left when the process ends, and belongs to
//! the network namespace, as the devices do: one rxsteer each.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde::{Deserialize, Serialize};

use crate::api::busy_poll;
use crate::api::explain::{Explanations, Question};
use crate::api::flows::{Flows, Query};
use crate::api::set::Change;
use crate::api::status::Status;

/// Who can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `rxsteer run`.
    Steer,
    /// Whoever lets sockets poll.
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

    /// Why there can't be two of them.
    fn taken(self) -> String {
        let request = match self {
            Self::Steer => Request::Status,
            Self::Poll => Request::BusyPoll,
        };
        let pid = match ask(&request) {
            Ok(Reply::Status(s)) => format!(" (process {})", s.pid),
            Ok(Reply::BusyPoll(s)) => format!(" (process {})", s.pid),
            _ => String::new(),
        };
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

/// How long either side waits for the other's line.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a change may take: every flow may have to come home first.
const CHANGE_PATIENCE: Duration = Duration::from_secs(10);

/// The longest request, bytes: a process may have many sockets.
const REQUEST_MAX: u64 = 16 << 20;

/// What can be asked of a running rxsteer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// What does it do, and how much of it?
    Status,
    /// Do something else from now on.
    Set(Change),
    /// Which flows are there?
    Flows(Query),
    /// Why are these flows where they are?
    Explain(Question),
    /// Whose sockets poll, and what comes of it?
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

/// What comes back.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Set`]: what holds from now on, a line each.
    Done(Vec<String>),
    /// To [`Request::Flows`].
    Flows(Flows),
    /// To [`Request::Explain`].
    Explained(Explanations),
    /// To [`Request::BusyPoll`].
    BusyPoll(busy_poll::Status),
    /// It could not be done, and why.
    Failed(String),
}

/// Takes the socket of this network namespace.
///
/// # Errors
/// When another rxsteer has it.
pub fn listen(role: Role) -> Result<UnixListener> {
    let listener = match UnixListener::bind_addr(&role.address()?) {
        Err(e) if e.kind() == ErrorKind::AddrInUse => bail!(role.taken()),
        other => other.context("no control socket")?,
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Asks the rxsteer that runs in this network namespace.
///
/// # Errors
/// When none runs, or it doesn't answer.
pub fn ask(request: &Request) -> Result<Reply> {
    ask_if_there(request)?.context(match request.to() {
        Role::Steer => {
            "no rxsteer is running in this network namespace: start it with `rxsteer run DEVICE`"
        }
        Role::Poll => "no rxsteer lets sockets poll in this network namespace",
    })
}

/// The same; `None` if none runs.
///
/// # Errors
/// When it doesn't answer.
pub fn ask_if_there(request: &Request) -> Result<Option<Reply>> {
    let mut stream = match UnixStream::connect_addr(&request.to().address()?) {
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => return Ok(None),
        stream => stream.context("the control socket")?,
    };
    let patience = match request {
        Request::Set(_) => CHANGE_PATIENCE,
        _ => PATIENCE,
    };
    stream.set_read_timeout(Some(patience))?;
    stream.write_all(&line(request)?)?;
    let mut answer = String::new();
    BufReader::new(stream)
        .read_line(&mut answer)
        .with_context(|| {
            format!("the running rxsteer did not answer within {patience:?}: ask again")
        })?;
    let reply = serde_json::from_str(&answer);
    Ok(Some(reply.context(
        "no answer: ask as root, with the version that is running",
    )?))
}

/// Answers one who is waiting, if there is one. Only root, and who runs this rxsteer, is answered:
/// from others nothing is read.
pub fn serve(listener: &UnixListener, answer: impl FnOnce(Request) -> Reply) {
    if let Ok((stream, _)) = listener.accept()
        && let Err(e) = serve_one(&stream, answer)
    {
        tracing::debug!("control: {e:#}");
    }
}

fn serve_one(mut stream: &UnixStream, answer: impl FnOnce(Request) -> Reply) -> Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let uid = getsockopt(&stream, PeerCredentials)?.uid();
    let reply = if uid != 0 && uid != nix::unistd::geteuid().as_raw() {
        Reply::Failed("only root, and who runs this rxsteer, may ask: use sudo".to_owned())
    } else {
        let mut request = String::new();
        BufReader::new(stream.take(REQUEST_MAX)).read_line(&mut request)?;
        match serde_json::from_str(&request) {
            Ok(request) => answer(request),
            Err(e) => Reply::Failed(format!("not a request of this version: {e}")),
        }
    };
    Ok(stream.write_all(&line(&reply)?)?)
}

fn line(what: &impl Serialize) -> Result<Vec<u8>> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    Ok(line)
}
