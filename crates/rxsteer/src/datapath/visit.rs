// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that run on given CPUs once, within a time limit: a CPU that never runs ordinary threads
//! (a real-time task occupies it) holds up no one.

use std::collections::BTreeMap;
use std::os::unix::thread::JoinHandleExt;
use std::sync::mpsc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use crate::host::cpumask::CpuMask;

/// Time that a CPU has to run the thread.
pub(super) const LIMIT: Duration = Duration::from_millis(300);

/// Runs a thread on each of these CPUs; returns the CPUs that did not run it within `limit`. CPUs
/// that this process may not use are left out.
///
/// # Errors
/// When a thread can't be started.
pub(super) fn visit(cpus: &CpuMask, limit: Duration) -> Result<CpuMask> {
    visit_and(cpus, limit, |_| {})
}

/// As [`visit`]; a thread has arrived when it has called `there` with its CPU.
fn visit_and(
    cpus: &CpuMask,
    limit: Duration,
    there: impl Fn(u32) + Clone + Send + 'static,
) -> Result<CpuMask> {
    let (arrive, arrivals) = mpsc::channel();
    let mut visitors = BTreeMap::new();
    for cpu in cpus.iter() {
        let (go, may_go) = mpsc::channel::<()>();
        let (arrive, there) = (arrive.clone(), there.clone());
        let visitor = Builder::new()
            .name(format!("visit-{cpu}"))
            .spawn(move || {
                if may_go.recv().is_ok() {
                    there(cpu);
                    let _ = arrive.send(cpu);
                }
            })
            .context("visiting CPUs")?;
        // Here and not in the thread: the call of a thread that moves itself to a busy CPU returns
        // only when that CPU runs it.
        if bind(&visitor, [cpu]).is_ok() && go.send(()).is_ok() {
            visitors.insert(cpu, visitor);
        }
    }
    let deadline = Instant::now() + limit;
    while !visitors.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(cpu) = arrivals.recv_timeout(left) else {
            break;
        };
        visitors.remove(&cpu);
    }
    let late: CpuMask = visitors.keys().copied().collect();
    call_back(&visitors, &late);
    Ok(late)
}

/// Moves waiting threads to other CPUs, where they end: a process ends when its last thread has.
fn call_back(visitors: &BTreeMap<u32, JoinHandle<()>>, late: &CpuMask) {
    let Ok(allowed) = sched_getaffinity(Pid::from_raw(0)) else {
        return;
    };
    let elsewhere = (0..CpuSet::count() as u32)
        .filter(|&cpu| allowed.is_set(cpu as usize).unwrap_or(false) && !late.contains(cpu));
    for visitor in visitors.values() {
        // If this process may use late CPUs only, its threads wait there.
        let _ = bind(visitor, elsewhere.clone());
    }
}

/// Binds a thread that has not been joined to these CPUs.
fn bind(thread: &JoinHandle<()>, cpus: impl IntoIterator<Item = u32>) -> nix::Result<()> {
    // SAFETY: zeros are the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in cpus {
        if cpu as usize >= CpuSet::count() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the CPU is within the set.
        unsafe { libc::CPU_SET(cpu as usize, &mut set) };
    }
    // SAFETY: the handle keeps the thread's id valid, and the set has the size given.
    let ret =
        unsafe { libc::pthread_setaffinity_np(thread.as_pthread_t(), size_of_val(&set), &set) };
    match ret {
        0 => Ok(()),
        errno => Err(Errno::from_raw(errno)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Longer than any test waits.
    const LONG: Duration = Duration::from_secs(60);

    fn allowed() -> CpuMask {
        let set = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let cpus = 0..CpuSet::count() as u32;
        cpus.filter(|&cpu| set.is_set(cpu as usize).unwrap())
            .collect()
    }

    #[test]
    fn a_thread_runs_on_each_cpu() {
        let cpus = allowed();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = seen.clone();
        let late = visit_and(&cpus, LONG, move |cpu| {
            // SAFETY: no memory is involved.
            let here = unsafe { libc::sched_getcpu() } as u32;
            noted.lock().unwrap().push((cpu, here));
        });
        assert!(late.unwrap().is_empty());
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), cpus.len());
        assert!(seen.iter().all(|(cpu, here)| cpu == here), "{seen:?}");
    }

    /// The thread of the first CPU waits for longer than the limit.
    #[test]
    fn a_thread_that_never_arrives_ends_the_wait_alone() {
        let first = allowed().first().unwrap();
        let (arrive, arrived) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let cpus = allowed();
        let late = visit_and(&cpus, Duration::from_millis(100), move |cpu| {
            if cpu == first {
                let _ = released.lock().unwrap().recv();
                let _ = arrive.send(cpu);
            }
        });
        assert!(late.unwrap().contains(first));
        // The control: the thread can't have arrived, and arrives when it is let.
        assert_eq!(arrived.try_recv(), Err(mpsc::TryRecvError::Empty));
        drop(release);
        assert_eq!(arrived.recv_timeout(LONG), Ok(first));
    }

    #[test]
    fn cpus_that_do_not_exist_are_left_out() {
        let beyond = CpuMask::from_iter([CpuSet::count() as u32 - 1, CpuSet::count() as u32]);
        assert!(visit(&beyond, LONG).unwrap().is_empty());
    }
}
