// SPDX-License-Identifier: MIT OR Apache-2.0
//! The number of descriptors that this process may have.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::debug;

/// Allows as many as the hard limit: a device takes two and one for each
/// queue, and the soft limit, mostly 1024, is for programs
/// that call select().
pub fn allow_most() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(e) = raised {
        debug!("the limit of descriptors stays: {e}");
    }
}
