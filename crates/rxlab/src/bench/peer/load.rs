// SPDX-License-Identifier: MIT OR Apache-2.0
//! The load that a peer host puts on a server: sockets of its own, one request under way on each, or
//! as much as goes through.

use std::fmt;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::bench::peer::latency::Latency;

/// Connections at most: source ports for more may be missing.
pub const CONNECTIONS_MAX: u32 = 10_000;

/// Seconds at most, warm-up included.
pub const SECONDS_MAX: f64 = 600.0;

/// A request's or a response's bytes at most: no datagram is in fragments.
pub const SIZE_MAX: usize = 1400;

/// What to do, and for how long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// What the connections carry.
    pub kind: Kind,
    /// How many: 1 to [`CONNECTIONS_MAX`].
    pub connections: u32,
    /// The server's.
    pub port: u16,
    /// Seconds of the same before anything is counted.
    pub warm_up: f64,
    /// Seconds that are counted.
    pub seconds: f64,
}

/// What connections carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A request, and when its response has come, the next one. Both have 1 to [`SIZE_MAX`] bytes; a
    /// response begins with the first bytes of its request, 8 if both have so many: that tells late
    /// datagrams from those that are waited for.
    Rr {
        /// Over what.
        transport: Transport,
        /// Bytes.
        request: usize,
        /// Bytes.
        response: usize,
    },
    /// As many bytes to the server as TCP takes.
    Stream {
        /// Or so many in a second at most, on each connection.
        pace: Option<u32>,
    },
}

/// What carries requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Transport {
    Tcp,
    Udp,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Rr { transport, .. } => write!(f, "requests over {transport:?}")?,
            Kind::Stream { .. } => write!(f, "streams")?,
        }
        let (connections, port, seconds) = (self.connections, self.port, self.seconds);
        write!(f, " to port {port}, {connections} connections, {seconds} s")
    }
}

impl Load {
    pub(super) fn transport(&self) -> Transport {
        match self.kind {
            Kind::Rr { transport, .. } => transport,
            Kind::Stream { .. } => Transport::Tcp,
        }
    }

    /// What nobody may ask for.
    pub(super) fn check(&self) -> Result<()> {
        ensure!(
            (1..=CONNECTIONS_MAX).contains(&self.connections),
            "{} connections: choose 1 to {CONNECTIONS_MAX}",
            self.connections
        );
        let seconds = self.warm_up + self.seconds;
        ensure!(
            self.warm_up >= 0.0 && self.seconds > 0.0 && seconds <= SECONDS_MAX,
            "{} s after {} s: choose more than 0 and {SECONDS_MAX} in all at most",
            self.seconds,
            self.warm_up
        );
        if let Kind::Rr {
            request, response, ..
        } = self.kind
        {
            let sizes = 1..=SIZE_MAX;
            ensure!(
                sizes.contains(&request) && sizes.contains(&response),
                "a request of {request} bytes, a response of {response}: choose 1 to {SIZE_MAX}"
            );
        }
        Ok(())
    }
}

/// What came of a [`Load`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Loaded {
    /// That were counted.
    pub seconds: f64,
    /// Responses.
    pub transactions: u64,
    /// From requests to their responses, if there was one. A request that was lost counts from its
    /// first try, and what is over a minute as a minute.
    pub latency: Option<Latency>,
    /// Requests over UDP that had no response within a second, and were sent again.
    pub lost: u64,
    /// Bytes of streams that the server's host has acknowledged.
    pub bytes: u64,
    /// Of the time of all CPUs of the peer, what was not idle: 0 to 1.
    pub busy_share: f64,
    /// The same of the busiest one: near 1, the peer may have been what was measured.
    pub busiest_share: f64,
}
