// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests for backlogs that don't exist yet.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::rc::Rc;

use anyhow::Result;
use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};

use super::value::read;
use crate::types::backlog_request;

/// Requests for backlogs that flows want and that don't exist yet: readable ([`Self::fd`]) when
/// there are some.
pub struct Requests {
    ring: RingBuffer<'static>,
    pending: Rc<RefCell<Vec<backlog_request>>>,
}

impl Requests {
    /// Requests in the data path's ring buffer.
    ///
    /// # Errors
    /// When the ring buffer can't be mapped.
    pub(super) fn of(ring: &dyn MapCore) -> Result<Self> {
        let pending = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&pending);
        let mut builder = RingBufferBuilder::new();
        builder.add(ring, move |bytes| {
            sink.borrow_mut().extend(read::<backlog_request>(bytes));
            0
        })?;
        Ok(Self {
            ring: builder.build()?,
            pending,
        })
    }

    /// For `poll`: readable when [`Self::take`] has requests.
    pub fn fd(&self) -> RawFd {
        self.ring.epoll_fd()
    }

    /// The requests since the last call.
    ///
    /// # Errors
    /// When the ring buffer is damaged.
    pub fn take(&self) -> Result<Vec<backlog_request>> {
        self.ring.consume()?;
        Ok(self.pending.take())
    }
}
