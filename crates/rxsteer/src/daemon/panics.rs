// SPDX-License-Identifier: MIT OR Apache-2.0
//! A panic of any thread of `rxsteer run` ends the process as SIGTERM does: every flow returns to
//! INLINE before the programs are detached.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};
use std::sync::OnceLock;
use std::thread;

use anyhow::{Result, anyhow};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The first panic of the process.
static FIRST: OnceLock<String> = OnceLock::new();

/// From now on each panic sends SIGTERM to this process, all of whose threads must block it while
/// one waits for it.
pub fn request_the_stop() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let thread = thread::current();
        let place = info.location().map(ToString::to_string);
        let _ = FIRST.set(format!(
            "thread {} panicked at {}: {}",
            thread.name().unwrap_or("without a name"),
            place.as_deref().unwrap_or("an unknown place"),
            text(info.payload())
        ));
        let _ = kill(Pid::this(), Signal::SIGTERM);
        before(info);
    }));
}

/// The first panic since [`request_the_stop`], in words.
pub fn first() -> Option<&'static str> {
    FIRST.get().map(String::as_str)
}

/// Turns a panic in `run` into an error.
pub(super) fn caught<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    panic::catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|payload| Err(anyhow!("a panic: {}", text(&*payload))))
}

fn text(payload: &(dyn Any + Send)) -> &str {
    let literal = payload.downcast_ref::<&str>().copied();
    let formatted = payload.downcast_ref::<String>().map(String::as_str);
    literal.or(formatted).unwrap_or("no message")
}

/// Panics, in the serving thread or in another, as RXSTEER_PANIC says. Only in debug builds, for
/// the tests.
pub(super) fn provoke() {
    if !cfg!(debug_assertions) {
        return;
    }
    match std::env::var("RXSTEER_PANIC").as_deref() {
        Ok("serving") => panic!("provoked"),
        Ok("other") => drop(thread::spawn(|| panic!("provoked"))),
        _ => {}
    }
}
