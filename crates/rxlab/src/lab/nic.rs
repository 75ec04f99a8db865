// SPDX-License-Identifier: MIT OR Apache-2.0
//! A veth end as a NIC: each receive queue is polled by a thread bound to its CPU.
//!
//! Without it, a veth is polled in softirq on the CPU of the sender.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;
use rxsteer::host::kthread;

use super::link::End;
use super::netns;

/// Threaded NAPI on one end, queue i on CPU `cpus[i]`.
pub struct Nic {
    device: String,
    cpus: Vec<u32>,
    /// In the order of their queues.
    threads: Mutex<Vec<Pid>>,
    /// The threads have a real-time priority.
    first: bool,
}

impl Nic {
    /// Enables threaded NAPI and binds the threads.
    ///
    /// # Errors
    /// The end has no NAPI (neither GRO nor an XDP program), or `cpus` lacks an entry per queue.
    pub fn new(end: &End, cpus: &[u32]) -> Result<Self> {
        ensure!(
            cpus.len() == end.queues as usize,
            "{} has {} queues, not {}",
            end.name,
            end.queues,
            cpus.len()
        );
        let path = format!("/sys/class/net/{}/threaded", end.name);
        end.netns
            .run(|| fs::write(&path, "1").context("threaded NAPI cannot be switched on"))?;
        let nic = Self {
            device: end.name.clone(),
            cpus: cpus.to_vec(),
            threads: Mutex::default(),
            first: false,
        };
        nic.bind()?;
        Ok(nic)
    }

    /// Finds and binds the threads again. A veth without GRO creates new ones when an XDP program
    /// is attached.
    pub fn bind(&self) -> Result<()> {
        // NAPI ids ascend in the order of the queues.
        let threads = kthread::numbered(Path::new("/proc"), &format!("napi/{}-", self.device));
        let threads: Vec<Pid> = threads
            .iter()
            .map(|(_, pid)| Pid::from_raw(*pid as i32))
            .collect();
        ensure!(
            threads.len() == self.cpus.len(),
            "{} has {} NAPI threads, not {}: has it GRO or an XDP program?",
            self.device,
            threads.len(),
            self.cpus.len()
        );
        for (&thread, &cpu) in threads.iter().zip(&self.cpus) {
            netns::bind(thread, cpu)?;
            if self.first {
                super::schedule(thread, libc::SCHED_FIFO, 1)?;
            }
        }
        *self.threads() = threads;
        Ok(())
    }

    fn threads(&self) -> MutexGuard<'_, Vec<Pid>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the threads before all ordinary threads of their CPUs (SCHED_FIFO), as interrupts do.
    ///
    /// # Errors
    /// Without CAP_SYS_NICE.
    pub fn before_others(mut self) -> Result<Self> {
        self.first = true;
        self.bind()?;
        Ok(self)
    }

    /// Polls a queue on another CPU from now on, as after a change of its interrupt's affinity.
    pub fn move_to(&mut self, queue: usize, cpu: u32) -> Result<()> {
        let thread = *self.threads().get(queue).context("no such queue")?;
        netns::bind(thread, cpu)?;
        self.cpus[queue] = cpu;
        Ok(())
    }

    /// CPU time used by a queue's thread, ns.
    pub fn cpu_ns(&self, queue: usize) -> Result<u64> {
        let thread = *self.threads().get(queue).context("no such queue")?;
        super::run_ns(thread).context("of the NAPI thread")
    }
}
