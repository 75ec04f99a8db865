// SPDX-License-Identifier: MIT OR Apache-2.0
//! The HTTP server of the metrics: one thread with few connections. Each ends in time, also if
//! its client reads or sends nothing. Steering is asked for its counters at most four times a second.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::encoding::prometheus_text::CONTENT_TYPE as TEXT;
use tokio::net::TcpStream;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use super::exposition;
use crate::api::control;
use crate::api::server::Asker;
use crate::api::status::Status;

/// Path of the metrics.
const PATH: &str = "/metrics";

/// Connections at once. Prometheus needs one; those beyond wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 8;

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

async fn accept(listener: TcpListener, metrics: Arc<Metrics>) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(e) => return tracing::error!("metrics: {e}"),
    };
    let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    while let Ok(permit) = free.clone().acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(attend(stream, metrics.clone(), permit));
            }
            Err(e) => {
                debug!("metrics: {e}");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves one request of a client.
async fn attend(stream: TcpStream, metrics: Arc<Metrics>, _permit: OwnedSemaphorePermit) {
    let service = service_fn(|request| answer(request, &metrics));
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_MAX)
        // The whole connection has a timeout.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => debug!("metrics: {e}"),
        Err(_) => debug!("metrics: a client was not served within {CONNECTION_TIMEOUT:?}"),
    }
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
