// SPDX-License-Identifier: MIT OR Apache-2.0
//! The server's end of the control socket. Threads read requests and write replies, so that no
//! client holds up the thread that answers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::control::{Reply, Request, Role};
use super::line;
use super::socket::{Bound, path, peer_is_believed};
use crate::host::wait::readable;

/// Time for a client to send its request, and to read its reply.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Limit of a request, bytes: more than one with [`NAMES_MAX`](super::explain::NAMES_MAX) flows and
/// ports has.
const REQUEST_MAX: usize = 1 << 20;

/// Time for a client that is refused to read why. It holds a thread meanwhile.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(1);

/// Time until the next attempt when no client could be accepted. Without free descriptors or memory
/// the client stays in the queue, and the listener stays readable.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Clients that are served at once, and clients that are refused at once with time to read why.
const CLIENTS_MAX: usize = 32;

/// The error of requests that no thread answers any more.
const ENDED: &str = "the server has ended";

/// A request, and where its reply goes.
pub struct Asked {
    /// What is asked.
    pub request: Request,
    answer: Answer,
}

impl Asked {
    /// Sends the reply.
    pub fn answer(self, outcome: Result<Reply>) {
        (self.answer)(outcome.map_err(|e| format!("{e:#}")));
    }
}

/// Takes the answer to a request, on the thread that answers: it must not wait.
type Answer = Box<dyn FnOnce(Result<Reply, String>) + Send>;

/// Puts requests to the thread that answers, from other threads of this process.
#[derive(Clone)]
pub struct Asker {
    to: Sender<Asked>,
    waiting: Arc<EventFd>,
}

impl Asker {
    /// Puts a request. `answer` is called on the thread that answers, and must not wait.
    ///
    /// # Errors
    /// When the server has ended.
    pub fn ask(
        &self,
        request: Request,
        answer: impl FnOnce(Result<Reply, String>) + Send + 'static,
    ) -> Result<()> {
        let answer = Box::new(answer);
        self.to
            .send(Asked { request, answer })
            .ok()
            .context(ENDED)?;
        self.waiting.write(1)?;
        Ok(())
    }
}

/// The control socket of this network namespace. It is readable when a request waits.
pub struct Server {
    asked: Receiver<Asked>,
    /// Its `waiting` is the number of requests in `asked`.
    asker: Asker,
    accepting: Option<(OwnedFd, JoinHandle<()>)>,
    _bound: Bound,
}

impl Server {
    /// Binds the socket.
    ///
    /// # Errors
    /// When another rxsteer has this role, or its file can't be made.
    pub fn new(role: Role) -> Result<Self> {
        let Some(bound) = Bound::new(path(role.name())?)? else {
            bail!(role.conflict());
        };
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_SEMAPHORE;
        let waiting = Arc::new(EventFd::from_flags(flags)?);
        let (to, asked) = mpsc::channel();
        let (stopped, stop) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let asker = Asker { to, waiting };
        let clients = Clients {
            asker: asker.clone(),
            served: Arc::default(),
            refused: Arc::default(),
        };
        let listener = bound.listener().try_clone()?;
        let thread = thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || clients.accept(&listener, &stopped))?;
        Ok(Self {
            asked,
            asker,
            accepting: Some((stop, thread)),
            _bound: bound,
        })
    }

    /// For requests of this process.
    pub fn asker(&self) -> Asker {
        self.asker.clone()
    }

    /// A waiting request, if any.
    pub fn take(&self) -> Option<Asked> {
        self.asker.waiting.read().ok()?;
        self.asked.try_recv().ok()
    }
}

impl AsFd for Server {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.asker.waiting.as_fd()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.accepting.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

/// The clients of a socket.
struct Clients {
    asker: Asker,
    /// Its copies are the clients that are served, and one.
    served: Arc<()>,
    /// Its copies are the clients that are refused, and one.
    refused: Arc<()>,
}

impl Clients {
    /// Starts a thread for each client, until `stop` is closed.
    fn accept(&self, listener: &UnixListener, stop: &OwnedFd) {
        while let Ok(ready) = readable(&[stop.as_fd(), listener.as_fd()], None) {
            if ready[0] {
                return;
            }
            if !ready[1] {
                continue;
            }
            let admitted = match listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(e) => readable(&[stop.as_fd()], Some(ACCEPT_PAUSE))
                    .and(Err(e).context("a client could not be accepted")),
            };
            if let Err(e) = admitted {
                tracing::debug!("control: {e:#}");
            }
        }
    }

    fn admit(&self, stream: UnixStream) -> Result<()> {
        let why = if !peer_is_believed(&stream)? {
            "only root and the user of this rxsteer may ask: use sudo"
        } else if Arc::strong_count(&self.served) > CLIENTS_MAX {
            "too many ask at once: ask again"
        } else {
            let asker = self.asker.clone();
            return client(&self.served, move || attend(&stream, &asker));
        };
        refuse(&stream, why)?;
        if Arc::strong_count(&self.refused) > CLIENTS_MAX {
            return Ok(());
        }
        client(&self.refused, move || {
            line::finish(&stream, REFUSED_TIMEOUT)
        })
    }
}

/// Starts a thread for a client, which has a copy of `counted`.
fn client(counted: &Arc<()>, attend: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let counted = counted.clone();
    thread::Builder::new()
        .name("client".to_owned())
        .spawn(move || {
            if let Err(e) = attend() {
                tracing::debug!("control: {e:#}");
            }
            drop(counted);
        })
        .context("a thread for a client")?;
    Ok(())
}

fn refuse(stream: &UnixStream, why: &str) -> Result<()> {
    let reply: Result<Reply, &str> = Err(why);
    line::write(stream, &reply, CLIENT_TIMEOUT)
}

fn attend(stream: &UnixStream, asker: &Asker) -> Result<()> {
    let request = match line::read(stream, REQUEST_MAX, CLIENT_TIMEOUT) {
        Ok(request) => request,
        Err(e) => {
            refuse(stream, &format!("the request was not taken: {e:#}"))?;
            return line::finish(stream, REFUSED_TIMEOUT);
        }
    };
    let reply = match serde_json::from_slice(&request) {
        Ok(request) => ask(asker, request)?,
        Err(e) => Err(format!("not a request of this version: {e}")),
    };
    drop(request);
    line::write(stream, &reply, CLIENT_TIMEOUT)
}

fn ask(asker: &Asker, request: Request) -> Result<Result<Reply, String>> {
    let (answer, reply) = sync_channel(1);
    asker.ask(request, move |answered| {
        // The client may be gone.
        let _ = answer.send(answered);
    })?;
    reply.recv().context(ENDED)
}
