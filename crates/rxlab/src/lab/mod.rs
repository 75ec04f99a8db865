// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lab: real packets on one machine, in namespaces that vanish with the process.
//!
//! A [`link::Link`] joins a tester and a device under test (terms of RFC 2544). A
//! [`generator::Generator`] sends frames from inside the kernel. A [`nic::Nic`] polls each receive
//! queue on a given CPU, as a NIC does. A [`receiver::Receiver`] is the application;
//! [`migrator::Migrators`] are applications that change their CPU all the time.

pub mod bond;
pub mod bridge;
pub mod client;
pub mod container;
pub mod ethtool;
pub mod filter;
pub mod frame;
pub mod generator;
pub mod hog;
pub mod link;
pub mod migrator;
pub mod netns;
pub mod nic;
pub mod option;
pub mod ports;
pub mod ppp;
pub(crate) mod programs;
pub mod receiver;
pub mod resident;
mod ring;
pub mod rtnl;
pub mod senders;
pub mod server;
pub mod slow;
pub mod snmp;
pub mod sockets;
pub mod stacked;
pub mod stamped;
pub mod stream;
pub mod switches;
pub mod tool;
pub mod tun;
pub mod tx_queue;
pub mod wire;
pub mod witness;
pub mod xdp;

use std::fs;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// Checks that this machine allows a lab: namespaces, veth, BPF.
///
/// # Errors
/// The first missing requirement.
pub fn can_run() -> Result<()> {
    let netns = netns::Netns::new("probe")?;
    let link = link::Link::new(&netns, &netns, &link::LinkConfig::default())?;
    xdp::Xdp::pass(&link.dut)?;
    Ok(())
}

/// CPU time of a thread, ns.
///
/// # Errors
/// When the thread has ended.
pub fn run_ns(thread: Pid) -> Result<u64> {
    let path = format!("/proc/{thread}/schedstat");
    let text = fs::read_to_string(&path).with_context(|| format!("{path}: the thread is gone"))?;
    let run_ns = text.split_whitespace().next();
    run_ns
        .and_then(|run_ns| run_ns.parse().ok())
        .with_context(|| format!("{path} is not what it was"))
}

/// Sets scheduling policy and priority of a thread, 0 for the calling one. Priorities are 1 to 99
/// for real-time policies, 0 for all others (sched(7)).
///
/// # Errors
/// Without CAP_SYS_NICE, or when the thread has ended.
pub(crate) fn schedule(thread: Pid, policy: libc::c_int, priority: libc::c_int) -> Result<()> {
    let param = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: the parameter outlives the call.
    let ret = unsafe { libc::sched_setscheduler(thread.as_raw(), policy, &raw const param) };
    Errno::result(ret).with_context(|| format!("policy {policy} of the scheduler for {thread}"))?;
    Ok(())
}

/// CPU time of the calling thread, ns.
fn thread_cpu_ns() -> Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
    Ok(time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}
