// SPDX-License-Identifier: MIT OR Apache-2.0
//! The HTTP server of the metrics: one thread with few connections. Each ends in time, also if
//! its client reads or sends nothing, and gives way to a new one while it waits for its client.
//! Steering is asked for its counters at most four times a second.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex as Lock, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::encoding::prometheus_text::CONTENT_TYPE as TEXT;
use tokio::net::TcpStream;
use tokio::sync::{Mutex, Notify, oneshot};
use tokio::task::{AbortHandle, JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use super::exposition;
use crate::api::control;
use crate::api::server::Asker;
use crate::api::status::Status;

/// Path of the metrics.
const PATH: &str = "/metrics";

/// Connections at once. Prometheus needs one; a new one has the place of the one that has waited
/// longest for its client. The more there are, the longer has a client that others push aside.
const CONNECTIONS_MAX: usize = 32;

/// Time for a client to send the head of its request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(1);

/// Time for a connection, from its acceptance to the last byte of the answer. As Prometheus'
/// default for `scrape_timeout`.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for the answer of steering, which may be starting anew.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);

/// Age up to which an answer is given again.
const FRESH: Duration = Duration::from_millis(250);

/// Limit of a request's head, bytes: the least that hyper accepts.
const HEAD_MAX: usize = 8192;

/// Time until the next attempt when no client could be accepted, for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening server. It ends on drop.
pub struct Server {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at the address, and answers in a thread.
    ///
    /// # Errors
    /// When the address is not one of this network namespace, or in use.
    pub fn new(address: SocketAddr, asker: Asker) -> Result<Self> {
        let listener = TcpListener::bind(address)
            .with_context(|| format!("metrics: cannot listen at {address}"))?;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (stop, stopped) = oneshot::channel::<()>();
        let metrics = Arc::new(Metrics {
            asker,
            last: Mutex::new(None),
        });
        let thread = thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    // Ends with the runtime, as do the connections.
                    tokio::spawn(accept(listener, metrics));
                    let _ = stopped.await;
                });
            })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The metrics as text.
struct Metrics {
    asker: Asker,
    /// The last text, and when it was made. Clients that ask at once wait for one answer.
    last: Mutex<Option<(Instant, String)>>,
}

/// Connections that wait for their clients, those that have waited longest first.
#[derive(Default)]
struct Idle {
    connections: Lock<VecDeque<(u64, AbortHandle)>>,
    /// One more waits, or one has ended.
    changed: Notify,
}

impl Idle {
    fn locked(&self) -> MutexGuard<'_, VecDeque<(u64, AbortHandle)>> {
        let locked = self.connections.lock();
        locked.unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, number: u64, connection: AbortHandle) {
        self.locked().push_back((number, connection));
        self.changed.notify_one();
    }

    fn remove(&self, number: u64) -> Option<AbortHandle> {
        let mut connections = self.locked();
        let at = connections.iter().position(|(n, _)| *n == number)?;
        connections.remove(at).map(|(_, connection)| connection)
    }

    fn remove_oldest(&self) -> Option<AbortHandle> {
        let (_, connection) = self.locked().pop_front()?;
        Some(connection)
    }
}

async fn accept(listener: TcpListener, metrics: Arc<Metrics>) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(e) => return tracing::error!("metrics: {e}"),
    };
    let idle = Arc::new(Idle::default());
    let mut connections = JoinSet::new();
    for number in 0.. {
        let stream = loop {
            match listener.accept().await {
                Ok((stream, _)) => break stream,
                Err(e) => {
                    debug!("metrics: {e}");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        };
        while connections.try_join_next().is_some() {}
        while connections.len() >= CONNECTIONS_MAX {
            if let Some(oldest) = idle.remove_oldest() {
                oldest.abort();
                connections.join_next().await;
            } else {
                // All wait for steering.
                idle.changed.notified().await;
                while connections.try_join_next().is_some() {}
            }
        }
        let connection = attend(number, stream, metrics.clone(), idle.clone());
        idle.add(number, connections.spawn(connection));
        // What its client has sent by now is read before the next one is accepted.
        yield_now().await;
    }
}

/// Serves one request of a client.
async fn attend(number: u64, stream: TcpStream, metrics: Arc<Metrics>, idle: Arc<Idle>) {
    let service = service_fn(async |request| {
        let connection = idle.remove(number);
        let answer = answer(request, &metrics).await;
        if let Some(connection) = connection {
            idle.add(number, connection);
        }
        answer
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_MAX)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => debug!("metrics: {e}"),
        Err(_) => debug!("metrics: a client was not served within {CONNECTION_TIMEOUT:?}"),
    }
    idle.remove(number);
    idle.changed.notify_one();
}

async fn answer(
    request: Request<Incoming>,
    metrics: &Metrics,
) -> Result<Response<String>, Infallible> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, PATH) => match metrics.text().await {
            Ok(text) => (StatusCode::OK, text),
            Err(e) => (StatusCode::SERVICE_UNAVAILABLE, format!("{e:#}\n")),
        },
        (_, PATH) => (StatusCode::METHOD_NOT_ALLOWED, "GET alone\n".to_owned()),
        _ => (StatusCode::NOT_FOUND, format!("metrics are at {PATH}\n")),
    };
    let mut response = Response::new(text);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(TEXT));
    headers.insert(ALLOW, HeaderValue::from_static("GET"));
    Ok(response)
}

impl Metrics {
    async fn text(&self) -> Result<String> {
        let mut last = self.last.lock().await;
        if let Some((made, text)) = &*last
            && made.elapsed() < FRESH
        {
            return Ok(text.clone());
        }
        let (answer, answered) = oneshot::channel();
        self.asker.ask(control::Request::Counters, |reply| {
            // The client may be gone.
            let _ = answer.send(reply);
        })?;
        let reply = timeout(ANSWER_TIMEOUT, answered)
            .await
            .context("rxsteer is busy: it may be starting anew")?
            .context("rxsteer is ending")?;
        let reply = reply.map_err(anyhow::Error::msg)?;
        let status: Status = serde_json::from_str(reply.get())?;
        let text = exposition::text(status)?;
        *last = Some((Instant::now(), text.clone()));
        Ok(text)
    }
}
