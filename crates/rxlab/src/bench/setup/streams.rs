// SPDX-License-Identifier: MIT OR Apache-2.0
//! TCP connections in bulk through the steered device, with a thread at each end.

use anyhow::Result;

use crate::bench::setup::testbed::Testbed;
use crate::lab::nic::Nic;
use crate::lab::sockets;
use crate::lab::stream::{self, Consumer, Worker};
use crate::lab::xdp::Xdp;

/// Bytes that the consumers have read, and their periods of work.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    pub bytes: u64,
    pub worked: u64,
}

impl Taken {
    /// By these consumers so far.
    pub fn by(consumers: &[Worker]) -> Self {
        let sum = |of: fn(&Worker) -> u64| consumers.iter().map(of).sum();
        Self {
            bytes: sum(Worker::read),
            worked: sum(Worker::worked),
        }
    }

    pub fn since(self, then: Self) -> Self {
        Self {
            bytes: self.bytes - then.bytes,
            worked: self.worked - then.worked,
        }
    }
}

/// See the module's documentation.
pub struct Streams {
    consumers: Vec<Worker>,
    senders: Vec<Worker>,
    _thread: Nic,
    _polled: Xdp,
}

impl Streams {
    /// Starts `connections`: senders on the CPUs `from`, consumers on those that do not poll the
    /// queue, both in turn. `pace`: limit of each sender, bytes per second.
    ///
    /// # Errors
    /// When the lab failed.
    pub(in crate::bench) fn start(
        testbed: &Testbed,
        connections: u32,
        consumer: Consumer,
        pace: Option<u32>,
        from: &[u32],
    ) -> Result<Self> {
        let link = &testbed.link;
        // Acknowledgements are processed by the sender's NAPI, on its CPU.
        let polled = Xdp::pass(&link.tester)?;
        let mut streams = Self {
            consumers: Vec::new(),
            senders: Vec::new(),
            _thread: testbed.far_end(from)?,
            _polled: polled,
        };
        let mut receiving = testbed.masks().others.iter().cycle();
        for &cpu in from.iter().cycle().take(connections as usize) {
            let (to, from) = stream::connect(link)?;
            if let Some(pace) = pace {
                sockets::pace(&to, pace)?;
            }
            let consumer = Worker::consume(&link.dut.netns, receiving.next(), from, consumer)?;
            streams.consumers.push(consumer);
            let sender = Worker::produce(&link.tester.netns, cpu, to)?;
            streams.senders.push(sender);
        }
        Ok(streams)
    }

    /// By all consumers so far.
    pub fn taken(&self) -> Taken {
        Taken::by(&self.consumers)
    }

    /// Stops the threads and closes the connections.
    ///
    /// # Errors
    /// When a thread could not read or write.
    pub fn stop(self) -> Result<()> {
        // Senders first: writing to a closed connection fails.
        self.senders.into_iter().try_for_each(Worker::stop)?;
        self.consumers.into_iter().try_for_each(Worker::stop)
    }
}
