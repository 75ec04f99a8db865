// SPDX-License-Identifier: MIT OR Apache-2.0
//! What tells `rxsteer run` from outside to do something else, beside the control socket.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::Result;
use nix::sys::signalfd::SignalFd;

use super::options::Options;

/// See the module's documentation.
pub struct Told<'a> {
    /// Steering stops when this becomes readable.
    pub stop: BorrowedFd<'a>,
    /// The configuration, if there is one.
    pub configuration: Option<Configuration<'a>>,
}

impl<'a> Told<'a> {
    /// To stop, and nothing else.
    pub fn to_stop(stop: BorrowedFd<'a>) -> Self {
        Self {
            stop,
            configuration: None,
        }
    }
}

/// Options that can be read again.
pub struct Configuration<'a> {
    /// Each signal asks for a reload.
    pub hangup: &'a SignalFd,
    /// Reads the options.
    pub read: &'a dyn Fn() -> Result<Options>,
}

impl AsFd for Configuration<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.hangup.as_fd()
    }
}
