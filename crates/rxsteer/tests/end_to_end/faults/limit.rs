// SPDX-License-Identifier: MIT OR Apache-2.0
//! A time limit for a step that may hang, in the kernel too.

use std::fs;
use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// Runs a step. If it takes longer than `limit`, the process ends with a message that names the step
/// and says where its threads wait: a thread that waits in the kernel can't be ended otherwise.
/// Namespaces and children end with the process.
pub fn limited<T>(step: &str, limit: Duration, run: impl FnOnce() -> T) -> T {
    let (done, waits) = channel::<()>();
    let step = step.to_owned();
    let watch = thread::spawn(move || {
        if waits.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            let text = format!(
                "HUNG: {step}: still not done after {limit:?}\n{}",
                threads()
            );
            // The test's output may be captured, and would be lost.
            let _ = std::io::stderr().write_all(text.as_bytes());
            std::process::exit(1);
        }
    });
    let result = run();
    drop(done);
    watch.join().expect("it does not panic");
    result
}

/// The threads of this process, and where they wait in the kernel.
fn threads() -> String {
    let tasks = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let lines = tasks.map(|task| {
        let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let stack = read("stack");
        let stack: Vec<&str> = stack.lines().take(4).collect();
        format!("  {}: {}\n", read("comm").trim(), stack.join(" "))
    });
    lines.collect()
}
