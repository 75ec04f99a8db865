// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signs of life of what takes long with many devices, for whoever watches this process.

use std::sync::OnceLock;

static WATCHER: OnceLock<fn()> = OnceLock::new();

/// From now on [`made`] calls this.
pub fn tell(watcher: fn()) {
    // The first one stays.
    let _ = WATCHER.set(watcher);
}

/// Something is done for one device of many.
pub fn made() {
    if let Some(watcher) = WATCHER.get() {
        watcher();
    }
}
