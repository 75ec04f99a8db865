// SPDX-License-Identifier: MIT OR Apache-2.0
//! An application that records its packets in the order in which it reads them.

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use nix::sys::socket::{setsockopt, sockopt};
use rxlab::lab::frame::UdpFlows;
use rxlab::lab::netns::Netns;
use rxlab::lab::receiver::drops;
use rxlab::testing::app::{App, soon};

/// Receive buffer, bytes: room for all that a schedule sends while the application has no CPU.
const RCVBUF: usize = 64 << 20;

/// A packet, by flow and the generator's number of it.
pub type Stamp = (u32, u64);

/// Packets that come after a later one of their flow. Packets are numbered over all flows. Numbers
/// within a break are ignored, and packets before a break are not compared with those after it.
pub fn overtaken(arrivals: &[Stamp], breaks: &[Range<u64>]) -> u64 {
    let mut next: HashMap<(u32, usize), u64> = HashMap::new();
    let mut overtaken = 0;
    for &(flow, number) in arrivals {
        if breaks.iter().any(|range| range.contains(&number)) {
            continue;
        }
        let part = breaks.iter().filter(|range| range.end <= number).count();
        let next = next.entry((flow, part)).or_default();
        overtaken += u64::from(number < *next);
        *next = (number + 1).max(*next);
    }
    overtaken
}

/// The application: one unconnected socket, read by one thread, which can be moved.
pub struct Reader {
    app: App,
    socket: OwnedFd,
    arrivals: Arc<Mutex<Vec<Stamp>>>,
    dropped_before: u64,
}

impl Reader {
    pub fn start(netns: &Netns, flows: &UdpFlows) -> Result<Self> {
        let at = SocketAddr::new(flows.daddr, flows.dport);
        let socket = netns.run(|| soon(UdpSocket::bind(at)?))?;
        setsockopt(&socket, sockopt::RcvBufForce, &RCVBUF)?;
        let arrivals = Arc::new(Mutex::new(Vec::new()));
        let (read, record) = (socket.try_clone()?, arrivals.clone());
        let mut data = [0; 64];
        let app = App::start(
            netns,
            Box::new(move || {
                // With the sender's address, without which its flow can't be followed.
                let (len, _) = read.recv_from(&mut data)?;
                lock(&record).extend(stamp(&data[..len]));
                Ok(len)
            }),
        )?;
        Ok(Self {
            app,
            socket: socket.into(),
            arrivals,
            dropped_before: 0,
        })
    }

    pub fn move_to(&self, cpu: u32) -> Result<()> {
        self.app.move_to(cpu)
    }

    /// Packets read or dropped at the socket since the last [`Self::take`].
    pub fn arrived(&self) -> Result<u64> {
        let dropped = drops(&self.socket)? - self.dropped_before;
        Ok(lock(&self.arrivals).len() as u64 + dropped)
    }

    /// The packets read since the last call.
    pub fn take(&mut self) -> Result<Vec<Stamp>> {
        self.dropped_before = drops(&self.socket)?;
        Ok(std::mem::take(&mut *lock(&self.arrivals)))
    }
}

fn lock(arrivals: &Mutex<Vec<Stamp>>) -> MutexGuard<'_, Vec<Stamp>> {
    arrivals.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From `struct generator_stamp` (rxlab's lab.bpf.c).
fn stamp(payload: &[u8]) -> Result<Stamp> {
    let (number, rest) = payload.split_first_chunk().context("too short")?;
    let flow = rest.first_chunk().context("too short")?;
    Ok((u32::from_be_bytes(*flow), u64::from_be_bytes(*number)))
}

#[test]
fn breaks_separate_what_is_compared() {
    let first = [(1, 0), (2, 1), (1, 4)];
    let late = [(1, 0), (1, 4), (2, 5), (1, 2)];
    assert_eq!(overtaken(&first, &[]), 0);
    assert_eq!(overtaken(&late, &[]), 1);
    // One of the two packets is before the break, or within it.
    for range in [3..4, 2..3, 4..5] {
        assert_eq!(
            overtaken(&late, std::slice::from_ref(&range)),
            0,
            "{range:?}"
        );
    }
    // Both are before it, both are after it.
    for range in [5..6, 0..2] {
        assert_eq!(
            overtaken(&late, std::slice::from_ref(&range)),
            1,
            "{range:?}"
        );
    }
    // A packet that is late does not hide another one.
    assert_eq!(overtaken(&[(1, 9), (1, 2), (1, 5)], &[]), 2);
}
