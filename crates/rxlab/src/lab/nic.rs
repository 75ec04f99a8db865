// SPDX-License-Identifier: MIT OR Apache-2.0
//! A veth end as a NIC: each receive queue is polled by a thread bound to its CPU.
//!
//! Without it a veth is polled in softirq, on the CPU of whoever sends.

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
    /// The NAPI threads in the order of their queues.
    threads: Mutex<Vec<Pid>>,
    /// Its threads run before all others.
    first: bool,
}

impl Nic {
    /// Switches threaded NAPI on and binds the threads.
    ///
    /// # Errors
    /// The end has no NAPI (neither GRO nor an XDP program), or not one per CPU named.
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

    /// Finds and binds the threads again: without GRO a veth makes new ones when an XDP program
    /// comes.
    pub fn bind(&self) -> Result<()> {
        // NAPI ids count up as queues are made.
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

    /// Lets the threads run before all others on their CPUs, as hardware and interrupts do.
    ///
    /// # Errors
    /// Without CAP_SYS_NICE.
    pub fn before_others(mut self) -> Result<Self> {
        self.first = true;
        self.bind()?;
        Ok(self)
    }

    /// Polls a queue on another CPU from now on, as when its interrupt is moved.
    pub fn move_to(&mut self, queue: usize, cpu: u32) -> Result<()> {
        let thread = *self.threads().get(queue).context("no such queue")?;
        netns::bind(thread, cpu)?;
        self.cpus[queue] = cpu;
        Ok(())
    }

    /// CPU time that a queue's thread has used, ns.
    pub fn cpu_ns(&self, queue: usize) -> Result<u64> {
        let thread = *self.threads().get(queue).context("no such queue")?;
        super::run_ns(thread).context("of the NAPI thread")
    }
}
