// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps threads on the host under test, apart from generators and clients.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::Result;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use rxsteer::host::cpumask::CpuMask;

use crate::lab::netns::confine;

/// Confines a thread, and threads started by it, to some CPUs until dropped. Of several in one thread,
/// the last one that is left counts.
pub(in crate::bench) struct Confined {
    /// Its number in this thread. Not Send: concerns the thread that created it.
    id: Rc<()>,
}

/// The instances in a thread, and the affinity before the first.
type AllConfined = (Vec<(Rc<()>, CpuMask)>, CpuSet);

thread_local! {
    static CONFINED: RefCell<AllConfined> = RefCell::new((Vec::new(), CpuSet::new()));
}

impl Confined {
    pub(in crate::bench) fn to(cpus: &CpuMask) -> Result<Self> {
        let this = Pid::from_raw(0);
        CONFINED.with_borrow_mut(|(confined, before)| {
            if confined.is_empty() {
                *before = sched_getaffinity(this)?;
            }
            confine(this, cpus)?;
            let id = Rc::new(());
            confined.push((id.clone(), cpus.clone()));
            Ok(Self { id })
        })
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        let this = Pid::from_raw(0);
        CONFINED.with_borrow_mut(|(confined, before)| {
            confined.retain(|(id, _)| !Rc::ptr_eq(id, &self.id));
            let restored = match confined.last() {
                Some((_, cpus)) => confine(this, cpus),
                None => sched_setaffinity(this, before).map_err(Into::into),
            };
            if let Err(e) = restored {
                tracing::warn!("a thread stays on the CPUs of the lab's host: {e:#}");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use rxsteer::host::topology::Topology;

    use super::*;

    #[test]
    fn a_thread_is_confined_until_the_last_testbed_is_gone() {
        let on = || sched_getaffinity(Pid::from_raw(0)).unwrap();
        let before = on();
        let cpu = Topology::host().online().unwrap().first().unwrap();
        let mut one = CpuSet::new();
        one.set(cpu as usize).unwrap();
        let confine = || Confined::to(&CpuMask::from_iter([cpu])).unwrap();
        let (first, second) = (confine(), confine());
        assert_eq!(on(), one);
        assert_eq!(std::thread::spawn(on).join().unwrap(), one);
        drop(first);
        assert_eq!(on(), one);
        drop(second);
        assert_eq!(on(), before);
    }
}
