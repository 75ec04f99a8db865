// SPDX-License-Identifier: MIT OR Apache-2.0
//! Creation of backlogs, with a thread for each CPU: the kernel waits until the new backlog's thread
//! has run on that CPU, without a time limit, and the wait can't be interrupted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tracing::warn;

use super::backlogs::Backlogs;
use crate::types::backlog_request;

/// Time after which a wait for a CPU is reported.
const REPORT: Duration = Duration::from_secs(1);

/// Time in which threads end that don't wait for their CPU.
const PATIENCE: Duration = Duration::from_millis(100);

/// Creates the backlog of a queue for a CPU.
type Make = dyn Fn(u32, u32) -> Result<()> + Send + Sync;

/// The threads that create backlogs. They end with this value, except those that wait.
pub struct Makers {
    make: Arc<Make>,
    by_cpu: BTreeMap<u32, Maker>,
}

struct Maker {
    requests: mpsc::Sender<u32>,
    /// Requests that are not served yet.
    open: Arc<AtomicU32>,
    /// Since when there have been some, as far as [`Makers::look`] knows.
    since: Option<Instant>,
    reported: bool,
    thread: JoinHandle<()>,
}

impl Makers {
    /// Without threads: the first request for a CPU starts the CPU's.
    pub fn new(backlogs: Arc<Backlogs>) -> Self {
        Self::by(move |queue, cpu| backlogs.make(queue, cpu))
    }

    fn by(make: impl Fn(u32, u32) -> Result<()> + Send + Sync + 'static) -> Self {
        Self {
            make: Arc::new(make),
            by_cpu: BTreeMap::new(),
        }
    }

    /// Creates the backlog soon; logs why it can't be created.
    ///
    /// # Errors
    /// When the CPU's thread can't be started, or has ended.
    pub fn make(&mut self, backlog_request { queue, cpu }: backlog_request) -> Result<()> {
        if !self.by_cpu.contains_key(&cpu) {
            let maker = Maker::start(cpu, Arc::clone(&self.make))?;
            self.by_cpu.insert(cpu, maker);
        }
        let maker = &self.by_cpu[&cpu];
        maker.open.fetch_add(1, Ordering::Relaxed);
        maker
            .requests
            .send(queue)
            .context("a thread that makes backlogs has ended")
    }

    /// Logs CPUs for which a backlog has been waiting for a second. Call this now and then.
    pub fn look(&mut self) {
        for (cpu, maker) in &mut self.by_cpu {
            if maker.waits_for(REPORT) && !std::mem::replace(&mut maker.reported, true) {
                warn!(
                    "CPU {cpu} has not run the thread of its new backlog for a second, so its flows \
                     stay where they are received: see what keeps the CPU (a real-time task?), or \
                     leave it out of --rps-cpus"
                );
            }
        }
    }

    /// Ends the threads; returns the CPUs whose threads still wait.
    pub fn end(self) -> Vec<u32> {
        let deadline = Instant::now() + PATIENCE;
        let threads = self.by_cpu.into_iter();
        let threads: Vec<_> = threads.map(|(cpu, maker)| (cpu, maker.thread)).collect();
        let waiting =
            |(cpu, thread): &(u32, JoinHandle<()>)| (!thread.is_finished()).then_some(*cpu);
        loop {
            let cpus: Vec<u32> = threads.iter().filter_map(waiting).collect();
            if cpus.is_empty() || Instant::now() > deadline {
                return cpus;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Maker {
    fn start(cpu: u32, make: Arc<Make>) -> Result<Self> {
        let (requests, wanted) = mpsc::channel();
        let open = Arc::new(AtomicU32::new(0));
        let served = Arc::clone(&open);
        let thread = Builder::new()
            .name(format!("make-{cpu}"))
            .spawn(move || {
                for queue in wanted {
                    if let Err(e) = make(queue, cpu) {
                        warn!("{e:#}: its flows stay where they are received");
                    }
                    served.fetch_sub(1, Ordering::Relaxed);
                }
            })
            .context("no thread to make backlogs")?;
        Ok(Self {
            requests,
            open,
            since: None,
            reported: false,
            thread,
        })
    }

    /// Whether requests have been open for this time, by the calls of this function.
    fn waits_for(&mut self, time: Duration) -> bool {
        if self.open.load(Ordering::Relaxed) == 0 {
            self.since = None;
            self.reported = false;
            return false;
        }
        self.since.get_or_insert_with(Instant::now).elapsed() >= time
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_cpu_that_never_runs_its_thread_holds_up_no_other() {
        let (tell, made) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let (tell, released) = (Mutex::new(tell), Mutex::new(released));
        let mut makers = Makers::by(move |queue, cpu| {
            if cpu == 1 {
                let _ = released.lock().unwrap().recv();
            }
            let _ = tell.lock().unwrap().send((queue, cpu));
            Ok(())
        });
        for (queue, cpu) in [(0, 1), (1, 1), (0, 2), (1, 2)] {
            makers.make(backlog_request { queue, cpu }).unwrap();
        }
        assert_eq!(made.recv_timeout(LONG), Ok((0, 2)));
        assert_eq!(made.recv_timeout(LONG), Ok((1, 2)));
        // The control: that of CPU 1 waits.
        assert_eq!(made.try_recv(), Err(mpsc::TryRecvError::Empty));
        assert!(makers.by_cpu.get_mut(&1).unwrap().waits_for(Duration::ZERO));
        assert_eq!(makers.end(), [1]);
        drop(release);
        assert_eq!(made.recv_timeout(LONG), Ok((0, 1)));
        assert_eq!(made.recv_timeout(LONG), Ok((1, 1)));
    }

    #[test]
    fn without_a_wait_all_threads_end() {
        let mut makers = Makers::by(|_, _| Ok(()));
        for cpu in 0..4 {
            makers.make(backlog_request { queue: 0, cpu }).unwrap();
        }
        assert_eq!(makers.end(), [0u32; 0]);
    }
}
