// SPDX-License-Identifier: MIT OR Apache-2.0
//! Load of a peer host on a server: sockets with one request under way on each, or bulk streams.

use std::fmt;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::bench::peer::latency::Latency;

/// Limit on the connections; more may exceed the source ports.
pub const CONNECTIONS_MAX: u32 = 10_000;

/// Limit on the duration including warm-up, s.
pub const SECONDS_MAX: f64 = 600.0;

/// Limit on the bytes of a request or response, below the size of a fragmented datagram.
pub const SIZE_MAX: usize = 1400;

/// Specification of a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// What the connections carry.
    pub kind: Kind,
    /// 1 to [`CONNECTIONS_MAX`].
    pub connections: u32,
    /// Port of the server.
    pub port: u16,
    /// Time under load before counting starts, s.
    pub warm_up: f64,
    /// Time of counting, s.
    pub seconds: f64,
}

/// Traffic on the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Requests, each after the response to the one before, with 1 to [`SIZE_MAX`] bytes in each
    /// direction. A response begins with the first bytes of its request, up to 8, so that late
    /// datagrams can be told from the expected one.
    Rr {
        transport: Transport,
        /// Bytes.
        request: usize,
        /// Bytes.
        response: usize,
    },
    /// Bulk data to the server.
    Stream {
        /// Limit on the rate of each connection, bytes per second.
        pace: Option<u32>,
    },
}

/// Transport of requests.
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

    /// Checks the limits.
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

/// Results of a [`Load`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Loaded {
    /// Time of counting.
    pub seconds: f64,
    /// Number of responses.
    pub transactions: u64,
    /// Time from request to response; None without a response. Lost requests count from their first
    /// transmission, and times above a minute as a minute.
    pub latency: Option<Latency>,
    /// UDP requests without a response within a second, which were sent again.
    pub lost: u64,
    /// Bytes of streams acknowledged by the server's host.
    pub bytes: u64,
    /// Busy share of all CPUs of the peer, 0 to 1.
    pub busy_share: f64,
    /// Busy share of its busiest CPU: near 1, the peer may have been the limit.
    pub busiest_share: f64,
}
