// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests and responses, with one request under way per connection.

use std::io::{ErrorKind, Read};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::epoll::EpollFlags;
use socket2::Socket;

use super::load::Transport;
use super::tally::{CHECK_INTERVAL, Ready, Shared, Tally};

/// A datagram without a response for this time is lost and sent again.
const RETRANSMIT_TIMEOUT: Duration = Duration::from_secs(1);

/// A TCP connection that was closed.
const ENDED: &str = "the server has ended a connection";

/// Closed loops of one thread.
pub(super) struct Rr<'a> {
    pub(super) shared: &'a Shared,
    pub(super) transport: Transport,
    pub(super) request: Vec<u8>,
    pub(super) response: Vec<u8>,
    pub(super) tally: Tally,
}

/// State of one connection.
pub(super) struct Connection<'a> {
    pub(super) socket: &'a Socket,
    /// Number of the request, sent in its first bytes.
    pub(super) sequence: u64,
    /// Time of the request's first transmission.
    pub(super) began: Instant,
    /// Time of its last transmission.
    pub(super) sent: Instant,
    /// Bytes of the request still to be written to the socket.
    pub(super) unsent: usize,
    /// Bytes of the response still to be received.
    pub(super) missing: usize,
}

impl Rr<'_> {
    pub(super) fn drive(mut self, sockets: &[&Socket]) -> Result<Tally> {
        let mut flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        if self.transport == Transport::Tcp {
            // For UDP, EPOLLOUT would report each datagram sent.
            flags |= EpollFlags::EPOLLOUT;
        }
        let mut ready = Ready::new(sockets, flags)?;
        let mut now = Instant::now();
        let mut connections: Vec<Connection> = sockets
            .iter()
            .map(|socket| Connection {
                socket,
                sequence: 0,
                began: now,
                sent: now,
                unsent: 0,
                missing: 0,
            })
            .collect();
        for connection in &mut connections {
            self.ask(connection, Instant::now())?;
        }
        while !self.shared.is_over() {
            for n in ready.wait()? {
                self.go_on(&mut connections[n])?;
            }
            if self.transport == Transport::Udp && now.elapsed() > CHECK_INTERVAL {
                now = Instant::now();
                for connection in &mut connections {
                    if now.saturating_duration_since(connection.sent) > RETRANSMIT_TIMEOUT {
                        self.tally.lost += u64::from(self.shared.is_counted());
                        self.send_new(connection, now)?;
                    }
                }
            }
        }
        Ok(self.tally)
    }

    pub(super) fn ask(&mut self, connection: &mut Connection, now: Instant) -> Result<()> {
        connection.began = now;
        self.send_new(connection, now)
    }

    /// Uses a new number, since the last request may still be answered.
    pub(super) fn send_new(&mut self, connection: &mut Connection, now: Instant) -> Result<()> {
        connection.sequence += 1;
        connection.sent = now;
        connection.unsent = self.request.len();
        connection.missing = self.response.len();
        self.send(connection)
    }

    /// Writes what the socket accepts; the rest follows when it becomes writable.
    pub(super) fn send(&mut self, connection: &mut Connection) -> Result<()> {
        let name = connection.sequence.to_le_bytes();
        let len = name.len().min(self.request.len());
        self.request[..len].copy_from_slice(&name[..len]);
        while connection.unsent > 0 {
            let rest = &self.request[self.request.len() - connection.unsent..];
            match connection.socket.send(rest) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                bytes => connection.unsent -= bytes.context("a request could not be sent")?,
            }
        }
        Ok(())
    }

    /// Writes and reads without blocking. Edge-triggered: later data causes a new event.
    pub(super) fn go_on(&mut self, connection: &mut Connection) -> Result<()> {
        if connection.unsent > 0 {
            return self.send(connection);
        }
        loop {
            let mut socket = connection.socket;
            match socket.read(&mut self.response[..connection.missing]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // An orderly close, or a close with unread requests.
                Ok(0) if self.transport == Transport::Tcp => bail!("{ENDED}"),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => bail!("{ENDED}"),
                bytes => {
                    let bytes = bytes.context("no response: is the server there?")?;
                    if self.is_complete(connection, bytes) {
                        break;
                    }
                }
            }
        }
        let now = Instant::now();
        if self.shared.is_counted() {
            self.tally.count(now - connection.began);
        }
        match self.shared.is_over() {
            true => Ok(()),
            false => self.ask(connection, now),
        }
    }

    /// Whether the response is complete, after `bytes` were read.
    pub(super) fn is_complete(&self, connection: &mut Connection, bytes: usize) -> bool {
        match self.transport {
            Transport::Tcp => {
                connection.missing -= bytes;
                connection.missing == 0
            }
            Transport::Udp => {
                let name = connection.sequence.to_le_bytes();
                let len = name.len().min(self.request.len()).min(bytes);
                bytes == self.response.len() && self.response[..len] == name[..len]
            }
        }
    }
}
