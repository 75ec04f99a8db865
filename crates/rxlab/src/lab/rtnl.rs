// SPDX-License-Identifier: MIT OR Apache-2.0
//! One conversation with rtnetlink, from a thread that has no async runtime.

use anyhow::{Context, Result};
use rtnetlink::Handle;

/// Runs `talk` with a connection to the calling thread's network namespace.
pub(super) fn run<T>(talk: impl AsyncFnOnce(Handle) -> T) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("no async runtime for rtnetlink")?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().context("no rtnetlink socket")?;
        tokio::spawn(connection);
        Ok(talk(handle).await)
    })
}
